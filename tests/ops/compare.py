"""How results are compared with float64 ones."""

from __future__ import annotations

import torch
from torch import Tensor

# Unit roundoff of each type: the relative error of one rounding.
ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def assert_close(
    got: Tensor, exact: Tensor, roundings: float, scale: float | None = None, dtype: torch.dtype | None = None
) -> None:
    """Assert that `got` differs from `exact` (float64) by at most `roundings` units of roundoff of `dtype` (its own).

    The unit is relative to `scale`: by default the largest exact value, since sums cancel.
    """
    assert got.shape == exact.shape
    if got.numel() == 0:
        return
    exact = exact.double()
    scale = exact.abs().max().item() if scale is None else scale
    worst = (got.double() - exact).abs().max().item()
    allowed = roundings * ROUNDOFF[dtype or got.dtype] * scale + 1e-30
    assert worst <= allowed, f"off by {worst:.3g}, {worst / allowed * roundings:.1f} roundings of {got.dtype}"


def double(*tensors: Tensor) -> list[Tensor]:
    """Return float64 copies that ask for gradients."""
    return [tensor.detach().double().requires_grad_() for tensor in tensors]
