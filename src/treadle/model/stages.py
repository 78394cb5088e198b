"""A laid-out model, called as if it were whole: its parts on all ranks compute, one rank gets the logits."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from treadle.model.context import Context
from treadle.model.parallel import VocabularyReadout
from treadle.model.transformer import Transformer
from treadle.parallel.pipeline import PipelineGroup


class ParallelModel:
    """This rank's part of a model (see model/parallel.py), and the pipeline that its stage belongs to, if any.

    For serving and evaluation: there is no way back for gradients. Every rank calls it with the same tokens and rows.
    """

    def __init__(self, module: Transformer, pipeline: PipelineGroup | None) -> None:
        assert module.layout is not None
        self.module, self.pipeline = module, pipeline
        self.head_rank = module.layout.coordinates["tp"] == 0  # the one of each stage that handles logits
        if isinstance(module.readout, VocabularyReadout):
            module.readout.to_first = True

    @torch.no_grad()
    def __call__(
        self, tokens: Int[Tensor, "T"], context: Context, rows: Int[Tensor, "R"] | None = None
    ) -> Float[Tensor, "R V"]:
        """Return the logits of `rows` (default: every token) on the first rank, elsewhere none ([0, V])."""
        module, pipeline = self.module, self.pipeline
        if pipeline is None:
            return self._only_on_head_rank(module(tokens, context, rows=rows))
        stage, last = pipeline.stage, pipeline.stages - 1
        width, vocabulary = module.spec.width, module.spec.vocabulary
        hidden = tokens
        if stage:
            empty = torch.empty(len(tokens), width, dtype=module.dtype, device=tokens.device)
            hidden = pipeline.receive(empty, stage - 1)
        x = module(hidden, context, rows=rows)
        if stage < last:
            pipeline.send(x, stage + 1)
        if not self.head_rank or 0 < stage < last:
            return x.new_empty(0, vocabulary)
        if stage == last:
            pipeline.send(x, 0)
            return x.new_empty(0, vocabulary)
        count = len(tokens) if rows is None else len(rows)
        return pipeline.receive(x.new_empty(count, vocabulary), last)

    def _only_on_head_rank(self, logits: Float[Tensor, "R V"]) -> Float[Tensor, "R V"]:
        return logits if self.head_rank else logits[:0]
