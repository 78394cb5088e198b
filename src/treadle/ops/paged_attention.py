"""Attention of new tokens over keys and values held in blocks; the options are those of `attention`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from treadle.ops.attention import attend
from treadle.ops.paged_cache import gather
from treadle.ops.registry import Operator
from treadle.ops.tensors import like


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
    for rows, first, blocks in _sequences(q, key_cache, tables, starts, lengths, window):
        index, length = torch.tensor(blocks, device=q.device), first[1]
        keys, values = (gather(cache, index).transpose(0, 1)[first[0] : length] for cache in (key_cache, value_cache))
        out[rows], _ = attend(q[rows], keys, values, scale, window, softcap, sinks)
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
) -> Iterator[tuple[slice, tuple[int, int], list[int]]]:
    """Yield (rows, (first, stop), blocks) of each sequence that has new rows.

    Its rows see entries first .. stop - 1 of these blocks laid end to end. Raises ValueError where one is outside.
    """
    size = cache.shape[2]
    bounds = starts.tolist()
    if bounds[0] != 0 or bounds[-1] > q.shape[0]:
        raise ValueError(f"starts must rise from 0 to the number of rows ({q.shape[0]}), got {bounds}")
    for index, (table, length) in enumerate(zip(tables.tolist(), lengths.tolist(), strict=True)):
        new = bounds[index + 1] - bounds[index]
        first = max(0, length - new - window + 1) if window else 0
        blocks = table[first // size : -(-length // size)]
        if not (0 <= new <= length <= len(table) * size and all(0 < block < cache.shape[0] for block in blocks)):
            raise ValueError(
                f"sequence {index} has {new} new rows and {length} in all in the blocks {blocks}; "
                f"the cache has {cache.shape[0]} blocks of {size}, of which block 0 belongs to nobody"
            )
        if new:
            skipped = first // size * size
            yield slice(bounds[index], bounds[index + 1]), (first - skipped, length - skipped), blocks


def paged_attention(
    q: Float[Tensor, "T H E"],
    key_cache: Float[Tensor, "N K C E"],
    value_cache: Float[Tensor, "N K C E"],
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
    whatever else is in the batch, so that its result is the same bit for bit.
    """
    return PAGED_ATTENTION.call(
        q, key_cache, value_cache, tables, starts, lengths, scale, window, softcap, sinks, by_rows
    )
