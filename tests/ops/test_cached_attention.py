"""Attention over a cache against the dense float64 attention of test_attention.py."""

from __future__ import annotations

import itertools
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor

from treadle.ops import cached_attention
from treadle.ops.attention import BLOCK_ROWS
from treadle.ops.cached_attention import CACHED_ATTENTION, LONG_ROWS
from treadle.ops.registry import rechoose

from .compare import assert_close
from .test_attention import SCALE, dense, starts_of

OPTIONS = [{}, {"window": 3}, {"softcap": 1.5}, {"sinks": True}, {"window": 7, "softcap": 1.5, "sinks": True}]
# New rows of each sequence: single ones, few, none at all, and many beside single ones.
NEWS = [[1], [1, 1, 1], [LONG_ROWS - 1, 1, 0, 3], [0], [LONG_ROWS, 1, LONG_ROWS + 9, 2]]


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    monkeypatch.setenv("TREADLE_KERNELS", "pytorch_flash")
    rechoose()
    yield
    monkeypatch.undo()
    rechoose()


def check(
    news: list[int],
    pasts: list[int],
    dtype: torch.dtype,
    heads: int = 6,
    kv_heads: int = 2,
    size: int = 12,
    with_sinks: bool = False,
    **options: Any,
) -> None:
    sinks = torch.randn(heads) if with_sinks else None
    lengths = [new + past for new, past in zip(news, pasts, strict=True)]
    slots = torch.randperm(len(news) + 2)[: len(news)]
    keys, values = (torch.randn(len(news) + 2, max(lengths) + 1, kv_heads, size).to(dtype) for _ in range(2))
    q = torch.randn(sum(news), heads, size).to(dtype)
    starts = starts_of(news)
    # What lies beyond a sequence's length is never looked at.
    for slot, length in zip(slots, lengths, strict=True):
        keys[slot, length:], values[slot, length:] = torch.nan, torch.nan
    out = cached_attention(
        q, keys, values, slots, torch.tensor(starts).int(), torch.tensor(lengths).int(), SCALE, sinks=sinks, **options
    )
    assert out.dtype == dtype
    for (begin, end), slot, length in zip(itertools.pairwise(starts), slots, lengths, strict=True):
        whole = torch.zeros(length, heads, size, dtype=torch.float64)
        whole[length - (end - begin) :] = q[begin:end]
        exact = dense(whole, keys[slot, :length], values[slot, :length], [0, length], sinks=sinks, **options)
        # Scores grow with the head size, and their rounding with them.
        roundings = 40 + size / 2 if dtype == torch.float32 else 3
        assert_close(out[begin:end], exact[length - (end - begin) :], roundings, 4.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("news", NEWS, ids=str)
def test_rows_get_what_attention_over_the_whole_gives(
    implementation: str, news: list[int], options: dict, dtype: torch.dtype
) -> None:
    options = {("with_sinks" if name == "sinks" else name): value for name, value in options.items()}
    check(news, [0, 6, 17, 2][: len(news)], dtype, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("news", NEWS, ids=str)
def test_the_flash_kernel(flash: None, news: list[int], window: int, dtype: torch.dtype) -> None:
    check(news, [0, 6, 17, 2][: len(news)], dtype, window=window)


@pytest.mark.parametrize("shape", [(1, 1, 1), (9, 1, 65), (5, 5, 7), (8, 2, 512), (12, 3, 33)], ids=str)
def test_head_counts_and_sizes(implementation: str, shape: tuple[int, int, int]) -> None:
    check([1, 2], [70, 200], torch.float32, *shape)
    check([1, 2], [70, 200], torch.float32, *shape, window=80, softcap=2.0, with_sinks=True)


def test_long_caches_and_prompts_in_pieces(implementation: str) -> None:
    for window in (0, 100, BLOCK_ROWS + 50):
        check([1, BLOCK_ROWS + 3], [700, 90], torch.float32, 2, 1, 8, window=window)


def test_a_head_too_large_for_the_kernel_takes_another() -> None:
    q, cache = torch.randn(1, 1, 600), torch.randn(1, 4, 1, 600)
    one = torch.tensor([1], dtype=torch.int32)
    arguments = (q, cache, cache, torch.tensor([0]), torch.tensor([0, 1]), one, 1.0)
    assert CACHED_ATTENTION.chosen(*arguments) == "pytorch_flash"
    check([1], [5], torch.float32, 2, 1, 600)


def test_undefined_and_infinite_keys_show(implementation: str) -> None:
    q, keys, values = torch.ones(1, 1, 4), torch.ones(1, 3, 1, 4), torch.ones(1, 3, 1, 4)

    def attended(keys: Tensor) -> Tensor:
        starts, lengths = torch.tensor([0, 1]).int(), torch.tensor([3]).int()
        return cached_attention(q, keys, values, torch.tensor([0]), starts, lengths, 1.0)

    assert torch.allclose(attended(keys), torch.ones(1, 1, 4))
    keys[0, 1, 0, 2] = torch.nan
    assert attended(keys).isnan().all()
    keys[0, 1, 0, 2] = -torch.inf
    assert torch.allclose(attended(keys), torch.ones(1, 1, 4))


# (slots, starts, lengths): no such slot (2), longer than a slot, shorter than its new rows (2), bounds beyond the rows,
# bounds that fall.
OUTSIDE = [
    ([2], [0, 1], [1]),
    ([-1], [0, 1], [1]),
    ([0], [0, 1], [9]),
    ([0], [0, 1], [0]),
    ([0], [0, 2], [2]),
    ([0, 1], [0, 1, 0], [1, 1]),
]


@pytest.mark.parametrize(("slots", "starts", "lengths"), OUTSIDE, ids=str)
def test_what_lies_outside_the_cache_is_refused(implementation: str, slots: list, starts: list, lengths: list) -> None:
    q, cache = torch.ones(1, 1, 4), torch.ones(2, 8, 1, 4)
    with pytest.raises(ValueError, match=r"the cache has 2 slots of 8|starts must rise"):
        cached_attention(q, cache, cache, torch.tensor(slots), torch.tensor(starts), torch.tensor(lengths), 1.0)


def test_queries_that_are_a_view(implementation: str) -> None:
    fused, cache = torch.randn(2, 40), torch.randn(2, 5, 1, 8)
    q = fused[:, 4:36].view(2, 4, 8)
    arguments = (cache, cache, torch.tensor([1, 0]), torch.tensor([0, 1, 2]), torch.tensor([5, 2]), 1.0)
    assert torch.equal(cached_attention(q, *arguments), cached_attention(q.contiguous(), *arguments))


def test_shapes_that_do_not_fit_are_refused(implementation: str) -> None:
    rest = (torch.tensor([0]), torch.tensor([0, 1]), torch.tensor([3]), 1.0)
    cache = torch.ones(1, 5, 2, 8)
    for q, keys, values in (
        (torch.ones(1, 5, 8), cache, cache),
        (torch.ones(1, 4, 6), cache, cache),
        (torch.ones(1, 4, 8), cache, cache[:, :2].contiguous()),
    ):
        with pytest.raises((RuntimeError, ValueError)):
            cached_attention(q, keys, values, *rest)
