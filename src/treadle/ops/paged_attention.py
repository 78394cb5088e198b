"""Attention of new tokens over keys and values held in blocks (see `paged_cache`); the options are `attention`'s."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from treadle.ops import native
from treadle.ops.attention import attend
from treadle.ops.native import abi
from treadle.ops.paged_cache import describe, fits_native, gather
from treadle.ops.registry import Operator
from treadle.ops.tensors import like


class _Sequence(NamedTuple):
    """The new rows of one sequence and the blocks that they see, which hold `length` entries laid end to end.

    The entries before `first` belong to nobody any more.
    """

    rows: slice
    blocks: list[int]
    first: int
    length: int


def paged_attention_reference(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    by_rows: bool = False,
) -> Tensor:
    out = like(q)
    for one in _sequences(q, key_cache, tables, starts, lengths, window):
        blocks = torch.tensor(one.blocks, device=q.device)
        keys, values = gather(key_cache, value_cache, blocks, one.length, q.shape[-1])
        step = 1 if by_rows else one.rows.stop - one.rows.start
        for begin in range(one.rows.start, one.rows.stop, step):
            rows = slice(begin, begin + step)
            stop = one.length - (one.rows.stop - rows.stop)
            # A row by itself: neither the rows beside it nor those of another step before it change the shapes.
            first = max(one.first, stop - window) if by_rows and window else one.first
            out[rows], _ = attend(q[rows], keys[first:stop], values[first:stop], scale, window, softcap, sinks)
    return out


PAGED_ATTENTION = Operator(
    "paged_attention",
    "(Tensor q, Tensor key_cache, Tensor value_cache, Tensor tables, Tensor starts, Tensor lengths, float scale, "
    "int window=0, float softcap=0.0, Tensor? sinks=None, bool by_rows=False) -> Tensor",
    paged_attention_reference,
    fake=lambda q, *rest: like(q),
)


def _sequences(
    q: Tensor, cache: Tensor, tables: Tensor, starts: Tensor, lengths: Tensor, window: int
) -> Iterator[_Sequence]:
    """Yield each sequence that has new rows. Raises ValueError where one is outside the cache."""
    size = cache.shape[3]
    bounds = starts.tolist()
    if bounds[0] != 0 or bounds[-1] > q.shape[0]:
        raise ValueError(_outside(q, cache))
    for index, (table, length) in enumerate(zip(tables.tolist(), lengths.tolist(), strict=True)):
        new = bounds[index + 1] - bounds[index]
        skipped = (max(0, length - new - window + 1) if window else 0) // size
        blocks = table[skipped : -(-length // size)]
        if not (0 <= new <= length <= len(table) * size):
            raise ValueError(_outside(q, cache))
        if new == 0:
            continue
        if not all(0 < block < cache.shape[0] for block in blocks):
            raise ValueError(_outside(q, cache))
        first = max(0, length - new - window + 1) if window else 0
        yield _Sequence(
            slice(bounds[index], bounds[index + 1]), blocks, first - skipped * size, length - skipped * size
        )


def _outside(q: Tensor, cache: Tensor) -> str:
    return (
        "a sequence has more new rows than tokens, more tokens than its blocks hold, or a block that does not exist: "
        f"there are {q.shape[0]} rows, and the cache has {cache.shape[0]} blocks of {cache.shape[3]}, the first of "
        "which belongs to nobody"
    )


_paged = abi.function("paged_attention")


def _fits_native(q: Tensor, key_cache: Tensor, value_cache: Tensor, *rest: Any) -> bool:
    sinks = rest[6] if len(rest) > 6 else None
    return (
        abi.on_cpu(q)
        and q.dim() == 3
        and fits_native(q.shape[-1], key_cache, value_cache)
        and q.shape[1] % key_cache.shape[1] == 0
        and all(x.is_cpu for x in rest[:3])
        and (sinks is None or (sinks.is_cpu and sinks.shape == q.shape[1:2]))
    )


@PAGED_ATTENTION.kernel(
    "native",
    native.missing,
    accepts=_fits_native,
    takes="float32 or bfloat16 on CPU; caches of float32, bfloat16, 8 or 4 bits",
)
def _native(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    by_rows: bool = False,
) -> Tensor:
    """Every row goes its own way here, so that `by_rows` asks for nothing more."""
    out, rows = like(q), abi.by_rows(q)
    tables, starts, lengths = (x.to(torch.int32).contiguous() for x in (tables, starts, lengths))
    if starts.shape[0] != tables.shape[0] + 1 or lengths.shape[0] != tables.shape[0]:
        raise ValueError(_outside(q, key_cache))
    floats = None if sinks is None else sinks.float().contiguous()
    arguments = abi.PagedAttention(
        abi.DTYPES[q.dtype],
        describe(q.shape[-1], key_cache, value_cache),
        q.shape[1],
        scale,
        softcap,
        window,
        abi.rows_of(rows),
        abi.rows_of(out),
        None if floats is None else floats.data_ptr(),
        *tables.shape,
        tables.data_ptr(),
        starts.data_ptr(),
        lengths.data_ptr(),
        q.shape[0],
    )
    if not _paged(arguments, q.shape[0], torch.get_num_threads()):
        raise ValueError(_outside(q, key_cache))
    return out


def paged_attention(
    q: Float[Tensor, "T H E"],
    key_cache: Shaped[Tensor, "N K R C"],
    value_cache: Shaped[Tensor, "N K C R"],
    tables: Int[Tensor, "S B"],
    starts: Int[Tensor, " S1"],
    lengths: Int[Tensor, " S"],
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Float[Tensor, " H"] | None = None,
    by_rows: bool = False,
) -> Float[Tensor, "T H E"]:
    """Return causal attention of new rows over cached ones, without a gradient.

    Sequence s has the query rows starts[s] to starts[s + 1]; its entry p lies in block tables[s, p // C] at p % C, and
    its first lengths[s] entries are written, the last of which belong to the query rows. A block that lies before the
    window of all its rows is never read: its table entry may be 0. With `by_rows` each row is computed the same way
    whatever else is in the batch, so that its result is the same bit for bit. Raises ValueError for what is outside.
    """
    return PAGED_ATTENTION.call(
        q, key_cache, value_cache, tables, starts, lengths, scale, window, softcap, sinks, by_rows
    )
