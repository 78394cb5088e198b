"""Attention of new tokens over a cache of keys and values; the options are those of `attention`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from treadle.ops import native
from treadle.ops.attention import attend, fits_flash
from treadle.ops.native import abi
from treadle.ops.registry import Operator
from treadle.ops.tensors import like

# From this many new rows on, a sequence's attention is a matrix product rather than a read of its cache.
LONG_ROWS = 4
# As in native/attention.h.
MOST_HEAD_SIZE = 512


def cached_attention_reference(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    out = like(q)
    for rows, slot, length in _sequences(q, key_cache, slots, starts, lengths):
        keys, values = key_cache[slot, :length], value_cache[slot, :length]
        out[rows], _ = attend(q[rows], keys, values, scale, window, softcap, sinks)
    return out


CACHED_ATTENTION = Operator(
    "cached_attention",
    "(Tensor q, Tensor key_cache, Tensor value_cache, Tensor slots, Tensor starts, Tensor lengths, float scale, "
    "int window=0, float softcap=0.0, Tensor? sinks=None) -> Tensor",
    cached_attention_reference,
    fake=lambda q, *rest: like(q),
)


def _sequences(
    q: Tensor, cache: Tensor, slots: Tensor, starts: Tensor, lengths: Tensor
) -> Iterator[tuple[slice, int, int]]:
    """Yield (rows, slot, length) of each sequence that has new rows; raises ValueError where one is out of bounds."""
    bounds = starts.tolist()
    if bounds[0] != 0 or bounds[-1] > q.shape[0]:
        raise ValueError(f"starts must rise from 0 to the number of rows ({q.shape[0]}), got {bounds}")
    for index, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        new = bounds[index + 1] - bounds[index]
        if not (0 <= slot < cache.shape[0] and 0 <= new <= length <= cache.shape[1]):
            raise ValueError(
                f"sequence {index} has {new} new rows and {length} in all in slot {slot}; "
                f"the cache has {cache.shape[0]} slots of {cache.shape[1]}"
            )
        if new:
            yield slice(bounds[index], bounds[index + 1]), slot, length


def _fits_flash(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> bool:
    return fits_flash(q, key_cache, value_cache, 0, 0, softcap, sinks)


@CACHED_ATTENTION.kernel(
    "pytorch_flash", needs=lambda: "", accepts=_fits_flash, takes="float32 or bfloat16 on CPU; no soft cap, no sinks"
)
def _flash(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    window: int = 0,
    *_: Any,
) -> Tensor:
    out = like(q)
    for rows, slot, length in _sequences(q, key_cache, slots, starts, lengths):
        out[rows] = _flash_one(q[rows], key_cache[slot, :length], value_cache[slot, :length], scale, window)
    return out


def _flash_one(q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int) -> Tensor:
    """One row needs no mask: a window only shortens what it reads. More rows with a past do."""
    new, length = q.shape[0], keys.shape[0]
    # The first key that the first row sees.
    first = max(0, length - new - window + 1) if window else 0
    mask = None
    if new > 1 and (new < length or 0 < window < length):
        row = torch.arange(length - new, length, device=q.device)[:, None]
        column = torch.arange(first, length, device=q.device)
        seen = column <= row
        if window:
            seen &= column > row - window
        mask = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, -torch.inf)
    part, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.transpose(0, 1)[None],
        keys[first:].transpose(0, 1)[None],
        values[first:].transpose(0, 1)[None],
        0.0,
        new > 1 and mask is None,
        attn_mask=mask,
        scale=scale,
    )
    return part[0].transpose(0, 1)


_cached = abi.function("cached_attention")


def _fits_native(q: Tensor, key_cache: Tensor, value_cache: Tensor, *rest: Any) -> bool:
    sinks = rest[6] if len(rest) > 6 else None
    return (
        abi.on_cpu(q, key_cache, value_cache)
        and q.dtype == key_cache.dtype == value_cache.dtype
        and q.dim() == 3
        and key_cache.dim() == 4
        and key_cache.shape == value_cache.shape
        and q.shape[-1] == key_cache.shape[-1] <= MOST_HEAD_SIZE
        and q.shape[1] % key_cache.shape[2] == 0
        and key_cache.is_contiguous()
        and value_cache.is_contiguous()
        and (sinks is None or (sinks.is_cpu and sinks.shape == q.shape[1:2]))
    )


@CACHED_ATTENTION.kernel("native", native.missing, accepts=_fits_native, takes="float32 or bfloat16 on CPU")
def _native(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Sequences of few new rows all go to the native kernel at once, those of more one by one to matrix products."""
    out = like(q)
    short: list[tuple[int, int, int]] = []  # row, slot, how many keys it sees
    for rows, slot, length in _sequences(q, key_cache, slots, starts, lengths):
        new = rows.stop - rows.start
        if new < LONG_ROWS:
            short += [(rows.start + i, slot, length - new + i + 1) for i in range(new)]
            continue
        keys, values = key_cache[slot, :length], value_cache[slot, :length]
        if softcap == 0.0 and sinks is None:
            out[rows] = _flash_one(q[rows], keys, values, scale, window)
        else:
            out[rows], _ = attend(q[rows], keys, values, scale, window, softcap, sinks)
    if short:
        q, table = abi.by_rows(q), torch.tensor(short)
        sinks = None if sinks is None else sinks.float().contiguous()
        _, room, kv_heads, size = key_cache.shape
        arguments = abi.CachedAttention(
            abi.DTYPES[q.dtype],
            q.shape[1],
            kv_heads,
            size,
            room,
            scale,
            softcap,
            window,
            abi.rows_of(q),
            abi.rows_of(out),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            table.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
        )
        _cached(arguments, len(short), torch.get_num_threads())
    return out


def cached_attention(
    q: Float[Tensor, "T H E"],
    key_cache: Float[Tensor, "N C K E"],
    value_cache: Float[Tensor, "N C K E"],
    slots: Int[Tensor, " S"],
    starts: Int[Tensor, " S1"],
    lengths: Int[Tensor, " S"],
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Float[Tensor, " H"] | None = None,
) -> Float[Tensor, "T H E"]:
    """Return causal attention of new rows over cached ones, without a gradient.

    Sequence s has the query rows starts[s] to starts[s + 1]; its keys and values are the first lengths[s] of cache slot
    slots[s], the last of which belong to the query rows and are already written.
    """
    return CACHED_ATTENTION.call(q, key_cache, value_cache, slots, starts, lengths, scale, window, softcap, sinks)
