"""The fast kernel of cached attention against the reference in float64."""

from __future__ import annotations

import pytest
import torch

from treadle.ops.attention import CACHED_ATTENTION, cached_attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 1, 3, 7, 30])
@pytest.mark.parametrize("news", [[1], [1, 1, 1], [5, 1, 0, 3], [20, 2], [0]], ids=str)
def test_the_fast_kernel_equals_the_reference(news: list[int], window: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(window)
    keys, values = (torch.randn(7, 20, 2, 12, generator=generator).to(dtype) for _ in range(2))
    slots = torch.randperm(7, generator=generator)[: len(news)]
    past = [0, 6, 2, 17] if news[0] != 20 else [0, 18]
    lengths = torch.tensor([new + before for new, before in zip(news, past, strict=False)])
    for slot, length in zip(slots, lengths, strict=True):  # what lies beyond is never looked at
        keys[slot, length:], values[slot, length:] = torch.nan, torch.nan
    q = torch.randn(sum(news), 6, 12, generator=generator).to(dtype)
    starts = torch.tensor([0, *news]).cumsum(0)
    arguments = (slots, starts, lengths, 0.4, window)
    assert CACHED_ATTENTION.chosen(q, keys, values, *arguments) == "pytorch_flash"
    got = cached_attention(q, keys, values, *arguments)
    exact = CACHED_ATTENTION.reference(q.double(), keys.double(), values.double(), *arguments)
    # Values of spread 1: fp32 keeps 24 bits, bf16 8, and the kernel rounds the probabilities to bf16 as well.
    torch.testing.assert_close(got.double(), exact, atol=3e-6 if dtype == torch.float32 else 3e-2, rtol=0)
