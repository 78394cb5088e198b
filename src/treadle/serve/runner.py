"""Runs one engine step on the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from treadle.model.transformer import Transformer
from treadle.serve.cache import CachedContext, Chunk, KeyValueCache


class Runner:
    """A model and the cache that it reads and writes."""

    def __init__(self, module: Transformer, cache: KeyValueCache) -> None:
        self.module, self.cache = module, cache
        self.device = module.embedding.weight.device

    @torch.inference_mode()
    def step(self, chunks: Sequence[Chunk]) -> Float[Tensor, "S V"]:
        """Compute each chunk's tokens and return the logits after its last one, in fp32."""
        tokens = torch.tensor([token for chunk in chunks for token in chunk.tokens], device=self.device)
        context = CachedContext(self.cache, chunks, self.device)
        logits = self.module(tokens, context, rows=context.last_rows)
        assert isinstance(logits, Tensor)
        return logits.float()
