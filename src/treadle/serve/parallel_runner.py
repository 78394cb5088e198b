"""Runs one engine step on all ranks of a parallel model: the counterpart of runner.py's local one."""

from __future__ import annotations

from treadle.serve.batch import StepBatch, StepOutput
from treadle.serve.rank_commands import DropWeights, Step
from treadle.serve.ranks import Ranks


class ParallelRunner:
    """The weights of one number, on all ranks, and the cache that they read and write."""

    def __init__(self, ranks: Ranks, weights: int) -> None:
        self.ranks, self.weights = ranks, weights

    def step(self, batch: StepBatch) -> StepOutput:
        """Compute a step. Raises TreadleError, naming the rank, where one has failed: no further step is possible."""
        return self.ranks.step(Step(self.weights, batch))

    def close(self) -> None:
        """Forget the weights."""
        if self.ranks.error is None:
            self.ranks.all(DropWeights(self.weights))
