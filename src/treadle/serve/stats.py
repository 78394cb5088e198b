"""What an engine counts: plain numbers, made by its thread, read by metrics and the summary."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

SEQS_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
TOKENS_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
STEP_SECONDS_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


@dataclass
class Distribution:
    """How often a number fell between two of `bounds`: up to the first, up to the second, ..., above the last."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0  # of all the numbers

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def plus(self, other: Distribution) -> Distribution:
        """Return the distribution of both together."""
        counts = [x + y for x, y in zip(self.counts, other.counts, strict=True)]
        return Distribution(self.bounds, counts, self.total + other.total)


@dataclass
class EngineStats:
    """Counters since the start, for metrics; written by the engine's thread only."""

    requests: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    looked_up_tokens: int = 0  # of the prompts: looked for in the cache
    cached_tokens: int = 0  # of them found
    generated_tokens: int = 0
    preemptions: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)  # by reason
    running: int = 0
    waiting: int = 0
    blocks: int = 0
    blocks_held: int = 0
    evictions: int = 0
    step_seconds: float = 0.0  # all steps together
    model_seconds: float = 0.0  # of them in the model
    last_step_tokens: int = 0
    last_step_seqs: int = 0
    budget_tokens: int = 0  # that the last step was allowed
    budget_seqs: int = 0
    budget_causes: dict[str, int] = field(default_factory=dict)  # steps by what their budget was decided by
    decision: str = ""  # the last one's reason
    stepped: float = 0.0  # time.monotonic() after the last step
    steps_by_seqs: Distribution = field(default_factory=lambda: Distribution(SEQS_BOUNDS))
    steps_by_tokens: Distribution = field(default_factory=lambda: Distribution(TOKENS_BOUNDS))
    steps_by_seconds: Distribution = field(default_factory=lambda: Distribution(STEP_SECONDS_BOUNDS))
    asleep: bool = False  # it gave its memory back and waits to be woken
