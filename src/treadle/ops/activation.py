"""Gated MLP activations (Shazeer 2020, "GLU variants"): act(gate) * up."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from treadle.config.errors import UserError, nearest
from treadle.ops import native
from treadle.ops.invariance import is_row_invariant
from treadle.ops.native import abi
from treadle.ops.registry import Operator
from treadle.ops.tensors import accumulator, like

TANH_SCALE, TANH_CUBIC = math.sqrt(2 / math.pi), 0.044715


def _silu_slope(x: Tensor) -> Tensor:
    gate = torch.sigmoid(x)
    return gate * (1 + x * (1 - gate))


def _gelu_slope(x: Tensor) -> Tensor:
    return torch.special.ndtr(x) + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _gelu_tanh_slope(x: Tensor) -> Tensor:
    tanh = torch.tanh(TANH_SCALE * (x + TANH_CUBIC * x * x * x))
    inner = TANH_SCALE * (1 + 3 * TANH_CUBIC * x * x)
    return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * inner


# kind -> (function, its derivative)
ACTIVATIONS = {
    "silu": (F.silu, _silu_slope),
    "gelu": (F.gelu, _gelu_slope),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), _gelu_tanh_slope),
    "relu": (F.relu, lambda x: (x > 0).to(x.dtype)),
    "relu2": (lambda x: F.relu(x).square(), lambda x: 2 * F.relu(x)),
}


def gated_activation_reference(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    wide = accumulator(gate.dtype)
    function, gate_wide = _activation(kind)[0], gate.to(wide)
    if is_row_invariant() and gate.dim() > 1:
        # PyTorch computes the last few elements of a tensor by another function than the others.
        activated = torch.stack([function(row) for row in gate_wide.unbind()]) if len(gate) else gate_wide
    else:
        activated = function(gate_wide)
    return (activated * up.to(wide)).to(gate.dtype)


def gated_activation_backward_reference(grad: Tensor, gate: Tensor, up: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    wide = accumulator(gate.dtype)
    function, slope = _activation(kind)
    grad_wide, gate_wide = grad.to(wide), gate.to(wide)
    grad_gate = grad_wide * up.to(wide) * slope(gate_wide)
    return grad_gate.to(gate.dtype), (grad_wide * function(gate_wide)).to(up.dtype)


def _activation(kind: str) -> Any:
    if kind not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise UserError(f"unknown activation '{kind}'{nearest(kind, ACTIVATIONS) or '; known: ' + known}")
    return ACTIVATIONS[kind]


GATED_ACTIVATION_BACKWARD = Operator(
    "gated_activation_backward",
    "(Tensor grad, Tensor gate, Tensor up, str kind) -> (Tensor, Tensor)",
    gated_activation_backward_reference,
    fake=lambda grad, gate, up, kind: (like(gate), like(up)),
)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    gate, up, ctx.kind = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx: Any, grad: Tensor) -> Any:
    return (*GATED_ACTIVATION_BACKWARD.call(grad, *ctx.saved_tensors, ctx.kind), None)


GATED_ACTIVATION = Operator(
    "gated_activation",
    "(Tensor gate, Tensor up, str kind) -> Tensor",
    gated_activation_reference,
    fake=lambda gate, up, kind: like(gate),
    backward=_backward,
    setup_context=_setup,
)


def _fits(gate: Tensor, up: Tensor, kind: str, grad: Tensor | None = None) -> bool:
    return (
        abi.on_cpu(gate, up)
        and kind in abi.ACTIVATIONS
        and gate.dtype == up.dtype
        and gate.shape == up.shape
        and (grad is None or (grad.dtype == gate.dtype and grad.shape == gate.shape))
    )


_FITS = f"float32 or bfloat16 on CPU; {', '.join(abi.ACTIVATIONS)}"
_gated, _gated_backward = abi.function("gated_activation"), abi.function("gated_activation_backward")


@GATED_ACTIVATION.kernel("native", native.missing, accepts=_fits, takes=_FITS)
def _native(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    gate, up, out = abi.by_rows(gate), abi.by_rows(up), like(gate)
    width = gate.shape[-1]
    arguments = abi.GatedActivation(
        abi.DTYPES[gate.dtype],
        abi.ACTIVATIONS[kind],
        width,
        abi.rows_of(gate),
        abi.rows_of(up),
        abi.dense_rows(out),
        abi.NO_ROWS,
        abi.NO_ROWS,
        abi.NO_ROWS,
    )
    _gated(arguments, gate.numel() // max(width, 1), torch.get_num_threads())
    return out


@GATED_ACTIVATION_BACKWARD.kernel(
    "native", native.missing, accepts=lambda grad, gate, up, kind: _fits(gate, up, kind, grad), takes=_FITS
)
def _backward_native(grad: Tensor, gate: Tensor, up: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    grad, gate, up = abi.by_rows(grad), abi.by_rows(gate), abi.by_rows(up)
    grad_gate, grad_up = like(gate), like(up)
    width = gate.shape[-1]
    arguments = abi.GatedActivation(
        abi.DTYPES[gate.dtype],
        abi.ACTIVATIONS[kind],
        width,
        abi.rows_of(gate),
        abi.rows_of(up),
        abi.NO_ROWS,
        abi.rows_of(grad),
        abi.dense_rows(grad_gate),
        abi.dense_rows(grad_up),
    )
    _gated_backward(arguments, gate.numel() // max(width, 1), torch.get_num_threads())
    return grad_gate, grad_up


def gated_activation(gate: Float[Tensor, "T F"], up: Float[Tensor, "T F"], kind: str) -> Float[Tensor, "T F"]:
    """Return act(gate) * up, computed in float32; kind is one of ACTIVATIONS. Raises UserError for another kind."""
    return GATED_ACTIVATION.call(gate, up, kind)
