"""How many tokens the next step may hold, and how long to wait for company: pure policies, and the cost they learn."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.serve.scheduler import Limits, SequenceState


class BatchPolicy:
    """As many as fit, at once."""

    def arrived(self, prompt_tokens: int) -> None:
        """Note the length of a new prompt."""

    def observe(self, tokens: int, seqs: int, context: int, seconds: float) -> None:
        """Note what a step took: `tokens` computed, of `seqs` sequences that had `context` tokens in the cache."""

    def step_tokens(self, running: Sequence[SequenceState], limits: Limits) -> int:
        """Return how many tokens the next step may hold."""
        return limits.step_tokens

    def hold(self, waiting: int, oldest_seconds: float) -> float:
        """Return for how many seconds to wait for more before the first step of an idle engine."""
        return 0.0

    def token_cost(self) -> float:
        """Return what one more token adds to a step, as a share of the step without it."""
        return 0.1
