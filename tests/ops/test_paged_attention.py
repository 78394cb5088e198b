"""Attention over blocks against the dense float64 attention of test_attention.py."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from treadle.ops import paged_attention, paged_write
from treadle.ops.paged_cache import Record, dequantized

from .compare import assert_close
from .test_attention import SCALE, dense, starts_of

OPTIONS = [{}, {"window": 3}, {"softcap": 1.5}, {"sinks": True}, {"window": 7, "softcap": 1.5, "sinks": True}]
# New rows of each sequence: single ones, few, none at all, and many beside single ones.
NEWS = [[1], [1, 1, 1], [15, 1, 0, 3], [0], [16, 1, 86, 2]]
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
        bits: int = 0,
    ) -> None:
        self.starts, self.lengths = starts_of(news), [n + p for n, p in zip(news, pasts, strict=True)]
        self.q = torch.randn(sum(news), heads, size).to(dtype)
        self.keys = [torch.randn(length, kv_heads, size).to(dtype) for length in self.lengths]
        self.values = [torch.randn(length, kv_heads, size).to(dtype) for length in self.lengths]
        counts = [-(-length // block) for length in self.lengths]
        order = (torch.randperm(sum(counts) + 2) + 1).int()
        elements = Record(size, bits).bytes if bits else size
        shapes = (len(order) + 1, kv_heads, elements, block), (len(order) + 1, kv_heads, block, elements)
        # A scale byte of 255 is not a number.
        nothing, kind = (255, torch.uint8) if bits else (torch.nan, dtype)
        self.cache = [torch.full(shape, nothing, dtype=kind) for shape in shapes]
        self.tables = torch.zeros(len(news), max(counts, default=0) + 1, dtype=torch.int32)
        for index, count in enumerate(counts):
            blocks, order = order[:count], order[count:]
            self.tables[index, :count] = blocks
            rows = blocks.repeat_interleave(block)[: self.lengths[index]] * block
            rows = rows + torch.arange(self.lengths[index]) % block
            paged_write(self.keys[index], self.values[index], *self.cache, rows.long())
            if bits:  # what the records stand for, which test_paged_cache.py has checked
                keys, values = (
                    self.cache[0].permute(0, 3, 1, 2).flatten(0, 1),
                    self.cache[1].transpose(1, 2).flatten(0, 1),
                )
                self.keys[index], self.values[index] = (
                    dequantized(x[rows.long()], Record(size, bits)) for x in (keys, values)
                )
            if window:  # the blocks that no new row sees are gone
                gone = max(0, pasts[index] - window + 1) // block
                self.tables[index, :gone] = 0
                for cache in self.cache:
                    cache[blocks[:gone].long()] = nothing

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
            # A sum of codes cancels against that of their zero points.
            roundings *= 3 if self.cache[0].dtype == torch.uint8 else 1
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("options", [{}, {"window": 7, "softcap": 1.5, "sinks": True}], ids=str)
@pytest.mark.parametrize("news", NEWS, ids=str)
def test_quantized_caches(implementation: str, news: list[int], options: dict, bits: int, dtype: torch.dtype) -> None:
    paged = Paged(news, [0, 6, 17, 2][: len(news)], dtype, window=options.get("window", 0), bits=bits)
    paged.check(**named(options, 6))
    paged.check(**named(options, 6), by_rows=True)


@pytest.mark.parametrize(("bits", "size"), [(8, 1), (8, 65), (8, 512), (4, 2), (4, 14), (4, 70), (4, 96), (4, 512)])
def test_sizes_of_quantized_heads(implementation: str, bits: int, size: int) -> None:
    for block in (1, 16, 23):
        for heads, kv_heads in ((1, 1), (15, 3)):
            paged = Paged([1, 2], [70, 140], torch.float32, heads, kv_heads, size, block, window=80, bits=bits)
            paged.check(window=80, sinks=torch.randn(heads))


@pytest.mark.parametrize("options", [{}, {"window": 1100, "sinks": True}, {"window": 2}], ids=str)
@pytest.mark.parametrize("bits", [0, 8, 4])
def test_long_caches_are_cut_into_parts(
    implementation: str, options: dict, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts by one thread one after the other, or by several: the same to the last bit."""
    paged = Paged([1, 2], [1100, 1023], torch.float32, 2, 1, 8, 16, window=options.get("window", 0), bits=bits)
    options = named(options, 2)
    outs = []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        paged.check(**options)
        outs.append(paged.attended(**options))
    assert torch.equal(*outs)


@pytest.mark.parametrize("options", [{}, {"window": 9, "sinks": True, "softcap": 2.0}], ids=str)
@pytest.mark.parametrize("bits", [0, 8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_by_rows_a_row_depends_on_nothing_beside_it(
    implementation: str, dtype: torch.dtype, bits: int, options: dict
) -> None:
    """Every way of cutting sequences into steps and of batching them gives the same bits."""
    options = {**named(options, 6), "by_rows": True}
    window = options.get("window", 0)
    for block in (3, 16):
        paged = Paged([70, 1, 33], [30, 170, 0], dtype, block=block, bits=bits)
        whole = paged.attended(**options)
        for sequence, (begin, end) in enumerate(itertools.pairwise(paged.starts)):
            past = paged.lengths[sequence] - (end - begin)
            for cut in (1, 2, 5, 16, 64):
                for first in range(0, end - begin, cut):
                    rows = slice(begin + first, min(begin + first + cut, end))
                    length = past + rows.stop - begin
                    # As an engine would: the blocks behind the window are gone.
                    tables = paged.tables[sequence : sequence + 1].clone()
                    if window:
                        tables[:, : max(0, past + first - window + 1) // block] = 0
                    arguments = torch.tensor([0, rows.stop - rows.start]).int(), torch.tensor([length]).int()
                    alone = paged_attention(paged.q[rows], *paged.cache, tables, *arguments, SCALE, **options)
                    assert torch.equal(alone, whole[rows])


def test_undefined_and_infinite_keys_show(implementation: str) -> None:
    q, keys, values = torch.ones(1, 1, 4), torch.ones(2, 1, 4, 3), torch.ones(2, 1, 3, 4)

    def attended(length: int = 3) -> Tensor:
        table, starts, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([[1]], [0, 1], [length]))
        return paged_attention(q, keys, values, table, starts, lengths, 1.0)

    assert torch.allclose(attended(), torch.ones(1, 1, 4))
    keys[1, 0, 2, 1] = torch.nan
    assert attended().isnan().all()
    assert torch.allclose(attended(1), torch.ones(1, 1, 4)), "beyond the length"
    keys[1, 0, 2, 1] = -torch.inf
    assert torch.allclose(attended(), torch.ones(1, 1, 4))


def test_queries_that_are_a_view(implementation: str) -> None:
    fused, paged = torch.randn(2, 40), Paged([1, 1], [4, 9], torch.float32, 4, 1, 8)
    q = fused[:, 4:36].view(2, 4, 8)
    arguments = *paged.cache, paged.tables, torch.tensor([0, 1, 2]).int(), torch.tensor([5, 10]).int(), 1.0
    assert torch.equal(paged_attention(q, *arguments), paged_attention(q.contiguous(), *arguments))


def test_shapes_that_do_not_fit_are_refused(implementation: str) -> None:
    rest = tuple(torch.tensor(x, dtype=torch.int32) for x in ([[1]], [0, 1], [3]))
    keys, values = torch.ones(2, 2, 8, 4), torch.ones(2, 2, 4, 8)
    for q, k, v in (
        (torch.ones(1, 5, 8), keys, values),
        (torch.ones(1, 4, 6), keys, values),
        (torch.ones(1, 4, 8), keys, values[:, :1].contiguous()),
    ):
        with pytest.raises((RuntimeError, ValueError)):
            paged_attention(q, k, v, *rest, 1.0)


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
    q, cache = torch.ones(1, 1, 4), torch.ones(4, 1, BLOCK, 4)  # as long as wide, so that keys lie as values
    arguments = (torch.tensor(x, dtype=torch.int32) for x in (tables, starts, lengths))
    with pytest.raises(ValueError, match=r"the cache has 4 blocks of 4|starts must rise"):
        paged_attention(q, cache, cache, *arguments, 1.0)
