"""Dynamic batching: how much the next step may hold, and how long an idle engine waits for company.

    batch: {min_size: 4, max_size: 16, max_latency_ms: 100, strategy: length_aware}

A policy keeps what was learned (the cost of steps, the lengths of prompts); what it decides are the pure functions of
`step_budget`. The plain one learns too, as guessing ahead asks what one more token costs, but lets as many run as fit.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from treadle.config import Settings, TreadleError, UserError
from treadle.serve.cost_model import CostModel, Fit, StepWork
from treadle.serve.cost_store import load_costs, save_costs
from treadle.serve.lengths import LengthHistogram, candidate_sizes
from treadle.serve.scheduler import Limits, State
from treadle.serve.step_budget import Budget, Cause, Hold, choose_budget, choose_hold, shape

LEAST_NEWS = 16  # measured steps for which the file on disk is written again


class BatchSettings(Settings):
    """`batch:` of a server's settings. What is left out has no effect."""

    min_size: int = Field(1, ge=1, le=4096)  # requests that an idle engine waits for, as far as the latency allows
    max_size: int | None = Field(None, ge=1, le=4096)  # sequences that run at once; None: as many as fit
    max_latency_ms: float | None = Field(None, gt=0, le=3_600_000)  # of a step, while answers are in progress
    # length_aware: prompts that fit a step whole come before those that it would begin; fcfs: in their order.
    strategy: Literal["length_aware", "fcfs"] = "length_aware"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.min_size > 1 and self.max_latency_ms is None:
            raise ValueError("min_size needs max_latency_ms, or a lone request would wait for company for ever")
        if self.max_size is not None and self.min_size > self.max_size:
            raise ValueError(f"min_size={self.min_size} is more than max_size={self.max_size}")
        return self


class BatchPolicy:
    """As many as fit, at once."""

    def __init__(self, costs: CostModel | None = None, lengths: LengthHistogram | None = None) -> None:
        """`costs` and `lengths` are what an earlier run learned."""
        self.costs, self.lengths = costs or CostModel(), lengths or LengthHistogram()
        self.notes: tuple[str, ...] = ()  # for the summary at the start
        self.store: tuple[Path, dict[str, str]] | None = None  # where it is kept, and as whose
        self._known = self.costs.steps
        self._token_cost: tuple[Fit | None, float] = (None, 0.0)
        self._answers = StepWork()  # of the last step

    def arrived(self, prompt_tokens: int) -> None:
        """Note the length of a new prompt."""
        self.lengths.add(prompt_tokens)

    def observe(self, work: StepWork, seconds: float) -> None:
        """Note what a step took, all of it: whoever waits for a token waits for everything."""
        self.costs.observe(work, seconds)
        if work.rows:
            self._answers = StepWork(work.rows, work.rows, work.context, work.context + work.rows)

    def shape(self, state: State, limits: Limits) -> tuple[State, Limits, str]:
        """Return the state and the limits that the scheduler is to decide by, and why."""
        return state, limits, ""

    @property
    def cause(self) -> str:
        """What the last step's budget was decided by."""
        return Cause.FREE.value

    def hold(self, prompts: Sequence[int], oldest_seconds: float) -> Hold:
        """Return how long to wait for more than these prompts before the first step of an idle engine."""
        return Hold(0.0, "")

    def token_cost(self) -> float:
        """Return what one more token adds to a step of answers such as the last one's, as a share of it."""
        fit = self.costs.fit
        if self._token_cost[0] is not fit:  # asked for each sequence, learned every few steps
            self._token_cost = fit, fit.token_cost(self._answers)
        return self._token_cost[1]

    def describe(self) -> str:
        """Return one line for the summary at the start."""
        return "as many as fit"

    def close(self) -> None:
        """Keep what was learned, where there is a place for it."""
        if self.store is None or self.costs.steps - self._known < LEAST_NEWS:
            return
        path, identity = self.store
        try:
            save_costs(path, identity, self.costs, self.lengths)
        except TreadleError as error:  # it is only a memory: the next start learns again
            print(f"warning: what was learned about the cost of steps is lost: {error}", file=sys.stderr, flush=True)


class DynamicBatchPolicy(BatchPolicy):
    """Steps within a latency bound, and company for requests that come alone."""

    def __init__(
        self, settings: BatchSettings, costs: CostModel | None = None, lengths: LengthHistogram | None = None
    ) -> None:
        super().__init__(costs, lengths)
        self.settings = settings
        self.budget: Budget | None = None  # the last decision
        self._warm = self.costs.fit.count
        self._typical: tuple[int, ...] | None = None

    @property
    def bound(self) -> float | None:
        """Seconds that a step may take while answers are in progress."""
        return None if self.settings.max_latency_ms is None else self.settings.max_latency_ms / 1000

    def arrived(self, prompt_tokens: int) -> None:
        super().arrived(prompt_tokens)
        self._typical = None

    def shape(self, state: State, limits: Limits) -> tuple[State, Limits, str]:
        limits = self._capped(limits)
        if not limits.chunked:
            return state, limits, "prompts are not split"
        if self._typical is None:
            self._typical = self.lengths.typical()
        decoding = sum(sequence.decoding for sequence in state.running)
        sizes = candidate_sizes(limits.step_tokens, limits.block_size, decoding, self._typical)
        by_length = self.settings.strategy == "length_aware"
        self.budget = choose_budget(state, limits, self.costs.fit, self.bound, sizes, by_length)
        return *shape(state, limits, self.budget), self.budget.reason

    @property
    def cause(self) -> str:
        return super().cause if self.budget is None else self.budget.cause.value

    def hold(self, prompts: Sequence[int], oldest_seconds: float) -> Hold:
        return choose_hold(prompts, oldest_seconds, self.settings.min_size, self.costs.fit, self.bound)

    def describe(self) -> str:
        settings = self.settings
        parts: list[str] = [settings.strategy]
        if settings.max_size is not None:
            parts.append(f"up to {settings.max_size} sequences")
        if settings.max_latency_ms is not None:
            parts.append(f"steps of up to {settings.max_latency_ms:g} ms while answers are in progress")
        if settings.min_size > 1:
            parts.append(f"an idle engine waits for {settings.min_size} requests while that leaves time")
        parts.append(f"{self._warm} measured steps remembered" if self._warm else "costs to be measured")
        return ", ".join(parts)

    def _capped(self, limits: Limits) -> Limits:
        most = self.settings.max_size
        if most is None or most >= limits.max_seqs:
            return limits
        return replace(limits, max_seqs=most)


def make_policy(
    settings: BatchSettings | None,
    chunked: bool = True,
    path: Path | None = None,
    identity: dict[str, str] | None = None,
) -> BatchPolicy:
    """Return the policy of an engine; None is the plain one.

    `path` is where what it learns is kept from one start to the next (see `cost_store.cost_path`); what does not fit
    `identity` or is damaged is left out, as `notes` of the policy then say. Raises UserError for settings that
    contradict the engine's.
    """
    if settings is not None and settings.max_latency_ms is not None and not chunked:
        raise UserError(
            "batch.max_latency_ms needs prompts that can be split; leave --no-enable-chunked-prefill or the bound out"
        )
    costs, lengths, note = (None, None, "") if path is None else load_costs(path, identity or {})
    policy = BatchPolicy(costs, lengths) if settings is None else DynamicBatchPolicy(settings, costs, lengths)
    policy.notes = (note,) if note else ()
    policy.store = None if path is None else (path, identity or {})
    return policy
