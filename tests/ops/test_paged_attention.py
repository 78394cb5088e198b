"""Attention over blocks against the dense float64 attention of test_attention.py."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from treadle.ops import paged_attention, paged_write

from .compare import assert_close
from .test_attention import SCALE, dense, starts_of

OPTIONS = [{}, {"window": 3}, {"softcap": 1.5}, {"sinks": True}, {"window": 7, "softcap": 1.5, "sinks": True}]
# New rows of each sequence: single ones, few, none at all, and many beside single ones.
NEWS = [[1], [1, 1, 1], [3, 1, 0, 3], [0], [4, 1, 13, 2]]
BLOCK = 4


class Paged:
    """Sequences whose keys and values lie in blocks in random order; what no row may read is undefined (NaN)."""

    def __init__(
        self,
        news: list[int],
        pasts: list[int],
        dtype: torch.dtype,
        heads: int = 6,
        kv_heads: int = 2,
        size: int = 12,
        block: int = BLOCK,
        window: int = 0,
    ) -> None:
        self.starts, self.lengths = starts_of(news), [n + p for n, p in zip(news, pasts, strict=True)]
        self.q = torch.randn(sum(news), heads, size).to(dtype)
        self.keys = [torch.randn(length, kv_heads, size).to(dtype) for length in self.lengths]
        self.values = [torch.randn(length, kv_heads, size).to(dtype) for length in self.lengths]
        counts = [-(-length // block) for length in self.lengths]
        order = (torch.randperm(sum(counts) + 2) + 1).int()
        shape = len(order) + 1, kv_heads, block, size
        self.cache = [torch.full(shape, torch.nan, dtype=dtype) for _ in range(2)]
        self.tables = torch.zeros(len(news), max(counts, default=0) + 1, dtype=torch.int32)
        for index, count in enumerate(counts):
            blocks, order = order[:count], order[count:]
            self.tables[index, :count] = blocks
            rows = blocks.repeat_interleave(block)[: self.lengths[index]] * block
            rows = rows + torch.arange(self.lengths[index]) % block
            paged_write(self.keys[index], self.values[index], *self.cache, rows.long())
            if window:  # the blocks that no new row sees are gone
                gone = max(0, pasts[index] - window + 1) // block
                self.tables[index, :gone] = 0
                for cache in self.cache:
                    cache[blocks[:gone].long()] = torch.nan

    def attended(self, **options: Any) -> Tensor:
        starts, lengths = torch.tensor(self.starts).int(), torch.tensor(self.lengths).int()
        return paged_attention(self.q, *self.cache, self.tables, starts, lengths, SCALE, **options)

    def check(self, **options: Any) -> None:
        out = self.attended(**options)
        options.pop("by_rows", None)
        assert out.dtype == self.q.dtype
        for index, (begin, end) in enumerate(itertools.pairwise(self.starts)):
            length = self.lengths[index]
            whole = torch.zeros(length, *self.q.shape[1:], dtype=torch.float64)
            whole[length - (end - begin) :] = self.q[begin:end]
            exact = dense(whole, self.keys[index], self.values[index], [0, length], **options)
            # Scores grow with the head size, and their rounding with them.
            roundings = 40 + self.q.shape[-1] / 2 if out.dtype == torch.float32 else 3
            assert_close(out[begin:end], exact[length - (end - begin) :], roundings, 4.0)


def named(options: dict, heads: int) -> dict:
    return {**options, "sinks": torch.randn(heads)} if "sinks" in options else dict(options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("news", NEWS, ids=str)
def test_rows_get_what_attention_over_the_whole_gives(
    implementation: str, news: list[int], options: dict, dtype: torch.dtype
) -> None:
    paged = Paged(news, [0, 6, 17, 2][: len(news)], dtype, window=options.get("window", 0))
    paged.check(**named(options, 6))
    paged.check(**named(options, 6), by_rows=True)


@pytest.mark.parametrize("shape", [(1, 1, 1), (9, 1, 65), (5, 5, 7), (8, 2, 512), (12, 3, 33)], ids=str)
def test_head_counts_and_sizes(implementation: str, shape: tuple[int, int, int]) -> None:
    for block in (1, 16, 23):
        Paged([1, 2], [70, 200], torch.float32, *shape, block=block).check()
        paged = Paged([1, 2], [70, 200], torch.float32, *shape, block=block, window=80)
        paged.check(window=80, softcap=2.0, sinks=torch.randn(shape[0]))


# (table, starts, lengths): no such block (2), a block that belongs to nobody, longer than its table, shorter than its
# new rows, bounds beyond the rows, bounds that fall.
OUTSIDE = [
    ([[4]], [0, 1], [1]),
    ([[-1]], [0, 1], [1]),
    ([[1, 0]], [0, 1], [5]),
    ([[1]], [0, 1], [5]),
    ([[1]], [0, 1], [0]),
    ([[1]], [0, 2], [2]),
    ([[1], [2]], [0, 1, 0], [1, 1]),
]


@pytest.mark.parametrize(("tables", "starts", "lengths"), OUTSIDE, ids=str)
def test_what_lies_outside_the_cache_is_refused(implementation: str, tables: list, starts: list, lengths: list) -> None:
    q, cache = torch.ones(1, 1, 4), torch.ones(4, 1, BLOCK, 4)
    arguments = (torch.tensor(x, dtype=torch.int32) for x in (tables, starts, lengths))
    with pytest.raises(ValueError, match=r"the cache has 4 blocks of 4|starts must rise"):
        paged_attention(q, cache, cache, *arguments, 1.0)
