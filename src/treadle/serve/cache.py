"""Keys and values of running sequences: one slot a sequence, each with room for the longest one.

Memory is bounded when the engine starts, and on a CPU it is claimed only as it is first written (the operating system
hands out zeroed pages), so that short sequences cost little however long the longest may be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from treadle import ops
from treadle.config import UserError
from treadle.config.progress import amount_text
from treadle.device import memory
from treadle.model.context import RopeTables
from treadle.model.spec import AttentionSpec, ModelSpec, RopeSpec

DEFAULT_SEQS, MIN_DEFAULT_SEQS = 16, 4
MEMORY_SHARE = 0.8  # of what is available once the weights are loaded; the rest is for activations
ALIGNMENT = 64


@dataclass(frozen=True)
class Capacity:
    """How many sequences of how many tokens fit, the bytes that they take when all are full, what was reduced."""

    seqs: int
    length: int
    bytes: int
    notes: tuple[str, ...] = ()


def available_memory(device: torch.device) -> int:
    """Return the bytes that may still be taken on `device`."""
    if device.type in ("cpu", "mps"):  # MPS shares the machine's memory
        return memory().available
    return torch.accelerator.get_memory_info(device)[0]


def bytes_per_token(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Return the bytes that one token's keys and values take in all layers."""
    elements = sum(2 * layer.attention.kv_heads * layer.attention.head_size for layer in spec.layers)
    return elements * dtype.itemsize


def fit_capacity(
    spec: ModelSpec, dtype: torch.dtype, available: int, max_seqs: int | None = None, max_length: int | None = None
) -> Capacity:
    """Return how much cache to have in `available` bytes of memory.

    What the user named is kept or refused with a UserError; what they left open (None) is reduced until it fits, which
    the notes say.
    """
    if max_seqs is not None and max_seqs < 1:
        raise UserError(f"max_num_seqs must be at least 1, it is {max_seqs}")
    if max_length is not None and not 1 <= max_length <= spec.max_positions:
        raise UserError(
            f"max_model_len must lie between 1 and the model's context of {spec.max_positions} tokens, "
            f"it is {max_length}"
        )
    each = bytes_per_token(spec, dtype)
    room = int(available * MEMORY_SHARE) // each  # in tokens
    seqs, length = max_seqs or DEFAULT_SEQS, max_length or spec.max_positions
    notes = []
    if max_seqs is None and seqs * length > room:
        seqs = max(MIN_DEFAULT_SEQS, min(seqs, room // length))
        if seqs < DEFAULT_SEQS:
            notes.append(f"{seqs} sequences at once instead of {DEFAULT_SEQS}, to fit the available memory")
    if max_length is None and seqs * length > room:
        length = room // seqs
        notes.append(f"sequences of up to {length} tokens instead of {spec.max_positions}, to fit the available memory")
    if length < 1 or seqs * length > room:
        length = max(length, 1)
        raise UserError(
            f"a key-value cache of {seqs} sequences of {length} tokens takes {amount_text(seqs * length * each, 'B')}, "
            f"but only {amount_text(int(available * MEMORY_SHARE), 'B')} of memory can be given to it; "
            f"set a smaller max_model_len or max_num_seqs ({room} tokens fit in all)"
        )
    return Capacity(seqs, length, seqs * length * each, tuple(notes))


class KeyValueCache:
    """The tensors: for each layer keys and values of shape [N slots, C tokens, K, E], zero where never written."""

    def __init__(
        self, spec: ModelSpec, slots: int, length: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self.slots, self.length = slots, length
        shapes = [(slots, length, layer.attention.kv_heads, layer.attention.head_size) for layer in spec.layers]
        self.keys = [_zeros(shape, dtype, torch.device(device)) for shape in shapes]
        self.values = [_zeros(shape, dtype, torch.device(device)) for shape in shapes]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros writes every page, numpy's calloc none.
    size = math.prod(shape) * dtype.itemsize
    pages = np.zeros(size + ALIGNMENT, dtype=np.uint8)
    offset = -pages.ctypes.data % ALIGNMENT
    return torch.from_numpy(pages[offset : offset + size]).view(dtype).view(shape)


class Slots:
    """Which slots are free and which tokens each still holds, so that a conversation can go on where it was."""

    def __init__(self, count: int, reuse: bool = False) -> None:
        self.reuse = reuse
        self._free: dict[int, list[int]] = {slot: [] for slot in range(count)}  # oldest first

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Return a free slot, and how many of the leading `tokens` it holds (at most all but the last)."""
        best, held = next(reversed(self._free)), 0  # the last freed: its memory is already claimed
        if self.reuse:
            best = next(iter(self._free))  # the one that was of no use for the longest time
            for slot, content in self._free.items():
                common = _common_prefix(content, tokens)
                if common > held:
                    best, held = slot, common
        del self._free[best]
        return best, min(held, len(tokens) - 1)

    def give_back(self, slot: int, content: Sequence[int]) -> None:
        """Free `slot`, whose first len(content) tokens are computed."""
        assert slot not in self._free
        self._free[slot] = list(content) if self.reuse else []


def length_dependent_ropes(spec: ModelSpec) -> tuple[RopeSpec, ...]:
    """Return the rotary embeddings of a model whose angles depend on how long the sequence is."""
    ropes = (layer.attention.rope for layer in spec.layers)
    return tuple(dict.fromkeys(rope for rope in ropes if rope is not None and rope.kind in ("dynamic", "longrope")))


def rope_regime(ropes: Sequence[RopeSpec], length: int) -> tuple[int, ...]:
    """Return a value that changes with `length` wherever the angles of tokens already seen do."""
    regime = []
    for rope in ropes:
        if rope.kind == "dynamic":
            regime.append(max(length, rope.max_positions))
        else:
            trained = rope.parameter("original_max_position_embeddings", rope.max_positions)
            regime.append(int(length > trained))
    return tuple(regime)


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))


@dataclass(frozen=True)
class Chunk:
    """Tokens of one sequence to compute in a step; the `past` tokens before them are in its slot."""

    slot: int
    past: int
    tokens: Sequence[int]


class CachedContext:
    """The context of a step (see model/context.py): new tokens of several sequences, their past in the cache."""

    def __init__(self, cache: KeyValueCache, chunks: Sequence[Chunk], device: torch.device | str = "cpu") -> None:
        assert chunks and all(chunk.tokens for chunk in chunks)
        assert all(chunk.past + len(chunk.tokens) <= cache.length for chunk in chunks)
        self.cache = cache
        counts = [len(chunk.tokens) for chunk in chunks]
        totals = [chunk.past + count for chunk, count in zip(chunks, counts, strict=True)]
        starts, positions, rows, lengths = [0], [], [], []
        for chunk, total in zip(chunks, totals, strict=True):
            starts.append(starts[-1] + len(chunk.tokens))
            positions += range(chunk.past, total)
            rows += range(chunk.slot * cache.length + chunk.past, chunk.slot * cache.length + total)
            lengths += [total] * len(chunk.tokens)

        def tensor(values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        self.slots: Int[Tensor, "S"] = tensor([chunk.slot for chunk in chunks])
        self.starts: Int[Tensor, "S_plus_1"] = tensor(starts, torch.int32)
        self.lengths: Int[Tensor, "S"] = tensor(totals)
        self.last_rows: Int[Tensor, "S"] = self.starts[1:].long() - 1
        self._rows = tensor(rows)  # where each new token lies in the slots laid end to end
        self._fresh = max(counts) if all(chunk.past == 0 for chunk in chunks) and max(counts) > 1 else 0
        self.rope = RopeTables(tensor(positions), tensor(lengths))

    def attend(
        self,
        layer: int,
        spec: AttentionSpec,
        query: Float[Tensor, "T H E"],
        key: Float[Tensor, "T K E"],
        value: Float[Tensor, "T K E"],
        sinks: Float[Tensor, "H"] | None,
    ) -> Float[Tensor, "T H E"]:
        """Write the new keys and values into the cache, then attend over each sequence's own."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys.flatten(0, 1).index_copy_(0, self._rows, key.to(keys.dtype))
        values.flatten(0, 1).index_copy_(0, self._rows, value.to(values.dtype))
        if self._fresh:  # whole sequences: what training runs
            return ops.packed_attention(
                query, key, value, self.starts, self._fresh, spec.scale, spec.window, spec.softcap, sinks
            )
        return ops.cached_attention(
            query, keys, values, self.slots, self.starts, self.lengths, spec.scale, spec.window, spec.softcap, sinks
        )
