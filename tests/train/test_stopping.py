"""Stopping: each condition alone ends a run, with its reason, and at the right moment."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.train.state import Counters, PatienceState
from treadle.train.stopping import StopSettings, after_evaluation, should_stop

NO_PATIENCE = PatienceState()


@pytest.mark.parametrize(
    ("settings", "counters", "patience", "loss", "reason"),
    [
        (StopSettings(), Counters(step=100), NO_PATIENCE, None, "all 100 steps"),
        (StopSettings(tokens=1000), Counters(step=1, tokens=1000), NO_PATIENCE, None, "1,000 tokens"),
        (StopSettings(minutes=2), Counters(step=1, seconds=120), NO_PATIENCE, None, "2.0 minutes"),
        (StopSettings(target_loss=1.5), Counters(step=1), NO_PATIENCE, 1.5, "reached stop.target_loss 1.5"),
        (
            StopSettings(patience=3),
            Counters(step=50),
            PatienceState(best=2.25, best_step=20, waited=3),
            2.5,
            "3 evaluations in a row did not improve on the validation loss 2.2500 of step 20",
        ),
    ],
)
def test_each_condition_ends_the_run_and_says_so(settings, counters, patience, loss, reason: str) -> None:
    decision = should_stop(settings, 100, counters, patience, loss)
    assert decision.stop
    assert reason in decision.reason


@pytest.mark.parametrize(
    ("settings", "counters", "patience", "loss"),
    [
        (StopSettings(), Counters(step=99), NO_PATIENCE, 0.0),
        (StopSettings(tokens=1000), Counters(tokens=999), NO_PATIENCE, 0.0),
        (StopSettings(minutes=2), Counters(seconds=119.9), NO_PATIENCE, 0.0),
        (StopSettings(target_loss=1.5), Counters(), NO_PATIENCE, 1.51),
        (StopSettings(target_loss=1.5), Counters(), NO_PATIENCE, None),
        (StopSettings(target_loss=1.5), Counters(), NO_PATIENCE, math.nan),
        (StopSettings(patience=3), Counters(), PatienceState(best=2.0, waited=2), 3.0),
    ],
)
def test_nothing_ends_the_run_a_moment_too_early(settings, counters, patience, loss) -> None:
    assert not should_stop(settings, 100, counters, patience, loss).stop


@given(st.lists(st.one_of(st.floats(0.5, 10), st.just(math.nan), st.just(math.inf)), max_size=30), st.integers(1, 5))
def test_patience_counts_the_evaluations_since_the_best(losses: list[float], allowed: int) -> None:
    state = PatienceState()
    for step, loss in enumerate(losses, start=1):
        state = after_evaluation(state, loss, step)
        finite = [(value, at) for at, value in enumerate(losses[:step], start=1) if math.isfinite(value)]
        best, best_step = min(finite, default=(None, 0))
        assert (state.best, state.best_step) == (best, best_step)
        assert state.waited == step - best_step
        decision = should_stop(StopSettings(patience=allowed), 10**6, Counters(), state, loss)
        # Without any loss that is a number there is no best one to name.
        assert decision.stop == (state.waited >= allowed)


def test_a_gain_below_patience_gain_is_none() -> None:
    state = after_evaluation(PatienceState(), 2.0, 1, gain=0.1)
    state = after_evaluation(state, 1.95, 2, gain=0.1)
    assert (state.best, state.waited) == (2.0, 1)
    state = after_evaluation(state, 1.89, 3, gain=0.1)
    assert (state.best, state.best_step, state.waited) == (1.89, 3, 0)
