"""Loss and perplexity on held-out text: per token, word and byte, the same at any batch size."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field

from treadle.config import Settings
from treadle.data import PackedBatch
from treadle.model.transformer import Transformer
from treadle.parallel.collectives import sum_over_ranks
from treadle.parallel.shard import drop_gathered
from treadle.train.step import forward_loss


class EvaluationSettings(Settings):
    """Evaluation in the loop: every `every` steps (0: only at the end) on about `tokens` held-out tokens (0: all)."""

    every: int = Field(100, ge=0)
    tokens: int = Field(65536, ge=0)


@dataclass(frozen=True)
class Measured:
    """Sums over held-out tokens: -log probability in nats, tokens predicted, and the words and bytes that they spell.

    `words` and `text_bytes` 0 mean unknown.
    """

    loss_sum: float
    tokens: float
    words: float = 0.0
    text_bytes: float = 0.0

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.loss_sum / self.tokens if self.tokens else math.nan

    def report(self) -> dict[str, Any]:
        """Return loss and perplexities by name; those per word and byte where the text's size is known."""
        result: dict[str, Any] = {
            "loss": self.loss,
            "perplexity": perplexity(self.loss),
            "tokens": round(self.tokens),
        }
        if self.words:
            result |= {"perplexity_per_word": perplexity(self.loss_sum / self.words), "words": round(self.words)}
        if self.text_bytes:
            per_byte = self.loss_sum / self.text_bytes
            result |= {
                "perplexity_per_byte": perplexity(per_byte),
                "bits_per_byte": per_byte / math.log(2),
                "bytes": round(self.text_bytes),
            }
        return result


def perplexity(loss: float) -> float:
    """Return exp(loss), infinity where that has no float."""
    return math.exp(loss) if loss < 700 else math.inf


@torch.no_grad()
def measure(model: Transformer, batches: Iterable[PackedBatch], device: torch.device) -> Measured:
    """Return the sums over all batches of all ranks; every rank must have equally many.

    The losses of single tokens are added up in float64, so that batch sizes differ by the model's rounding alone.
    """
    training = model.training
    model.eval()
    loss_sum, tokens = torch.zeros((), dtype=torch.float64, device=device), 0.0
    try:
        for batch in batches:
            weights = batch.token_weights.to(device)
            losses = forward_loss(model, batch, device, weights)[1]
            loss_sum += (losses.double() * weights).sum()
            tokens += float(weights.sum(dtype=torch.float64))
    finally:
        drop_gathered(model)
        model.train(training)
    total, count = sum_over_ranks([float(loss_sum), tokens])
    return Measured(total, count)
