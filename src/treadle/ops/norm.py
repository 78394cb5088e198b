"""RMS normalization (Zhang and Sennrich 2019, section 3), alone and fused with the residual addition before it."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from treadle.ops.linear import accumulator
from treadle.ops.registry import Operator


def _normalized(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x / rms(x) and 1 / rms(x), both in the accumulator's dtype."""
    wide = x.to(accumulator(x.dtype))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide * scale, scale


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    normalized, _ = _normalized(x, eps)
    if offset == 0.0:
        # Llama's order: round the normalized values to x's dtype, then multiply.
        normalized = normalized.to(x.dtype).to(normalized.dtype)
    return (normalized * (weight.to(normalized.dtype) + offset)).to(x.dtype)


def rms_norm_backward_reference(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    normalized, scale = _normalized(x, eps)
    grad_wide = grad.to(normalized.dtype)
    by_input = grad_wide * (weight.to(normalized.dtype) + offset)
    projection = (by_input * normalized).mean(-1, keepdim=True)
    grad_x = scale * (by_input - normalized * projection)
    grad_weight = (grad_wide * normalized).flatten(0, -2).sum(0)
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm_reference(total, weight, eps, offset), total


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


RMS_NORM_BACKWARD = Operator(
    "rms_norm_backward",
    "(Tensor grad, Tensor x, Tensor weight, float eps, float offset) -> (Tensor, Tensor)",
    rms_norm_backward_reference,
    fake=lambda grad, x, weight, eps, offset: (_like(x), _like(weight)),
)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, ctx.eps, ctx.offset = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    return (*RMS_NORM_BACKWARD.call(grad, x, weight, ctx.eps, ctx.offset), None, None)


RMS_NORM = Operator(
    "rms_norm",
    "(Tensor x, Tensor weight, float eps, float offset=0.0) -> Tensor",
    rms_norm_reference,
    fake=lambda x, weight, eps, offset=0.0: _like(x),
    backward=_backward,
    setup_context=_setup,
)


def _add_setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, _, weight, ctx.eps, ctx.offset = inputs
    ctx.save_for_backward(output[1], weight)


def _add_backward(ctx: Any, grad_normed: Tensor, grad_total: Tensor) -> Any:
    total, weight = ctx.saved_tensors
    grad_x, grad_weight = RMS_NORM_BACKWARD.call(grad_normed, total, weight, ctx.eps, ctx.offset)
    grad_x = grad_x + grad_total
    return grad_x, grad_x, grad_weight, None, None


ADD_RMS_NORM = Operator(
    "add_rms_norm",
    "(Tensor x, Tensor residual, Tensor weight, float eps, float offset=0.0) -> (Tensor, Tensor)",
    add_rms_norm_reference,
    fake=lambda x, residual, weight, eps, offset=0.0: (_like(x), _like(x)),
    backward=_add_backward,
    setup_context=_add_setup,
)


def rms_norm(
    x: Float[Tensor, "*batch D"], weight: Float[Tensor, " D"], eps: float, offset: float = 0.0
) -> Float[Tensor, "*batch D"]:
    """Return x / rms(x) * (weight + offset) in x's dtype, statistics in float32.

    With offset 0 the normalized values are rounded to x's dtype before the product, as Llama does; with another offset
    after it, as Gemma does.
    """
    return RMS_NORM.call(x, weight, eps, offset)


def add_rms_norm(
    x: Float[Tensor, "*batch D"],
    residual: Float[Tensor, "*batch D"],
    weight: Float[Tensor, " D"],
    eps: float,
    offset: float = 0.0,
) -> tuple[Float[Tensor, "*batch D"], Float[Tensor, "*batch D"]]:
    """Return (rms_norm(x + residual), x + residual)."""
    return ADD_RMS_NORM.call(x, residual, weight, eps, offset)
