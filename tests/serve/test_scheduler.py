"""The scheduler's decisions, for any state."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from treadle.serve.scheduler import Limits, Load, decide


def loads(first: int) -> st.SearchStrategy[list[Load]]:
    one = st.tuples(st.integers(1, 60), st.integers(0, 60))
    return st.lists(one, max_size=12).map(
        lambda pairs: [Load(first + i, tokens, tokens + more) for i, (tokens, more) in enumerate(pairs)]
    )


limits = st.builds(Limits, st.integers(1, 8), st.integers(120, 600), st.integers(1, 100))


@given(waiting=loads(100), running=loads(0), limits=limits)
def test_a_decision_keeps_every_limit_and_the_order(waiting: list[Load], running: list[Load], limits: Limits) -> None:
    running = running[: limits.max_seqs]
    while sum(load.reserve for load in running) > limits.cache_tokens:
        running.pop()
    decision = decide(waiting, running, limits)

    assert list(decision.resume) == [load.number for load in running]
    started = waiting[: len(decision.start)]
    assert list(decision.start) == [load.number for load in started], "first come, first served"
    assert len(running) + len(started) <= limits.max_seqs
    assert sum(load.reserve for load in running + started) <= limits.cache_tokens
    tokens = sum(load.compute for load in running + started)
    assert tokens <= limits.step_tokens or len(started) <= 1
    assert decision.reason


@given(waiting=loads(100), limits=limits)
def test_nothing_running_means_that_something_starts(waiting: list[Load], limits: Limits) -> None:
    """Whatever passed the check at submission (its reserve fits the cache alone) can start alone: no deadlock."""
    decision = decide(waiting, [], limits)
    assert bool(decision.start) == bool(waiting)


@given(waiting=loads(100), running=loads(0), limits=limits)
def test_what_waits_does_so_for_a_limit(waiting: list[Load], running: list[Load], limits: Limits) -> None:
    running = running[: limits.max_seqs]
    decision = decide(waiting, running, limits)
    if len(decision.start) == len(waiting):
        assert "wait" not in decision.reason
        return
    now = running + waiting[: len(decision.start)]
    next_one = waiting[len(decision.start)]
    assert (
        len(now) == limits.max_seqs
        or sum(load.reserve for load in now) + next_one.reserve > limits.cache_tokens
        or sum(load.compute for load in now) + next_one.compute > limits.step_tokens
    )
    assert "wait" in decision.reason
