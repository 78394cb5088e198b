"""Schedules at their edges, and as properties: bounded, without jumps, up then down, ending at the final factor."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.config import UserError, parse_settings
from treadle.train.schedules import ScheduleSettings, check_schedule, rate_factor, schedules, warmup_length

OURS = ["constant", "linear", "cosine", "wsd"]


def curve(total: int, **tree: object) -> list[float]:
    settings = parse_settings(ScheduleSettings, tree)
    check_schedule(settings, total)
    return [rate_factor(step, total, settings) for step in range(total)]


def test_linear_by_hand() -> None:
    assert curve(5, name="linear", warmup_steps=0, final=0.0) == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert curve(4, name="linear", warmup_steps=1, final=0.5) == pytest.approx([0.5, 1.0, 0.75, 0.5])


def test_cosine_by_hand() -> None:
    assert curve(5, name="cosine", warmup_steps=0, final=0.2) == pytest.approx(
        [0.2 + 0.8 * (1 + math.cos(math.pi * quarter / 4)) / 2 for quarter in range(5)]
    )


def test_wsd_by_hand() -> None:
    values = curve(10, name="wsd", warmup_steps=3, decay_steps=4, decay="linear", final=0.0)
    assert values == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 0.75, 0.5, 0.25, 0])
    values = curve(10, name="wsd", warmup_steps=0, decay_steps=4, decay="sqrt", final=0.0)
    assert values[5:] == pytest.approx([1, 0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75), 0])


def test_wsd_shares_its_stable_part_with_a_longer_run() -> None:
    """What the schedule is for: a longer run continues from the same point, before the decay."""
    short = curve(100, name="wsd", warmup_steps=10, decay_steps=20)
    long = curve(1000, name="wsd", warmup_steps=10, decay_steps=20)
    assert short[:80] == long[:80]
    assert short[80] < 1 == long[80]


def test_constant_stays() -> None:
    assert curve(6, name="constant", warmup_steps=1) == [0.5, 1, 1, 1, 1, 1]


def test_beyond_the_end_it_stays() -> None:
    settings = ScheduleSettings(name="cosine", warmup_steps=2, final=0.3)
    assert rate_factor(50, 10, settings) == pytest.approx(0.3)


@given(
    name=st.sampled_from(OURS),
    total=st.integers(1, 400),
    warmup=st.none() | st.integers(0, 399),
    final=st.floats(0, 1),
    decay=st.sampled_from(["linear", "sqrt", "cosine"]),
)
def test_properties(name: str, total: int, warmup: int | None, final: float, decay: str) -> None:
    settings = ScheduleSettings(
        name=name, warmup_steps=warmup if warmup is None else warmup % total, final=final, decay=decay
    )
    values = [rate_factor(step, total, settings) for step in range(total)]
    top = warmup_length(total, settings)
    assert all(0 < value <= 1 for value in values[: top + 1])
    assert values[top] == 1.0  # the peak is reached
    assert values[: top + 1] == pytest.approx([(step + 1) / (top + 1) for step in range(top + 1)])
    assert all(before >= after - 1e-12 for before, after in pairwise(values[top:]))
    if top < total - 1:
        assert values[-1] == pytest.approx(1.0 if name == "constant" else final)
    # No jumps: no step is steeper than the curve's steepest place, at a decay of this many steps.
    length = max(1, min(total - 1 - top, total // 5) if name == "wsd" else total - 1 - top)
    form = decay if name == "wsd" else name
    steepest = {"constant": 0.0, "linear": 1 / length, "cosine": math.pi / 2 / length, "sqrt": length**-0.5}[form]
    assert all(before - after <= steepest + 1e-9 for before, after in pairwise(values[top:]))


def test_a_short_run_needs_no_thought_about_the_warm_up() -> None:
    assert curve(3, name="cosine")[0] == 1.0
    assert curve(1, name="linear") == [1.0]
    assert curve(100, name="constant")[:6] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1])


@pytest.mark.parametrize(
    ("tree", "total", "words"),
    [
        ({"warmup_steps": 100}, 100, "schedule.warmup_steps=100 leaves nothing of a run of 100 steps"),
        ({"name": "wsd", "warmup_steps": 60, "decay_steps": 50}, 100, "are more than the 100 steps"),
        ({"name": "cosin"}, 1000, "unknown schedule 'cosin', did you mean 'cosine'"),
        ({"decay_steps": 5}, 1000, "decay_steps belongs to the schedule 'wsd'"),
        ({"final": 2}, 1000, "less than or equal to 1"),
    ],
)
def test_what_does_not_fit_is_refused_at_the_start(tree: dict, total: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        curve(total, **tree)


def test_a_schedule_can_be_added() -> None:
    assert set(OURS) <= set(schedules.names())
