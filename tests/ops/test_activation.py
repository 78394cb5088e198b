"""Gated activations against Transformers' functions in float64."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN

from treadle.config import UserError
from treadle.ops import gated_activation
from treadle.ops.activation import ACTIVATIONS, GATED_ACTIVATION

from .compare import assert_close, double

TRANSFORMERS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu", "relu2": "relu2"}
SHAPES = [(1, 1), (3, 7), (9, 130), (400, 65), (0, 8), (2, 3, 17)]


def test_every_activation_is_compared() -> None:
    assert set(TRANSFORMERS) == set(ACTIVATIONS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_forward_and_backward_in_float64(implementation: str, kind: str, shape: tuple, dtype: torch.dtype) -> None:
    gate, up = ((4 * torch.randn(shape)).to(dtype).requires_grad_() for _ in range(2))
    exact_gate, exact_up = double(gate, up)
    out = gated_activation(gate, up, kind)
    exact = ACT2FN[TRANSFORMERS[kind]](exact_gate) * exact_up
    roundings = 8 if dtype == torch.float32 else 1.1
    assert_close(out, exact, roundings)
    grad = torch.randn(shape).to(dtype)
    out.backward(grad)
    exact.backward(grad.double())
    for got, expected in ((gate, exact_gate), (up, exact_up)):
        assert got.grad is not None and expected.grad is not None
        assert_close(got.grad, expected.grad, roundings)


@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_every_magnitude(implementation: str, kind: str) -> None:
    """The error stays small from the smallest gates to the largest."""
    sizes = torch.logspace(-30, 1, 4000)
    gate = torch.cat((sizes, -sizes)).requires_grad_()
    out = gated_activation(gate, torch.ones_like(gate), kind)
    (exact_gate,) = double(gate)
    exact = ACT2FN[TRANSFORMERS[kind]](exact_gate)
    error = (out.double() - exact).abs()
    assert (error < 4e-7 * exact.abs() + 1e-6).all()
    if implementation != "reference":
        # No cancellation in the left tail either, as far as the float64 formula itself is good there.
        shown = (gate > -5) & (exact.abs() > 1e-35)
        assert (error[shown] / exact[shown].abs()).max() < (2e-6 if kind.startswith("gelu") else 4e-7)
    (slope,) = torch.autograd.grad(out.sum(), gate)
    (exact_slope,) = torch.autograd.grad(exact.sum(), exact_gate)
    assert (slope.double() - exact_slope).abs().max() < 1e-6 * max(1.0, exact_slope.abs().max().item())


@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_huge_and_undefined_gates(implementation: str, kind: str) -> None:
    gate = torch.tensor([torch.nan, 1e30, -1e30, 1e19, -1e19, 100.0, -100.0, 89.0, -89.0])
    out = gated_activation(gate, torch.ones(9), kind)
    assert out[0].isnan()
    expected = ACT2FN[TRANSFORMERS[kind]](gate.double()).float()
    assert torch.allclose(out[1:], expected[1:], rtol=1e-6, atol=1e-35)
    assert not out[1:].isnan().any()
    half = gated_activation(gate.bfloat16(), torch.ones(9).bfloat16(), kind)
    assert half[0].isnan() and not half[1:].isnan().any()


def test_halves_of_one_fused_product(implementation: str) -> None:
    fused = torch.randn(33, 74)
    gate, up = fused.chunk(2, -1)
    expected = torch.nn.functional.silu(gate.double()) * up.double()
    assert_close(gated_activation(gate, up, "silu"), expected, 8)
    assert_close(gated_activation(gate.T, up.T, "silu"), expected.T, 8)


def test_float16_takes_the_reference() -> None:
    gate, up = torch.randn(2, 3, 8).half()
    assert GATED_ACTIVATION.kernel_for(gate, up, "silu").name == "reference"
    expected = torch.nn.functional.silu(gate.double()) * up.double()
    assert_close(gated_activation(gate, up, "silu"), expected, 1.1)


@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_gradcheck(kind: str) -> None:
    gate, up = torch.randn(2, 3, 5, dtype=torch.float64).unbind()
    assert torch.autograd.gradcheck(
        lambda g, u: gated_activation(g, u, kind), (gate.requires_grad_(), up.requires_grad_())
    )


def test_an_unknown_kind_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'gelu_tanh'"):
        gated_activation(torch.ones(2, 2), torch.ones(2, 2), "gelu_tan")
