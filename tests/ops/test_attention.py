"""Packed attention against one dense float64 attention, written out with its full mask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.masking_utils import sliding_window_causal_mask_function

from treadle.ops import packed_attention
from treadle.ops.attention import BLOCK_ROWS, PACKED_ATTENTION

from .compare import assert_close, double

SCALE = 0.4


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: list[int],
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    scale: float = SCALE,
) -> Tensor:
    """Attention with a T x T mask, in float64; every line is the definition."""
    tokens, heads, _ = q.shape
    k, v = (x.double().repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("ihe,jhe->hij", q.double(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    sequence = torch.bucketize(torch.arange(tokens), torch.tensor(starts[1:]), right=True)
    i, j = torch.arange(tokens)[:, None], torch.arange(tokens)[None]
    seen = (sequence[:, None] == sequence[None]) & (j <= i)
    if window:
        seen &= i - j < window
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(heads, tokens, 1)), -1)
    return torch.einsum("hij,jhe->ihe", scores.softmax(-1)[..., :tokens], v)


def starts_of(lengths: list[int]) -> list[int]:
    return [sum(lengths[:n]) for n in range(len(lengths) + 1)]


def heads_of(tokens: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(tokens, n, size).to(dtype).requires_grad_() for n in (heads, kv_heads, kv_heads)]


def check(
    lengths: list[int],
    heads: int,
    kv_heads: int,
    size: int,
    dtype: torch.dtype,
    window: int = 0,
    softcap: float = 0.0,
    with_sinks: bool = False,
) -> None:
    """Compare output and gradients with the dense attention."""
    starts = starts_of(lengths)
    leaves = heads_of(starts[-1], heads, kv_heads, size, dtype)
    if with_sinks:
        leaves.append(torch.randn(heads, requires_grad=True))
    exact_leaves = double(*leaves)
    bounds = torch.tensor(starts, dtype=torch.int32)
    out = packed_attention(*leaves[:3], bounds, max(lengths, default=0), SCALE, window, softcap, *leaves[3:])
    exact = dense(*exact_leaves[:3], starts, window, softcap, *exact_leaves[3:])
    assert out.dtype == dtype
    # The probabilities and the output are rounded to bfloat16, and so are the products' inputs in the backward pass
    # (the gradient of the float32 sinks comes from that output too).
    assert_close(out, exact, 40 if dtype == torch.float32 else 3, 4.0)
    grad = torch.randn(out.shape).to(dtype)
    out.backward(grad)
    exact.backward(grad.double())
    for got, expected in zip(leaves, exact_leaves, strict=True):
        assert got.grad is not None and expected.grad is not None
        assert got.grad.dtype == got.dtype
        largest = expected.grad.abs().max().item() if expected.numel() else 0.0
        assert_close(got.grad, expected.grad, 100 if dtype == torch.float32 else 16, max(largest, 1.0), dtype)


LENGTHS = [[1], [5], [3, 0, 4], [0, 0], [], [7, 7, 7, 2], [1, 1, 1, 40], [BLOCK_ROWS + 13, 9]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("kernels", ["reference", "pytorch_flash"])
def test_causal_within_each_sequence(
    kernels: str, lengths: list[int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from treadle.ops.registry import rechoose

    monkeypatch.setenv("TREADLE_KERNELS", kernels)
    rechoose()
    check(lengths, 4, 2, 16, dtype)
    check(lengths, 3, 3, 7, dtype)
    monkeypatch.undo()
    rechoose()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 1, 2, 5, 8, 100])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_window_softcap_and_sinks(window: int, softcap: float, with_sinks: bool, dtype: torch.dtype) -> None:
    check([8, 1, 0, 11], 6, 2, 10, dtype, window, softcap, with_sinks)


def test_windows_across_blocks_of_rows() -> None:
    for window in (3, BLOCK_ROWS - 1, BLOCK_ROWS + 1, 2 * BLOCK_ROWS):
        check([2 * BLOCK_ROWS + 5], 2, 1, 4, torch.float32, window, 2.0, True)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), max_size=5),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    size=st.integers(1, 33),
    window=st.integers(0, 14),
    softcap=st.sampled_from([0.0, 0.7, 30.0]),
    with_sinks=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_any_shape(
    lengths: list[int],
    kv_heads: int,
    group: int,
    size: int,
    window: int,
    softcap: float,
    with_sinks: bool,
    dtype: torch.dtype,
) -> None:
    check(lengths, kv_heads * group, kv_heads, size, dtype, window, softcap, with_sinks)


def test_the_window_is_the_one_of_transformers() -> None:
    theirs = sliding_window_causal_mask_function(3)
    tokens = 8
    v = torch.eye(tokens)[:, None]
    q = k = torch.zeros(tokens, 1, tokens)
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    seen = packed_attention(q, k, v, starts, tokens, 1.0, window=3)[:, 0] > 0
    expected = [[bool(theirs(0, 0, torch.tensor(i), torch.tensor(j))) for j in range(tokens)] for i in range(tokens)]
    assert seen.tolist() == expected


def test_which_kernel_runs() -> None:
    q, k, v = heads_of(6, 2, 1, 8, torch.float32)
    starts = torch.tensor([0, 6], dtype=torch.int32)
    chosen = [
        PACKED_ATTENTION.kernel_for(q, k, v, starts, 6, SCALE, *rest).name
        for rest in ((), (6,), (5,), (0, 3.0), (0, 0.0, torch.zeros(2)))
    ]
    assert chosen == ["pytorch_flash", "pytorch_flash", "reference", "reference", "reference"]
    assert PACKED_ATTENTION.kernel_for(q.half(), k.half(), v.half(), starts, 6, SCALE).name == "reference"


def test_views_into_a_fused_product() -> None:
    fused = torch.randn(10, 6 * 8 + 2 * 2 * 8)
    q, k, v = (part.view(10, -1, 8) for part in fused.split([48, 16, 16], -1))
    starts = torch.tensor([0, 4, 10], dtype=torch.int32)
    for window in (0, 2):
        out = packed_attention(q, k, v, starts, 6, SCALE, window)
        assert_close(out, dense(q, k, v, [0, 4, 10], window), 40, 4.0)


def test_an_undefined_token_stays_in_its_sequence() -> None:
    q, k, v = (x.detach() for x in heads_of(9, 2, 1, 8, torch.float32))
    v[1], k[1] = torch.nan, torch.nan
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    for window in (0, 2):
        out = packed_attention(q, k, v, starts, 5, SCALE, window)
        assert out[1].isnan().all() and out[4:].isfinite().all()


@pytest.mark.parametrize("starts", [[0, 3], [0, 3, 7], [1, 6], [0, 4, 2, 6], [-1, 6]])
@pytest.mark.parametrize("window", [0, 2])
def test_starts_that_do_not_cover_the_rows_are_refused(starts: list[int], window: int) -> None:
    q, k, v = heads_of(6, 2, 1, 8, torch.float32)
    with pytest.raises(ValueError, match="starts must rise from 0"):
        packed_attention(q, k, v, torch.tensor(starts, dtype=torch.int32), 6, SCALE, window)


@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize(
    "shapes", [((5, 8), (2, 8), (2, 8)), ((4, 6), (2, 8), (2, 8)), ((4, 8), (2, 8), (2, 6))], ids=str
)
def test_shapes_that_do_not_fit_are_refused(shapes: tuple, window: int) -> None:
    q, k, v = (torch.ones(6, *shape) for shape in shapes)
    starts = torch.tensor([0, 6], dtype=torch.int32)
    with pytest.raises((RuntimeError, ValueError)):
        packed_attention(q, k, v, starts, 6, SCALE, window)
    with pytest.raises((RuntimeError, ValueError)):
        packed_attention(torch.ones(6, 4, 8), *(torch.ones(5, 2, 8) for _ in range(2)), starts, 6, SCALE, window)


def test_gradcheck() -> None:
    q, k, v = (x.detach().requires_grad_() for x in heads_of(7, 4, 2, 3, torch.float64))
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    starts = torch.tensor([0, 4, 4, 7], dtype=torch.int32)
    for window, softcap in ((0, 0.0), (2, 0.0), (0, 1.2), (3, 1.2)):
        assert torch.autograd.gradcheck(
            lambda *t: packed_attention(*t[:3], starts, 4, SCALE, window, softcap, t[3]),  # noqa: B023
            (q, k, v, sinks),
        )
        assert torch.autograd.gradcheck(
            lambda *t: packed_attention(*t, starts, 4, SCALE, window, softcap),  # noqa: B023
            (q, k, v),
        )
