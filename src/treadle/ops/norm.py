"""RMS normalization (Zhang and Sennrich 2019, section 3), alone and fused with the residual addition before it."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from treadle.ops import native
from treadle.ops.native import abi
from treadle.ops.registry import Operator
from treadle.ops.tensors import accumulator, like


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
    grad: Tensor, x: Tensor, weight: Tensor, extra: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x (plus `extra`, which a residual stream brings) and of weight."""
    normalized, scale = _normalized(x, eps)
    grad_wide = grad.to(normalized.dtype)
    by_input = grad_wide * (weight.to(normalized.dtype) + offset)
    projection = (by_input * normalized).mean(-1, keepdim=True)
    grad_x = scale * (by_input - normalized * projection)
    if extra is not None:
        grad_x = grad_x + extra
    grad_weight = (grad_wide * normalized).flatten(0, -2).sum(0)
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm_reference(total, weight, eps, offset), total


RMS_NORM_BACKWARD = Operator(
    "rms_norm_backward",
    "(Tensor grad, Tensor x, Tensor weight, Tensor? extra, float eps, float offset) -> (Tensor, Tensor)",
    rms_norm_backward_reference,
    fake=lambda grad, x, weight, extra, eps, offset: (like(x), like(weight)),
)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, ctx.eps, ctx.offset = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    return (*RMS_NORM_BACKWARD.call(grad, x, weight, None, ctx.eps, ctx.offset), None, None)


RMS_NORM = Operator(
    "rms_norm",
    "(Tensor x, Tensor weight, float eps, float offset=0.0) -> Tensor",
    rms_norm_reference,
    fake=lambda x, weight, eps, offset=0.0: like(x),
    backward=_backward,
    setup_context=_setup,
)


def _add_setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, _, weight, ctx.eps, ctx.offset = inputs
    ctx.save_for_backward(output[1], weight)


def _add_backward(ctx: Any, grad_normed: Tensor, grad_total: Tensor) -> Any:
    total, weight = ctx.saved_tensors
    grad_x, grad_weight = RMS_NORM_BACKWARD.call(grad_normed, total, weight, grad_total, ctx.eps, ctx.offset)
    return grad_x, grad_x, grad_weight, None, None


ADD_RMS_NORM = Operator(
    "add_rms_norm",
    "(Tensor x, Tensor residual, Tensor weight, float eps, float offset=0.0) -> (Tensor, Tensor)",
    add_rms_norm_reference,
    fake=lambda x, residual, weight, eps, offset=0.0: (like(x), like(x)),
    backward=_add_backward,
    setup_context=_add_setup,
)


def _fits(x: Tensor, weight: Tensor, *others: Tensor | None) -> bool:
    return (
        abi.on_cpu(x, weight)
        and weight.shape == x.shape[-1:]
        and weight.is_contiguous()
        and all(other is None or (other.dtype == x.dtype and other.shape == x.shape) for other in others)
    )


_FITS = "float32 or bfloat16 on CPU"
_rms_norm, _rms_norm_backward = abi.function("rms_norm"), abi.function("rms_norm_backward", ctypes.c_void_p)


@RMS_NORM.kernel("native", native.missing, accepts=lambda x, weight, eps, offset=0.0: _fits(x, weight), takes=_FITS)
def _native(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    x, out = abi.by_rows(x), like(x)
    width = x.shape[-1]
    arguments = abi.RmsNorm(
        abi.DTYPES[x.dtype],
        abi.DTYPES[weight.dtype],
        width,
        eps,
        offset,
        abi.rows_of(x),
        abi.NO_ROWS,
        abi.dense_rows(out),
        abi.NO_ROWS,
        weight.data_ptr(),
    )
    _rms_norm(arguments, x.numel() // max(width, 1), torch.get_num_threads())
    return out


@ADD_RMS_NORM.kernel(
    "native",
    native.missing,
    accepts=lambda x, residual, weight, eps, offset=0.0: _fits(x, weight, residual),
    takes=_FITS,
)
def _add_native(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    x, residual, out, total = abi.by_rows(x), abi.by_rows(residual), like(x), like(x)
    width = x.shape[-1]
    arguments = abi.RmsNorm(
        abi.DTYPES[x.dtype],
        abi.DTYPES[weight.dtype],
        width,
        eps,
        offset,
        abi.rows_of(x),
        abi.rows_of(residual),
        abi.dense_rows(out),
        abi.dense_rows(total),
        weight.data_ptr(),
    )
    _rms_norm(arguments, x.numel() // max(width, 1), torch.get_num_threads())
    return out, total


@RMS_NORM_BACKWARD.kernel(
    "native",
    native.missing,
    accepts=lambda grad, x, weight, extra, eps, offset: _fits(x, weight, grad, extra),
    takes=_FITS,
)
def _backward_native(
    grad: Tensor, x: Tensor, weight: Tensor, extra: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    grad, x, grad_x = abi.by_rows(grad), abi.by_rows(x), like(x)
    extra = None if extra is None else abi.by_rows(extra)
    grad_weight = torch.empty_like(weight, dtype=torch.float32)
    width = x.shape[-1]
    arguments = abi.RmsNormBackward(
        abi.DTYPES[x.dtype],
        abi.DTYPES[weight.dtype],
        width,
        eps,
        offset,
        abi.rows_of(grad),
        abi.rows_of(x),
        abi.NO_ROWS if extra is None else abi.rows_of(extra),
        abi.dense_rows(grad_x),
        weight.data_ptr(),
    )
    rows = x.numel() // max(width, 1)
    _rms_norm_backward(arguments, grad_weight.data_ptr(), rows, torch.get_num_threads())
    return grad_x, grad_weight.to(weight.dtype)


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
