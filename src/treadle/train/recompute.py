"""Activation recompute: trading a second forward pass of each layer for the memory of what it would have kept."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from treadle.model.context import Context
from treadle.model.transformer import Transformer

Recompute = Literal["none", "full"]


def recompute_layers(model: Transformer, policy: Recompute) -> None:
    """Make each layer keep only its input and run again in the backward pass (Chen et al. 2016, arXiv 1604.06174).

    Parameter names stay as they are. Random numbers are drawn again as they were.
    """
    if policy == "none":
        return
    for layer in model.layers:
        layer.forward = _Recomputed(layer.forward)


class _Recomputed:
    def __init__(self, forward: object) -> None:
        self.inner = forward

    def __call__(self, x: Tensor, context: Context) -> Tensor:
        if not torch.is_grad_enabled():
            return self.inner(x, context)  # pyrefly: ignore[not-callable]
        return checkpoint(self.inner, x, context, use_reentrant=False)  # pyrefly: ignore
