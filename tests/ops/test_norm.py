"""RMS norm against Transformers' modules and float64 formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from treadle.ops import add_rms_norm, rms_norm
from treadle.ops.norm import RMS_NORM

from .compare import assert_close, double


def largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


SHAPES = [(1, 1), (3, 7), (5, 64), (33, 100), (700, 129), (0, 16), (2, 3, 31)]
DTYPES = [torch.float32, torch.bfloat16]


def formula(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * (weight + offset)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_forward_and_backward_in_float64(implementation: str, dtype: torch.dtype, shape: tuple, offset: float) -> None:
    x = torch.randn(shape).to(dtype).requires_grad_()
    weight = torch.randn(shape[-1], requires_grad=True)
    exact_x, exact_weight = double(x, weight)
    out = rms_norm(x, weight, 1e-6, offset)
    exact = formula(exact_x, exact_weight, 1e-6, offset)
    # Llama's order rounds twice; float32 sums of a few hundred terms lose a few units.
    assert_close(out, exact, 8 if dtype == torch.float32 else 1.1 if offset else 2.1)
    grad = torch.randn(shape).to(dtype)
    out.backward(grad)
    exact.backward(grad.double())
    assert x.grad is not None and weight.grad is not None and exact_x.grad is not None
    # The gradient of x is a difference of two terms of this size; with one column nothing but their rounding is left.
    size = largest(grad.double() * (weight + offset) * torch.rsqrt((exact_x * exact_x).mean(-1, keepdim=True) + 1e-6))
    assert_close(x.grad, exact_x.grad, 16 if dtype == torch.float32 else 1.1, size)
    assert_close(weight.grad, exact_weight.grad, 64)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("kind", [LlamaRMSNorm, GemmaRMSNorm])
def test_same_rounding_as_transformers(implementation: str, dtype: torch.dtype, kind: type) -> None:
    module = kind(96, eps=1e-5).to(dtype)
    torch.nn.init.normal_(module.weight)
    x = torch.randn(50, 96).to(dtype)
    ours = rms_norm(x, module.weight, 1e-5, 1.0 if kind is GemmaRMSNorm else 0.0)
    theirs = module(x)
    # A value may fall on the other side of a rounding boundary, but no more than one step away, and rarely.
    if dtype != torch.float32:
        assert (ours != theirs).float().mean() < 0.01
    assert torch.allclose(ours.float(), theirs.float(), rtol=6e-7 if dtype == torch.float32 else 2**-7, atol=0)


def test_weight_of_another_type_keeps_the_type_of_x(implementation: str) -> None:
    x, weight = torch.randn(4, 32), torch.randn(32)
    out = rms_norm(x.bfloat16(), weight, 1e-6)
    assert out.dtype == torch.bfloat16
    assert_close(out, formula(x.bfloat16().double(), weight.double(), 1e-6, 0.0), 2.1)
    assert rms_norm(x, weight.bfloat16(), 1e-6).dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_with_the_residual_addition(implementation: str, dtype: torch.dtype, shape: tuple) -> None:
    x, residual = (torch.randn(shape).to(dtype).requires_grad_() for _ in range(2))
    weight = torch.randn(shape[-1], requires_grad=True)
    normed, total = add_rms_norm(x, residual, weight, 1e-6, 1.0)
    assert torch.equal(total, x + residual)
    (exact_total,), (exact_weight,) = double(total), double(weight)
    exact = formula(exact_total, exact_weight, 1e-6, 1.0)
    assert_close(normed, exact, 8 if dtype == torch.float32 else 1.1)
    grads = [torch.randn(shape).to(dtype) for _ in range(2)]
    torch.autograd.backward([normed, total], grads)
    torch.autograd.backward([exact, exact_total], [grad.double() for grad in grads])
    assert x.grad is not None and exact_total.grad is not None and weight.grad is not None
    size = largest(grads[0].double() * (weight + 1) * torch.rsqrt((exact_total**2).mean(-1, keepdim=True) + 1e-6))
    assert_close(x.grad, exact_total.grad, 16 if dtype == torch.float32 else 1.1, size + largest(grads[1]))
    assert residual.grad is not None and torch.equal(x.grad, residual.grad)
    assert_close(weight.grad, exact_weight.grad, 64)


def test_rows_that_are_not_contiguous(implementation: str) -> None:
    weight = torch.randn(24)
    wide = torch.randn(6, 5, 80)
    views = (
        wide[..., 8:32],
        wide[:, 1:3, :24],
        wide[:, 0, 3:27],
        wide.transpose(0, 1)[..., :24],
        wide[..., ::2][..., :24],
    )
    for x in (
        *views,
        torch.randn(24, 7).T,
        torch.randn(24),
        torch.randn(1, 24).expand(5, 24),
        torch.randn(2, 2, 2, 24),
    ):
        assert_close(rms_norm(x, weight, 1e-6), formula(x.double(), weight.double(), 1e-6, 0.0), 8)


def test_nan_and_infinity_stay_in_their_row(implementation: str) -> None:
    x = torch.randn(4, 40)
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    out = rms_norm(x, torch.ones(40), 1e-6)
    assert out[[0, 3]].isfinite().all()
    assert out[1].isnan().all()
    # x / inf is 0 everywhere but where x is infinite itself.
    assert out[2, 5].isnan() and (out[2, torch.arange(40) != 5] == 0).all()
    assert rms_norm(x.bfloat16(), torch.ones(40), 1e-6)[1].isnan().all()


def test_float16_takes_the_reference() -> None:
    x, weight = torch.randn(3, 8).half(), torch.ones(8)
    assert RMS_NORM.kernel_for(x, weight, 1e-6).name == "reference"
    assert_close(rms_norm(x, weight, 1e-6), formula(x.double(), weight.double(), 1e-6, 0.0), 2)


def test_gradients_do_not_depend_on_the_number_of_threads(implementation: str) -> None:
    x, grad = torch.randn(1000, 96), torch.randn(1000, 96)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            leaf, weight = x.clone().requires_grad_(), torch.ones(96, requires_grad=True)
            rms_norm(leaf, weight, 1e-6).backward(grad)
            results.append((leaf.grad, weight.grad))
    finally:
        torch.set_num_threads(before)
    for got in results[1:]:
        assert torch.equal(got[0], results[0][0])
        if implementation == "reference":
            assert torch.allclose(got[1], results[0][1], rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(got[1], results[0][1])


def test_gradcheck() -> None:
    x, residual, weight = (torch.randn(n, dtype=torch.float64, requires_grad=True) for n in ((4, 5), (4, 5), (5,)))
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-5), (x, weight))
    assert torch.autograd.gradcheck(lambda *t: add_rms_norm(*t, 1e-5, 1.0), (x, residual, weight))


def test_a_weight_of_another_width_is_refused(implementation: str) -> None:
    with pytest.raises(RuntimeError):
        rms_norm(torch.randn(3, 8), torch.ones(7), 1e-6)
