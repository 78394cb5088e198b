"""GGML's tensor types: how many bytes a block takes, and what numbers it stands for.

The formulas are those of ggml's reference implementation, in its order of operations and in fp32, so that the numbers
are the same to the last bit. numpy keeps a multiplication and an addition apart (a fused one would round differently).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Blocks = NDArray[np.uint8]
Values = NDArray[np.float32]
# Blocks of one chunk and their numbers stay in a core's cache, and torch converts so few without threads of its own.
CHUNK_VALUES = 1 << 15
# Below this many numbers a second thread costs more than it saves.
THREAD_VALUES = 1 << 20


@dataclass(frozen=True)
class GgmlType:
    """A tensor type: `size` numbers are stored in a block of `nbytes` bytes.

    `decode(blocks [N, nbytes], out [N, size])` writes the numbers, or is None for a type that cannot be read.
    """

    name: str
    size: int
    nbytes: int
    decode: Callable[[Blocks, Values], None] | None = None


def _half(blocks: Blocks, start: int) -> Values:
    """The fp16 at byte `start` of each block, as fp32 [N, 1]."""
    return blocks[:, start : start + 2].view(np.float16).astype(np.float32)


def _nibbles(packed: Blocks, out: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Write the low halves of `packed` [..., n] to out[..., 0, n], the high halves to out[..., 1, n]."""
    np.bitwise_and(packed, 15, out=out[..., 0, :])
    np.right_shift(packed, 4, out=out[..., 1, :])
    return out


def _q4(blocks: Blocks, start: int) -> NDArray[np.uint8]:
    count = len(blocks)
    return _nibbles(blocks[:, start:], np.empty((count, 2, 16), np.uint8)).reshape(count, 32)


def _q5(blocks: Blocks, start: int) -> NDArray[np.uint8]:
    high = np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little")
    return np.bitwise_or(_q4(blocks, start + 4), np.left_shift(high, 4, out=high), out=high)


def _q8_0(blocks: Blocks, out: Values) -> None:
    out[:] = blocks[:, 2:].view(np.int8)
    np.multiply(out, _half(blocks, 0), out=out)


def _q4_0(blocks: Blocks, out: Values) -> None:
    out[:] = _q4(blocks, 2).view(np.int8) - np.int8(8)
    np.multiply(_half(blocks, 0), out, out=out)


def _q4_1(blocks: Blocks, out: Values) -> None:
    out[:] = _q4(blocks, 4)
    np.multiply(_half(blocks, 0), out, out=out)
    np.add(out, _half(blocks, 2), out=out)


def _q5_0(blocks: Blocks, out: Values) -> None:
    out[:] = _q5(blocks, 2).view(np.int8) - np.int8(16)
    np.multiply(_half(blocks, 0), out, out=out)


def _q5_1(blocks: Blocks, out: Values) -> None:
    out[:] = _q5(blocks, 4)
    np.multiply(_half(blocks, 0), out, out=out)
    np.add(out, _half(blocks, 2), out=out)


def _scales_and_mins(blocks: Blocks) -> tuple[Values, Values]:
    """The eight scales and eight minimums of a Q4_K or Q5_K block, each already times its fp16 factor: [N, 8, 1]."""
    packed = blocks[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 2) & 48)], axis=1).astype(np.float32)
    mins = np.concatenate([second & 63, (third >> 4) | ((second >> 2) & 48)], axis=1).astype(np.float32)
    return (_half(blocks, 0) * scales)[:, :, None], (_half(blocks, 2) * mins)[:, :, None]


def _q4_k(blocks: Blocks, out: Values) -> None:
    count = len(blocks)
    scales, mins = _scales_and_mins(blocks)
    groups = out.reshape(count, 8, 32)
    groups[:] = _nibbles(blocks[:, 16:].reshape(count, 4, 32), np.empty((count, 4, 2, 32), np.uint8)).reshape(-1, 8, 32)
    np.multiply(scales, groups, out=groups)
    np.subtract(groups, mins, out=groups)


def _q5_k(blocks: Blocks, out: Values) -> None:
    count = len(blocks)
    scales, mins = _scales_and_mins(blocks)
    low = _nibbles(blocks[:, 48:].reshape(count, 4, 32), np.empty((count, 4, 2, 32), np.uint8)).reshape(-1, 8, 32)
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    low |= np.left_shift(high, 4, out=high)
    groups = out.reshape(count, 8, 32)
    groups[:] = low
    np.multiply(scales, groups, out=groups)
    np.subtract(groups, mins, out=groups)


def _q6_k(blocks: Blocks, out: Values) -> None:
    count = len(blocks)
    low = _nibbles(blocks[:, :128].reshape(count, 2, 64), np.empty((count, 2, 2, 64), np.uint8)).reshape(-1, 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = blocks[:, 128:192].reshape(count, 2, 1, 32) >> shifts & np.uint8(3)
    low |= np.left_shift(high, 4, out=high)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    groups = out.reshape(count, 16, 16)
    groups[:] = (low.view(np.int8) - np.int8(32)).reshape(count, 16, 16)
    np.multiply(scales[:, :, None], groups, out=groups)


def _f16(blocks: Blocks, out: Values) -> None:
    out[:] = blocks.view(np.float16)


def _bf16(blocks: Blocks, out: Values) -> None:
    np.left_shift(blocks.view(np.uint16), 16, out=out.view(np.uint32), dtype=np.uint32)


# By the number that stands for the type in a file. F32 and the whole numbers need no decoding.
TYPES: dict[int, GgmlType] = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2, _f16),
    2: GgmlType("Q4_0", 32, 18, _q4_0),
    3: GgmlType("Q4_1", 32, 20, _q4_1),
    6: GgmlType("Q5_0", 32, 22, _q5_0),
    7: GgmlType("Q5_1", 32, 24, _q5_1),
    8: GgmlType("Q8_0", 32, 34, _q8_0),
    9: GgmlType("Q8_1", 32, 40),
    10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110),
    12: GgmlType("Q4_K", 256, 144, _q4_k),
    13: GgmlType("Q5_K", 256, 176, _q5_k),
    14: GgmlType("Q6_K", 256, 210, _q6_k),
    15: GgmlType("Q8_K", 256, 292),
    16: GgmlType("IQ2_XXS", 256, 66),
    17: GgmlType("IQ2_XS", 256, 74),
    18: GgmlType("IQ3_XXS", 256, 98),
    19: GgmlType("IQ1_S", 256, 50),
    20: GgmlType("IQ4_NL", 32, 18),
    21: GgmlType("IQ3_S", 256, 110),
    22: GgmlType("IQ2_S", 256, 82),
    23: GgmlType("IQ4_XS", 256, 136),
    24: GgmlType("I8", 1, 1),
    25: GgmlType("I16", 1, 2),
    26: GgmlType("I32", 1, 4),
    27: GgmlType("I64", 1, 8),
    28: GgmlType("F64", 1, 8),
    29: GgmlType("IQ1_M", 256, 56),
    30: GgmlType("BF16", 1, 2, _bf16),
    34: GgmlType("TQ1_0", 256, 54),
    35: GgmlType("TQ2_0", 256, 66),
    39: GgmlType("MXFP4", 32, 17),
    40: GgmlType("NVFP4", 64, 36),
    41: GgmlType("Q1_0", 128, 18),
}
PLAIN = {
    "F32": torch.float32,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
READABLE = sorted({kind.name for kind in TYPES.values() if kind.decode} | set(PLAIN))


def dequantize(raw: torch.Tensor, kind: GgmlType, out: torch.Tensor) -> None:
    """Write the numbers of the blocks `raw` (uint8, flat) to `out` (flat, contiguous, any floating dtype).

    Works in chunks that fit in cache, on as many threads as torch uses; scratch memory is under 2 MiB a thread.
    """
    assert kind.decode is not None
    assert out.is_contiguous() and out.numel() * kind.nbytes == raw.numel() * kind.size
    blocks = raw.numpy().reshape(-1, kind.nbytes)
    step = max(1, CHUNK_VALUES // kind.size)
    if kind.size == 1:  # a block is one number: take many as one row, so that numpy's inner loops are long
        blocks = blocks.reshape(-1)
    target = out.view(-1)
    direct = target.numpy() if out.dtype == torch.float32 else None

    def work(start: int, stop: int) -> None:
        scratch = None if direct is not None else np.empty(step * kind.size, np.float32)
        for first in range(start, stop, step):
            last = min(first + step, stop)
            values = slice(first * kind.size, last * kind.size)
            chunk = direct[values] if direct is not None else scratch[: (last - first) * kind.size]  # type: ignore
            with np.errstate(all="ignore"):  # a damaged scale may be infinite: its numbers are then what they are
                if kind.size == 1:
                    kind.decode(blocks[first * kind.nbytes : last * kind.nbytes], chunk)
                else:
                    kind.decode(blocks[first:last], chunk.reshape(-1, kind.size))
            if direct is None:
                target[values] = torch.from_numpy(chunk)

    count = target.numel() // kind.size
    threads = min(torch.get_num_threads(), max(1, target.numel() // THREAD_VALUES))
    if threads == 1:
        work(0, count)
        return
    edges = [count * part // threads for part in range(threads + 1)]
    # A pool of this call alone: one that outlived it would be dead in a forked child.
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work, start, stop) for start, stop in itertools.pairwise(edges)]:
            done.result()
