"""What the next engine step runs: a pure decision about a state, returned with its reason.

A step gives every running request its next token and, beside it, computes whole prompts of waiting ones, first come,
first served, as long as a cache slot is free, the cache can hold all that they may come to need, and the step's token
budget lasts. So nothing that runs waits for what arrives, and no stream of short requests starves another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What the engine was started with, in sequences and tokens."""

    max_seqs: int
    cache_tokens: int
    step_tokens: int


@dataclass(frozen=True)
class Load:
    """What one request costs: tokens to compute in its next step, cache tokens that it may come to need."""

    number: int
    compute: int
    reserve: int


@dataclass(frozen=True)
class Decision:
    """The requests to start and those to continue, by number, and why the first one that waits was not started."""

    start: tuple[int, ...]
    resume: tuple[int, ...]
    reason: str


def decide(waiting: Sequence[Load], running: Sequence[Load], limits: Limits) -> Decision:
    """Return what the next step runs. A prompt longer than the whole budget runs in a step that starts it alone."""
    seqs = len(running)
    reserved = sum(load.reserve for load in running)
    tokens = sum(load.compute for load in running)
    started: list[int] = []
    refusal = ""
    for load in waiting:
        if seqs == limits.max_seqs:
            refusal = f"all {limits.max_seqs} cache slots are taken"
        elif reserved + load.reserve > limits.cache_tokens:
            refusal = f"{load.reserve} tokens do not fit beside {reserved} of {limits.cache_tokens} in the cache"
        elif started and tokens + load.compute > limits.step_tokens:
            refusal = f"{load.compute} tokens exceed the step's {limits.step_tokens}"
        if refusal:
            break
        started.append(load.number)
        seqs, reserved, tokens = seqs + 1, reserved + load.reserve, tokens + load.compute
    reason = f"start {len(started)}, resume {len(running)}, {tokens} tokens"
    if refusal:
        reason += f"; {len(waiting) - len(started)} wait: {refusal}"
    return Decision(tuple(started), tuple(load.number for load in running), reason)
