"""Runs one engine step on the model, in this process."""

from __future__ import annotations

from typing import Protocol

import torch

from treadle import ops
from treadle.model.transformer import Transformer
from treadle.serve.batch import StepBatch, StepOutput
from treadle.serve.kv_cache import KVCache
from treadle.serve.paged import PagedContext


class Runner(Protocol):
    """What the engine's core asks of whoever computes."""

    def step(self, batch: StepBatch) -> StepOutput:
        """Compute a step. Raises TreadleError where no further step is possible."""
        ...

    def close(self) -> None:
        """Free what it holds."""
        ...


class LocalRunner:
    """A model and the cache that it reads and writes."""

    def __init__(self, module: Transformer, cache: KVCache, deterministic: bool = False) -> None:
        self.module, self.cache, self.deterministic = module, cache, deterministic
        self.device = module.embedding.weight.device

    @torch.inference_mode()
    def step(self, batch: StepBatch) -> StepOutput:
        """Compute a step."""
        with ops.row_invariant(self.deterministic):
            return self._step(batch)

    def _step(self, batch: StepBatch) -> StepOutput:
        tokens = torch.tensor(batch.tokens, device=self.device)
        context = PagedContext(self.cache, batch, self.device, deterministic=self.deterministic)
        hidden = self.module.hidden(tokens, context)
        wanted = batch.rows + batch.pooled
        if len(wanted) != len(hidden) or batch.pooled:
            hidden = hidden[torch.tensor(wanted, dtype=torch.int64, device=self.device)]
        normed = self.module.norm(hidden)
        logits = self.module.logits(normed[: len(batch.rows)]).float()
        return StepOutput(logits, normed[len(batch.rows) :].float())

    def close(self) -> None:
        """Free the cache's memory."""
        self.cache.release()
