"""A laid-out model, called as if it were whole: its parts on all ranks compute, one rank gets the logits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from treadle.model.context import Context
from treadle.model.parallel import VocabularyReadout
from treadle.model.transformer import Transformer
from treadle.parallel.pipeline import PipelineGroup


@dataclass(frozen=True)
class Microbatch:
    """Tokens that go through the stages together, and the rows of them whose logits (default: all) or last hidden state
    (default: none) are wanted. `within` gives a context in which they are computed."""

    tokens: Int[Tensor, "T"]
    context: Context
    rows: Int[Tensor, "R"] | None = None
    pooled: Int[Tensor, "P"] | None = None
    within: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext

    def wanted(self, hidden: Float[Tensor, "T D"]) -> tuple[Float[Tensor, "R D"], Float[Tensor, "P D"]]:
        """Return the rows for logits, and those whose hidden state is wanted."""
        rows = hidden if self.rows is None else hidden[self.rows]
        return rows, hidden[:0] if self.pooled is None else hidden[self.pooled]

    def counts(self) -> tuple[int, int]:
        """Return how many rows `wanted` gives of each."""
        rows = len(self.tokens) if self.rows is None else len(self.rows)
        return rows, 0 if self.pooled is None else len(self.pooled)


class ParallelModel:
    """This rank's part of a model (see model/parallel.py), and the pipeline that its stage belongs to, if any.

    For serving and evaluation: there is no way back for gradients. Every rank calls it with the same microbatches.
    """

    def __init__(self, module: Transformer, pipeline: PipelineGroup | None) -> None:
        assert module.layout is not None
        self.module, self.layout, self.pipeline = module, module.layout, pipeline
        self.speaks = self.layout.coordinates["tp"] == 0  # the one rank of each stage that passes logits on
        if isinstance(module.readout, VocabularyReadout):
            module.readout.to_first = True

    @torch.no_grad()
    def __call__(self, *microbatches: Microbatch) -> tuple[Float[Tensor, "R V"], Float[Tensor, "P D"]]:
        """Return the logits and the last hidden states, normed, that the microbatches want, one behind the other.

        Both are on the first rank; elsewhere there are none ([0, V] and [0, D]).
        """
        module, spec = self.module, self.module.spec
        hidden = self._run(microbatches)
        logits, states = self._empty(0, spec.vocabulary), self._empty(0, spec.width)
        if self.layout.last:
            parts = [one.wanted(x) for one, x in zip(microbatches, hidden, strict=True)]
            rows, pooled = (torch.cat(kind) for kind in zip(*parts, strict=True))
            normed = module.norm(torch.cat([rows, pooled]))
            logits, states = module.logits(normed[: len(rows)]), normed[len(rows) :]
        counts = [one.counts() for one in microbatches]
        return self._to_first(logits, sum(n for n, _ in counts)), self._to_first(states, sum(n for _, n in counts))

    def _run(self, microbatches: Sequence[Microbatch]) -> list[Float[Tensor, "T D"]]:
        """Return what this rank's layers make of each; they compute one while the last travels to the next stage."""
        pipeline = self.pipeline
        if pipeline is None:
            return [self._compute(one, one.tokens) for one in microbatches]
        stage, width = pipeline.stage, self.module.spec.width
        arriving = [
            pipeline.start_receive(self._empty(len(one.tokens), width), stage - 1, number)
            for number, one in enumerate(microbatches)
            if stage
        ]
        done, leaving = [], []
        for number, one in enumerate(microbatches):
            done.append(self._compute(one, arriving[number].wait() if stage else one.tokens))
            if stage < pipeline.stages - 1:
                leaving.append(pipeline.start_send(done[-1], stage + 1, number))
        for transfer in leaving:
            transfer.wait()
        return done

    def _compute(self, microbatch: Microbatch, inputs: Tensor) -> Float[Tensor, "T D"]:
        with microbatch.within():
            return self.module.hidden(inputs, microbatch.context)

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
