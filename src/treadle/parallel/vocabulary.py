"""Cross-entropy where each rank of a tensor-parallel group computes the logits of a part of the vocabulary.

As in ops/loss.py logits exist in chunks only, and the gradients are computed in the forward pass. What crosses ranks is
a few numbers a token (Shoeybi et al. 2019, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from treadle.parallel.tensor import TensorGroup, TensorShard

CHUNK_LOGITS, CHUNK_TOKENS = 8 << 20, 256


def vocabulary_cross_entropy(
    x: Float[Tensor, "T D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, "T"],
    token_weights: Float[Tensor, "T"],
    softcap: float,
    vocabulary: int,
    shard: TensorShard,
    group: TensorGroup,
) -> tuple[Float[Tensor, ""], Float[Tensor, "T"]]:
    """Return (sum over t of token_weights[t] * loss[t], loss [T]) of the whole vocabulary, the same on every rank.

    `weight` is this rank's `shard` of the head. The gradient of x is this rank's part of it: the sum over ranks is the
    whole. Otherwise as `ops.linear_cross_entropy`, which it equals; raises ValueError as that does.
    """
    recording = torch.is_grad_enabled()
    part = _Part(softcap, vocabulary, shard, group, recording and x.requires_grad, recording and weight.requires_grad)
    return _VocabularyLoss.apply(x, weight, targets, token_weights, part)


@dataclass(frozen=True)
class _Part:
    """What of the vocabulary is here, and which gradients are asked for."""

    softcap: float
    vocabulary: int
    shard: TensorShard
    group: TensorGroup
    for_x: bool
    for_weight: bool

    def chunk(self, logits: Tensor, target: Tensor, weights: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return each token's loss, and the gradient of the logits where one is asked for."""
        shard, group = self.shard, self.group
        if self.softcap:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        slope = 1 - (logits / self.softcap).square() if self.softcap else None
        logits[:, shard.stop - shard.start :] = -math.inf  # padding is no token
        here = ((target >= shard.start) & (target < shard.stop))[:, None]
        place = torch.where(here, target[:, None] - shard.start, 0)
        largest = group.largest(logits.amax(-1, keepdim=True))
        # One exchange for both: the sum of exponentials, and the target's logit from the rank that has it.
        exponentials = torch.exp(logits - largest).sum(-1, keepdim=True)
        both = torch.cat([exponentials, logits.gather(1, place).where(here, 0)], 1)
        total, of_target = group.sum(both, exact=True).split(1, 1)
        total = largest + total.log()
        losses = (total - of_target)[:, 0]
        if not (self.for_x or self.for_weight):
            return losses, None
        grad = torch.exp(logits - total)
        grad.scatter_add_(1, place, -here.to(grad.dtype))
        grad *= weights[:, None]
        return losses, grad if slope is None else grad * slope


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor, part: _Part
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(x.dtype, torch.float32)
        grad_x = torch.zeros_like(x, memory_format=torch.contiguous_format) if part.for_x else None
        grad_weight = weight.new_zeros(weight.shape, dtype=wide) if part.for_weight else None
        losses = x.new_zeros(x.shape[0], dtype=wide)
        head, token_weights = weight.to(x.dtype), token_weights.to(wide)
        counted = token_weights.nonzero()[:, 0]
        chosen = targets[counted]
        if counted.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) < part.vocabulary:
            raise ValueError(f"a target lies outside the vocabulary of {part.vocabulary} tokens")
        for rows in counted.split(max(CHUNK_TOKENS, CHUNK_LOGITS // weight.shape[0])):
            chunk = x[rows]
            losses[rows], grad = part.chunk((chunk @ head.t()).to(wide), targets[rows], token_weights[rows])
            if grad is None:
                continue
            grad = grad.to(x.dtype)
            if grad_x is not None:
                grad_x[rows] = grad @ head
            if grad_weight is not None:
                grad_weight += grad.t() @ chunk
        ctx.grad_x = grad_x
        ctx.grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        ctx.mark_non_differentiable(losses)
        return (losses * token_weights).sum(), losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad, _ = grads
        by_x = None if ctx.grad_x is None else (ctx.grad_x * grad).to(ctx.grad_x.dtype)
        by_weight = None if ctx.grad_weight is None else (ctx.grad_weight * grad).to(ctx.grad_weight.dtype)
        return by_x, by_weight, None, None, None
