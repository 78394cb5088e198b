"""Cross-entropy fused with the output head, so that the logits of all tokens never exist at once.

The gradients are computed in the forward pass, while a chunk's logits are at hand, and scaled in the backward pass by
the gradient that arrives (as in Hsu et al. 2024, Liger Kernel, section 3.2).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from treadle.ops import native
from treadle.ops.native import abi
from treadle.ops.registry import Operator
from treadle.ops.tensors import accumulator, like

CHUNK_LOGITS, CHUNK_TOKENS = 8 << 20, 256


def _chunks(targets: Tensor, token_weights: Tensor, vocabulary: int) -> tuple[Tensor, ...]:
    """Return the tokens that count, in chunks; raises ValueError for a target outside the vocabulary.

    A chunk has some 8 million logits, but enough tokens that adding its part to the weight's gradient stays cheap.
    """
    counted = token_weights.nonzero()[:, 0]
    if not counted.numel():
        return ()
    chosen = targets[counted]
    if int(chosen.min()) < 0 or int(chosen.max()) >= vocabulary:
        raise ValueError(f"a target lies outside the vocabulary of {vocabulary} tokens")
    return counted.split(max(CHUNK_TOKENS, CHUNK_LOGITS // vocabulary))


def linear_cross_entropy_reference(
    x: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor, softcap: float, for_x: bool, for_weight: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the weighted loss sum, each token's loss, and the gradients of x and weight (empty unless asked for)."""
    losses, grad_x, grad_weight = _zeros(x, weight, for_x, for_weight)
    wide = losses.dtype
    head = weight.to(x.dtype)
    for rows in _chunks(targets, token_weights, weight.shape[0]):
        chunk, target = x[rows], targets[rows][:, None]
        logits = F.linear(chunk, head).to(wide)
        if softcap:
            logits = torch.tanh(logits / softcap) * softcap
        total = logits.logsumexp(-1, keepdim=True)
        losses[rows] = (total - logits.gather(1, target))[:, 0]
        if for_x or for_weight:
            grad = torch.exp(logits - total)
            grad.scatter_add_(1, target, grad.new_full(target.shape, -1.0))
            grad *= token_weights[rows].to(wide)[:, None]
            if softcap:
                grad *= 1 - (logits / softcap).square()
            grad = grad.to(x.dtype)
            if for_x:
                grad_x[rows] = grad @ head
            if for_weight:
                grad_weight += grad.t() @ chunk
    return (losses * token_weights.to(wide)).sum(), losses, grad_x, grad_weight.to(weight.dtype)


def _zeros(x: Tensor, weight: Tensor, for_x: bool, for_weight: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return where each token's loss and the two gradients are gathered; a gradient not asked for is empty."""
    wide = accumulator(x.dtype)
    grad_x = torch.zeros_like(x, memory_format=torch.contiguous_format) if for_x else x.new_empty(0)
    grad_weight = weight.new_zeros(weight.shape if for_weight else (0,), dtype=wide)
    return x.new_zeros(x.shape[0], dtype=wide), grad_x, grad_weight


def _fake(
    x: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor, softcap: float, for_x: bool, for_weight: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = accumulator(x.dtype)
    grad_x = like(x) if for_x else x.new_empty(0)
    grad_weight = weight.new_empty(weight.shape if for_weight else (0,))
    return x.new_empty((), dtype=wide), x.new_empty(x.shape[0], dtype=wide), grad_x, grad_weight


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, _, grad_x, grad_weight = output
    ctx.for_x, ctx.for_weight = inputs[-2:]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(grad_x, grad_weight)


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> Any:
    grad_x, grad_weight = ctx.saved_tensors
    by_x = (grad_x * grad).to(grad_x.dtype) if grad is not None and ctx.for_x else None
    by_weight = (grad_weight * grad).to(grad_weight.dtype) if grad is not None and ctx.for_weight else None
    return by_x, by_weight, None, None, None, None, None


LINEAR_CROSS_ENTROPY = Operator(
    "linear_cross_entropy",
    "(Tensor x, Tensor weight, Tensor targets, Tensor token_weights, float softcap, bool for_x, "
    "bool for_weight) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    linear_cross_entropy_reference,
    fake=_fake,
    backward=_backward,
    setup_context=_setup,
)


_cross_entropy = abi.function("cross_entropy")


def _fits(x: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor, *_: Any) -> bool:
    return (
        abi.on_cpu(x, weight)
        and x.dim() == 2
        and targets.dtype == torch.int64
        and targets.is_cpu
        and targets.shape == token_weights.shape == x.shape[:1]
    )


@LINEAR_CROSS_ENTROPY.kernel(
    "native",
    native.missing,
    accepts=_fits,
    takes="float32 or bfloat16 on CPU",
)
def _native(
    x: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor, softcap: float, for_x: bool, for_weight: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The reference with all that happens between the matrix products done in one pass, in the logits' own memory."""
    losses, grad_x, grad_weight = _zeros(x, weight, for_x, for_weight)
    head = weight.to(x.dtype)
    vocabulary = weight.shape[0]
    for rows in _chunks(targets, token_weights, vocabulary):
        chunk, target, weights = x[rows], targets[rows], token_weights[rows].float()
        logits = F.linear(chunk, head)
        part = losses.new_empty(len(rows))
        pointers = (tensor.data_ptr() for tensor in (logits, target, weights, part))
        arguments = abi.CrossEntropy(abi.DTYPES[x.dtype], vocabulary, softcap, for_x or for_weight, *pointers)
        _cross_entropy(arguments, len(rows), torch.get_num_threads())
        losses[rows] = part
        if for_x:
            grad_x[rows] = logits @ head
        if for_weight and x.dtype == torch.float32:
            grad_weight.addmm_(logits.t(), chunk)
        elif for_weight:
            grad_weight += logits.t() @ chunk
    return (losses * token_weights).sum(), losses, grad_x, grad_weight.to(weight.dtype)


def linear_cross_entropy(
    x: Float[Tensor, "T D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, " T"],
    token_weights: Float[Tensor, " T"],
    softcap: float = 0.0,
) -> tuple[Float[Tensor, ""], Float[Tensor, " T"]]:
    """Return (sum over t of token_weights[t] * loss[t], loss [T]).

    A token's loss is -log softmax(x @ weight.T)[target], in nats.

    Only the sum is differentiable, with respect to x and weight. A token of weight 0 is skipped: its loss is 0 and its
    target may be anything (-100). Raises ValueError for another target outside [0, V).
    """
    recording = torch.is_grad_enabled()
    for_x, for_weight = recording and x.requires_grad, recording and weight.requires_grad
    loss_sum, losses, _, _ = LINEAR_CROSS_ENTROPY.call(x, weight, targets, token_weights, softcap, for_x, for_weight)
    return loss_sum, losses
