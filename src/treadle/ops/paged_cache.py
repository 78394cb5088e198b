"""Keys and values in blocks of C entries (tokens), as floats or quantized to 8 or 4 bits.

An entry's record of one head has R elements: the head itself in a float cache, bytes in a quantized one (torch.uint8).
Keys are [N, K, R, C], so that a vector holds the same element of several keys; values are [N, K, C, R]. Entry o of
block n is row n * C + o.

A quantized record holds the codes, then one byte of scale for each group, then one byte of zero point for each. With
8 bits the head is one group; with 4 bits there is a group for every 32 elements, and byte i holds element i in its low
half and element E / 2 + i in its high half. An element is scale * (code - zero); scales have 8 steps for each power of
two from 2^-20 on (255: not a number), zero points count whole codes (8 bits) or sixteenths of one (4 bits). What is
quantized is the head turned by an orthonormal Hadamard matrix, so that a large channel spreads over all of them
(QuaRot, Ashkboos et al. 2024, arXiv 2404.00456).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, Shaped, UInt8
from torch import Tensor

from treadle.ops import native
from treadle.ops.native import abi
from treadle.ops.registry import Operator

GROUP_SIZE = 32
SCALE_BIAS, MOST_SCALE, NAN_SCALE = 856, 254, 255
# As in native/paged.h.
MOST_HEAD_SIZE = 512
CACHE_TYPES = {torch.float32: 0, torch.bfloat16: 1}


class Record(NamedTuple):
    """The form of a quantized record of a head of `size` elements."""

    size: int
    bits: int

    @property
    def group(self) -> int:
        """The elements of a group, the last of which may be smaller."""
        if self.bits == 8:
            return self.size
        even = -(-self.size // max(1, self.size // GROUP_SIZE))
        return even + even % 2

    @property
    def groups(self) -> int:
        return -(-self.size // self.group)

    @property
    def codes(self) -> int:
        """The bytes of codes."""
        return self.size * self.bits // 8

    @property
    def bytes(self) -> int:
        return self.codes + 2 * self.groups


def record_of(size: int, key_cache: Shaped[Tensor, "N K R C"], value_cache: Shaped[Tensor, "N K C R"]) -> Record | None:
    """Return the form of the caches' records, None for floats. Raises ValueError where heads of that size have none."""
    blocks, kv_heads, elements, entries = key_cache.shape
    if value_cache.shape != (blocks, kv_heads, entries, elements) or value_cache.dtype != key_cache.dtype:
        raise ValueError(
            f"a cache of values {tuple(value_cache.shape)} does not fit one of keys {tuple(key_cache.shape)}"
        )
    if key_cache.dtype != torch.uint8:
        if elements != size:
            raise ValueError(f"a head of {size} elements does not fit a cache for heads of {elements}")
        return None
    for bits in (8, 4):
        if (record := Record(size, bits)).bytes == elements and (bits == 8 or size % 2 == 0):
            return record
    raise ValueError(f"a head of {size} elements has no quantized record of {elements} bytes")


@functools.cache
def _hadamard(size: int) -> Float[Tensor, "E E"]:
    """As many Hadamard matrices of the largest power of two that divides the size as fit, side by side."""
    span = size & -size
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < span:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return torch.block_diag(*[matrix * span**-0.5] * (size // span))


def turned(x: Float[Tensor, "*rows E"]) -> Float[Tensor, "*rows E"]:
    """Return x times the Hadamard matrix, which is its own inverse."""
    return x @ _hadamard(x.shape[-1]).to(x)


def _scales(codes: Tensor) -> Tensor:
    """Return the floats that scale bytes stand for."""
    floats = (codes.int() + SCALE_BIAS).bitwise_left_shift(20).view(torch.float32)
    return floats.masked_fill(codes == NAN_SCALE, torch.nan)


def _quantized_group(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scale bytes and zero bytes of groups [*rows, elements] in fp32.

    4 bits are dear: of three scales (the range's own and two that cut a little off) and three zero points (which end is
    cut), the pair with the least squared error is taken.
    """
    most, steps = (255, 1) if bits == 8 else (15, 16)
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    least = ((high - low) / most).contiguous()
    # The least scale that is no less: the bits of floats are in the order of the floats.
    first = (((least.view(torch.int32) + (1 << 20) - 1) >> 20) - SCALE_BIAS).clamp(min=0)
    # What is beyond every scale, or not a number, becomes so.
    first = torch.where(least <= _scales(torch.tensor(MOST_SCALE)), first, NAN_SCALE)
    best = torch.full_like(low, torch.inf)
    codes, scale, zero = torch.zeros_like(x), first, torch.zeros_like(low)
    for fewer in (0,) if bits == 8 else (0, 1, 2):
        tried = torch.where(first == NAN_SCALE, first, (first - fewer).clamp(min=0))
        size = _scales(tried)
        for cut in (0.5,) if bits == 8 else (0.0, 0.5, 1.0):
            start = low + (high - low - most * size) * cut
            offset = ((-start / size).clamp(0, most) * steps).round() / steps
            rounded = (x / size + offset).clamp(0, most).round()
            error = (x - (rounded - offset) * size).square().sum(-1, keepdim=True)
            better = error < best
            best = torch.where(better, error, best)
            codes = torch.where(better, rounded, codes)
            scale, zero = torch.where(better, tried, scale), torch.where(better, offset, zero)
    return codes.to(torch.uint8), scale.to(torch.uint8), (zero * steps).to(torch.uint8)


def quantized(x: Float[Tensor, "*rows E"], record: Record) -> UInt8[Tensor, "*rows R"]:
    """Return the records of heads."""
    parts = [_quantized_group(group, record.bits) for group in turned(x.float()).split(record.group, -1)]
    codes, scales, zeros = (torch.cat(part, -1) for part in zip(*parts, strict=True))
    if record.bits == 4:
        low, high = codes.chunk(2, -1)
        codes = low | high << 4
    return torch.cat((codes, scales, zeros), -1)


def dequantized(records: UInt8[Tensor, "*rows R"], record: Record) -> Float[Tensor, "*rows E"]:
    """Return the heads that records stand for, in fp32."""
    codes, scales, zeros = records.split((record.codes, record.groups, record.groups), -1)
    if record.bits == 4:
        codes = torch.cat((codes & 15, codes >> 4), -1)
    elements = torch.arange(record.size, device=records.device) // record.group
    scale, zero = _scales(scales)[..., elements], zeros.float()[..., elements] / (1 if record.bits == 8 else 16)
    return turned(scale * (codes.float() - zero))


def _raw(cache: Tensor) -> Tensor:
    """Return the cache as a dtype that can be indexed: PyTorch cannot index 8-bit floats everywhere."""
    return cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    if not dtype.is_floating_point or dtype.itemsize > 1:
        return x.to(dtype)
    limit = torch.finfo(dtype).max  # beyond it the conversion would give NaN
    return x.float().clamp(-limit, limit).to(dtype)


def paged_write_reference(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, rows: Tensor) -> None:
    record = record_of(key.shape[-1], key_cache, value_cache)
    blocks, size = key_cache.shape[0], key_cache.shape[3]
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < blocks * size:
        raise ValueError(_outside(key_cache))
    block, entry = rows // size, rows % size
    records = [
        quantized(new, record) if record else _raw(_cast(new, cache.dtype))
        for new, cache in ((key, key_cache), (value, value_cache))
    ]
    _raw(key_cache)[block, :, :, entry] = records[0]
    _raw(value_cache)[block, :, entry] = records[1]


PAGED_WRITE = Operator(
    "paged_write",
    "(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor rows) -> ()",
    paged_write_reference,
    fake=lambda *_: None,
)


def _outside(cache: Tensor) -> str:
    return f"a row lies outside the cache, which has {cache.shape[0]} blocks of {cache.shape[3]}"


def fits_native(size: int, key_cache: Tensor, value_cache: Tensor) -> bool:
    """Return whether the native kernels can work on these caches."""
    return (
        key_cache.is_cpu
        and value_cache.is_cpu
        and key_cache.dtype == value_cache.dtype
        and (key_cache.dtype in CACHE_TYPES or key_cache.dtype == torch.uint8)
        and key_cache.dim() == 4
        and value_cache.shape == (*key_cache.shape[:2], key_cache.shape[3], key_cache.shape[2])
        and key_cache.is_contiguous()
        and value_cache.is_contiguous()
        and 0 < size <= MOST_HEAD_SIZE
    )


def describe(size: int, key_cache: Tensor, value_cache: Tensor) -> Any:
    """Return what the native kernels are told of caches that fit."""
    blocks, kv_heads, _, block_size = key_cache.shape
    record = record_of(size, key_cache, value_cache)
    kind = CACHE_TYPES[key_cache.dtype] if record is None else {8: 2, 4: 3}[record.bits]
    return abi.PagedCache(kind, blocks, kv_heads, block_size, size, key_cache.data_ptr(), value_cache.data_ptr())


_write = abi.function("paged_write")


@PAGED_WRITE.kernel(
    "native",
    native.missing,
    accepts=lambda key, value, key_cache, value_cache, rows: (
        abi.on_cpu(key, value)
        and key.dtype == value.dtype
        and key.dim() == 3
        and key.shape == value.shape
        and key.shape[:1] == rows.shape
        and key.shape[1] == key_cache.shape[1]
        and rows.dtype == torch.int64
        and rows.is_cpu
        and fits_native(key.shape[-1], key_cache, value_cache)
    ),
    takes="float32 or bfloat16 on CPU; caches of float32, bfloat16, 8 or 4 bits",
)
def _native_write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, rows: Tensor) -> None:
    key, value, rows = abi.by_rows(key), abi.by_rows(value), rows.contiguous()
    arguments = abi.PagedWrite(
        abi.DTYPES[key.dtype],
        describe(key.shape[-1], key_cache, value_cache),
        abi.rows_of(key),
        abi.rows_of(value),
        rows.data_ptr(),
    )
    if not _write(arguments, rows.shape[0], torch.get_num_threads()):
        raise ValueError(_outside(key_cache))


def paged_write(
    key: Float[Tensor, "T K E"],
    value: Float[Tensor, "T K E"],
    key_cache: Shaped[Tensor, "N K R C"],
    value_cache: Shaped[Tensor, "N K C R"],
    rows: Int[Tensor, "T"],
) -> None:
    """Write the keys and values of T tokens into these rows of the caches, as the caches hold them.

    Raises ValueError where a row lies outside the cache.
    """
    PAGED_WRITE.call(key, value, key_cache, value_cache, rows)


def gather(
    key_cache: Shaped[Tensor, "N K R C"],
    value_cache: Shaped[Tensor, "N K C R"],
    blocks: Int[Tensor, "B"],
    length: int,
    size: int,
) -> tuple[Float[Tensor, "L K E"], Float[Tensor, "L K E"]]:
    """Return the keys and values of the first `length` entries of blocks laid end to end; heads are of `size`."""
    record = record_of(size, key_cache, value_cache)
    keys = _raw(key_cache).transpose(0, 1).index_select(1, blocks).transpose(2, 3).flatten(1, 2)[:, :length]
    values = _raw(value_cache).transpose(0, 1).index_select(1, blocks).flatten(1, 2)[:, :length]
    found = []
    for x in (keys, values):
        if record is not None:
            x = dequantized(x, record)
        elif x.dtype != key_cache.dtype:
            x = x.contiguous().view(key_cache.dtype).float()
        found.append(x.transpose(0, 1))
    return found[0], found[1]
