"""What an engine counts: plain numbers, made by its thread, read by metrics and the summary."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class EngineStats:
    """Counters since the start, for metrics; written by the engine's thread only."""

    requests: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompts: found in the cache
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
    decision: str = ""  # the last one's reason
    stepped: float = 0.0  # time.monotonic() after the last step
