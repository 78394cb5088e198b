"""Fused linear cross-entropy against torch.nn.functional.cross_entropy in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.ops import linear_cross_entropy, loss

from .compare import assert_close, double


def exact_loss(x: Tensor, weight: Tensor, targets: Tensor, weights: Tensor, softcap: float) -> tuple[Tensor, Tensor]:
    logits = x @ weight.T
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    losses = F.cross_entropy(logits, targets.where(weights != 0, -100), reduction="none", ignore_index=-100)
    return (losses * weights.double()).sum(), losses


def inputs(tokens: int, width: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = torch.randn(tokens, width).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, width) * 2 / width**0.5).to(dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,))
    weights = torch.rand(tokens) + 0.1
    weights[::3] = 0
    targets[::3] = -100
    return x, weight, targets, weights


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 1), (4, 8, 3), (50, 24, 97), (700, 16, 300)])
def test_loss_and_gradients_in_float64(
    implementation: str, shape: tuple, dtype: torch.dtype, softcap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "CHUNK_LOGITS", 3000)
    monkeypatch.setattr(loss, "CHUNK_TOKENS", 16)
    x, weight, targets, weights = inputs(*shape, dtype)
    exact_x, exact_weight = double(x, weight)
    total, losses = linear_cross_entropy(x, weight, targets, weights, softcap)
    exact_total, exact_losses = exact_loss(exact_x, exact_weight, targets, weights, softcap)
    # In bfloat16 the logits (up to about 8) are rounded, which moves a loss by as much.
    tolerance = 4e-6 if dtype == torch.float32 else 8 * 2.0**-8
    assert total.dtype == losses.dtype == torch.float32
    assert torch.allclose(losses.double(), exact_losses, rtol=1e-5, atol=tolerance)
    assert torch.allclose(total.double(), exact_total, rtol=1e-5, atol=tolerance * max(1.0, weights.sum().item()))
    (total * 0.5).backward()
    (exact_total * 0.5).backward()
    assert x.grad is not None and weight.grad is not None and exact_x.grad is not None and exact_weight.grad is not None
    # Each product of the head's gradient sums over tokens or vocabulary; bfloat16 rounds the logits' gradient first.
    assert_close(x.grad, exact_x.grad, 200 if dtype == torch.float32 else 6, max(exact_x.grad.abs().max().item(), 1e-6))
    largest = max(exact_weight.grad.abs().max().item(), 1e-6)
    assert_close(weight.grad, exact_weight.grad, 200 if dtype == torch.float32 else 6, largest)


def test_only_the_sum_has_a_gradient(implementation: str) -> None:
    x, weight, targets, weights = inputs(6, 4, 9, torch.float32)
    total, losses = linear_cross_entropy(x, weight, targets, weights)
    assert total.requires_grad and not losses.requires_grad


def test_no_gradient_work_when_none_is_wanted(implementation: str) -> None:
    x, weight, targets, weights = inputs(6, 4, 9, torch.float32)
    with torch.no_grad():
        total, losses = linear_cross_entropy(x, weight, targets, weights)
    with_gradient = linear_cross_entropy(x, weight, targets, weights)
    assert torch.equal(total, with_gradient[0]) and torch.equal(losses, with_gradient[1])
    assert not total.requires_grad


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_a_frozen_input_costs_nothing_and_the_other_is_right(implementation: str, frozen: str) -> None:
    x, weight, targets, weights = inputs(40, 8, 21, torch.float32)
    expected = dict(zip("xw", torch.autograd.grad(linear_cross_entropy(x, weight, targets, weights)[0], (x, weight))))  # noqa: B905
    (x if frozen == "x" else weight).requires_grad_(False)
    total, _ = linear_cross_entropy(x, weight, targets, weights)
    total.backward()
    left, name = (weight, "w") if frozen == "x" else (x, "x")
    assert left.grad is not None and torch.equal(left.grad, expected[name])
    unused = loss.LINEAR_CROSS_ENTROPY(x, weight, targets, weights, 0.0, x.requires_grad, weight.requires_grad)
    assert unused[2 if frozen == "x" else 3].numel() == 0


def test_a_float32_head_under_bfloat16_activations(implementation: str) -> None:
    x, weight, targets, weights = inputs(40, 16, 31, torch.float32)
    total, _ = linear_cross_entropy(x.bfloat16(), weight, targets, weights)
    total.backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    assert x.grad is not None and x.grad.dtype == torch.float32


@pytest.mark.parametrize("tokens", [0, 5])
def test_no_token_that_counts(implementation: str, tokens: int) -> None:
    x, weight = torch.randn(tokens, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    targets, weights = torch.full((tokens,), -100), torch.zeros(tokens)
    total, losses = linear_cross_entropy(x, weight, targets, weights)
    total.backward()
    assert total == 0 and losses.shape == (tokens,)
    assert weight.grad is not None and not weight.grad.any() and x.grad is not None and not x.grad.any()


@pytest.mark.parametrize("target", [-1, 9, -100])
def test_a_target_outside_the_vocabulary_is_refused(implementation: str, target: int) -> None:
    with pytest.raises(ValueError, match="outside the vocabulary of 9"):
        linear_cross_entropy(torch.randn(1, 4), torch.randn(9, 4), torch.tensor([target]), torch.ones(1))


def test_large_logits_do_not_overflow(implementation: str) -> None:
    x, weight = torch.tensor([[1000.0], [-1000.0]], requires_grad=True), torch.tensor([[1.0], [-1.0], [0.5]])
    total, losses = linear_cross_entropy(x, weight, torch.tensor([0, 0]), torch.ones(2))
    total.backward()
    assert torch.allclose(losses, torch.tensor([0.0, 2000.0]))
    assert x.grad is not None and torch.allclose(x.grad, torch.tensor([[0.0], [-2.0]]))


def test_undefined_logits_show(implementation: str) -> None:
    x = torch.tensor([[torch.nan], [1.0]])
    total, losses = linear_cross_entropy(x, torch.randn(5, 1), torch.tensor([0, 0]), torch.ones(2))
    assert losses[0].isnan() and losses[1].isfinite() and total.isnan()


def test_the_logits_of_all_tokens_never_exist(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "CHUNK_LOGITS", 64)
    monkeypatch.setattr(loss, "CHUNK_TOKENS", 8)
    sizes = []
    linear = F.linear
    monkeypatch.setattr(loss.F, "linear", lambda x, weight: sizes.append(len(x)) or linear(x, weight))
    linear_cross_entropy(torch.randn(100, 4), torch.randn(9, 4), torch.zeros(100, dtype=torch.int64), torch.ones(100))
    assert sum(sizes) == 100 and max(sizes) == 8


def test_gradcheck() -> None:
    x, weight, targets, weights = inputs(5, 3, 7, torch.float64)
    for softcap in (0.0, 1.5):
        assert torch.autograd.gradcheck(
            lambda a, b: linear_cross_entropy(a, b, targets, weights, softcap)[0],  # noqa: B023
            (x, weight),
        )


def test_backward_twice_gives_the_same(implementation: str) -> None:
    x, weight, targets, weights = inputs(6, 4, 9, torch.float32)
    total, _ = linear_cross_entropy(x, weight, targets, weights)
    first = torch.autograd.grad(total, (x, weight), torch.tensor(3.0), retain_graph=True)
    second = torch.autograd.grad(total, (x, weight), torch.tensor(3.0))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_shapes_that_do_not_fit_are_refused(implementation: str) -> None:
    x, weight = torch.ones(4, 3), torch.ones(5, 3)
    for targets, weights in (
        (torch.zeros(3, dtype=torch.int64), torch.ones(4)),
        (torch.zeros(4, dtype=torch.int64), torch.ones(5)),
    ):
        with pytest.raises((RuntimeError, IndexError)):
            linear_cross_entropy(x, weight, targets, weights)
