"""One optimizer step: the loss of the whole global batch, its gradient, and the update.

The loss is one sum over all tokens of the global batch, each times its weight, divided by one global sum of weights,
known before the first backward pass. So loss, gradient and gradient norm do not depend on how the batch is cut into
microbatches and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from treadle.data import PackedBatch
from treadle.model.context import PackedContext
from treadle.parallel.collectives import sum_over_ranks
from treadle.parallel.shard import gradient_square_sum, local_gradients, synchronize_gradients
from treadle.train.state import TrainState


@dataclass(frozen=True)
class StepResult:
    """What a step measured: nats per token, norm before clipping, tokens in the global batch, why it was skipped."""

    loss: float
    gradient_norm: float
    tokens: int
    weight: float
    overflowed: bool = False
    skipped: str = ""


# Given what a step measured, says why its update must not be made, or "".
Judge = Callable[[StepResult], str]


def train_step(
    state: TrainState,
    microbatches: Sequence[PackedBatch],
    device: torch.device,
    clip: float,
    judge: Judge = lambda _: "",
) -> StepResult:
    """Take one optimizer step over this rank's `microbatches`; every rank calls it, with equally many.

    `clip` bounds the norm of the gradient (0: no bound). The update is left out, with the reason in the result, where
    the gradients overflowed fp16, no token has a weight, or `judge` gives a reason.
    """
    state.optimizer.zero_grad(set_to_none=True)
    weight, tokens = sum_over_ranks(
        [
            sum(float(batch.token_weights.sum(dtype=torch.float64)) for batch in microbatches),
            sum(len(batch.tokens) for batch in microbatches),
        ]
    )
    scale = state.scaler.scale / weight if weight else 0.0
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    for index, batch in enumerate(microbatches):
        last = index == len(microbatches) - 1
        synchronize_gradients(state.model, enabled=last, keep_weights=not last)
        # The scale goes into the tokens' weights, so that in fp16 no gradient is ever without it.
        weights = batch.token_weights.to(device)
        scaled, losses = forward_loss(state.model, batch, device, weights * scale)
        scaled.backward()
        loss_sum += (losses.detach().double() * weights).sum()
    result = _measure(state, loss_sum, weight, int(tokens))
    if not result.skipped:
        result = replace(result, skipped=judge(result))
    if not result.skipped:
        _clip(state, result.gradient_norm, clip)
        state.optimizer.step()
    return result


def forward_loss(
    model: torch.nn.Module, batch: PackedBatch, device: torch.device, token_weights: Float[Tensor, "T"]
) -> tuple[Float[Tensor, ""], Float[Tensor, "T"]]:
    """Return the weighted loss sum of a batch and each token's loss, in nats."""
    context = PackedContext(batch.starts.to(device), batch.max_length, batch.positions.to(device))
    return model(batch.tokens.to(device), context, batch.targets.to(device), token_weights)


def _measure(state: TrainState, loss_sum: Tensor, weight: float, tokens: int) -> StepResult:
    """Sum up over ranks: the loss, and the norm of the gradient with the loss scale taken out."""
    total, squares = sum_over_ranks([float(loss_sum), gradient_square_sum(state.model.parameters())])
    norm = math.sqrt(squares) / state.scaler.scale if squares >= 0 else math.nan
    loss = total / weight if weight else math.nan
    if not weight:
        return StepResult(loss, norm, tokens, weight, skipped="no token of the batch has a weight")
    overflowed = state.scaler.scale > 1 and not math.isfinite(norm) and math.isfinite(loss)
    reason = f"the gradients overflowed fp16 at the loss scale {state.scaler.scale:,.0f}" if overflowed else ""
    return StepResult(loss, norm, tokens, weight, overflowed, reason)


def _clip(state: TrainState, norm: float, clip: float) -> None:
    """Take the loss scale out of the gradients and bound their norm, in one pass over them."""
    factor = 1.0 / state.scaler.scale
    if clip and norm > clip:
        factor *= clip / norm
    gradients = local_gradients(state.model.parameters())
    if factor != 1.0:
        torch._foreach_mul_(gradients, factor)
