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

    For serving and evaluation: there is no way back for gradients. Every rank calls it with the same arguments.
    """

    def __init__(self, module: Transformer, pipeline: PipelineGroup | None) -> None:
        assert module.layout is not None
        self.module, self.pipeline = module, pipeline
        self.speaks = module.layout.coordinates["tp"] == 0  # the one rank of each stage that passes logits on
        if isinstance(module.readout, VocabularyReadout):
            module.readout.to_first = True

    @torch.no_grad()
    def __call__(
        self,
        tokens: Int[Tensor, "T"],
        context: Context,
        rows: Int[Tensor, "R"] | None = None,
        pooled: Int[Tensor, "P"] | None = None,
    ) -> tuple[Float[Tensor, "R V"], Float[Tensor, "P D"]]:
        """Return the logits of `rows` (default: every token) and the last hidden states, normed, of `pooled` (default:
        none), both on the first rank; elsewhere there are none ([0, V] and [0, D])."""
        module = self.module
        count = len(tokens) if rows is None else len(rows)
        hidden = self._stage(tokens, context)
        logits, states = self._empty(0, module.spec.vocabulary), self._empty(0, module.spec.width)
        if module.layout is not None and module.layout.last:
            if rows is not None:
                hidden = hidden[rows if pooled is None else torch.cat([rows, pooled])]
            normed = module.norm(hidden)
            logits, states = module.logits(normed[:count]), normed[count:]
        return self._to_first(logits, count), self._to_first(states, 0 if pooled is None else len(pooled))

    def _stage(self, tokens: Int[Tensor, "T"], context: Context) -> Float[Tensor, "T D"]:
        """Return what this rank's layers make of what the stage before it sent, and send it on."""
        if self.pipeline is None:
            return self.module.hidden(tokens, context)
        stage, x = self.pipeline.stage, tokens
        if stage:
            x = self.pipeline.receive(self._empty(len(tokens), self.module.spec.width), stage - 1)
        x = self.module.hidden(x, context)
        if stage < self.pipeline.stages - 1:
            self.pipeline.send(x, stage + 1)
        return x

    def _to_first(self, x: Float[Tensor, "R N"], rows: int) -> Float[Tensor, "R N"]:
        """Return what the last stage has, `rows` rows of it, on the first rank; nothing elsewhere."""
        pipeline = self.pipeline
        if not self.speaks:
            return x[:0]
        if pipeline is None:
            return x
        if pipeline.stage == pipeline.stages - 1:
            pipeline.send(x, 0)
            return x[:0]
        return pipeline.receive(self._empty(rows, x.shape[1]), pipeline.stages - 1) if pipeline.stage == 0 else x

    def _empty(self, rows: int, size: int) -> Tensor:
        return torch.empty(rows, size, dtype=self.module.dtype, device=self.module.device)
