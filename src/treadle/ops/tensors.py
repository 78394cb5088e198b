"""Small helpers that the operators share."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums over values of `dtype` are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def like(x: Tensor) -> Tensor:
    """Return new contiguous memory of x's shape and dtype."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)
