"""Spikes: told from noise, and answered as the policy says."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.train.spikes import SpikeSettings, after_step, judge, robust_deviation
from treadle.train.state import SpikeState


def calm(steps: int = 100, seed: int = 0, noise: float = 0.05) -> SpikeState:
    """Return the statistics after `steps` steps of a loss that falls slowly, with normal noise."""
    random = np.random.default_rng(seed)
    losses = (3 - np.arange(steps) / steps / 2 + noise * random.standard_normal(steps)).tolist()
    return SpikeState(losses, (1 + noise * random.standard_normal(steps)).tolist())


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("which", ["loss", "gradient norm"])
def test_what_is_no_number_is_a_spike_from_the_first_step_on(value: float, which: str) -> None:
    loss, norm = (value, 1.0) if which == "loss" else (1.0, value)
    assert judge(SpikeSettings(), SpikeState(), loss, norm).action == "skip"
    assert f"the {which} is {value}" in judge(SpikeSettings(policy="stop"), SpikeState(), loss, norm).reason
    assert judge(SpikeSettings(policy="off"), SpikeState(), loss, norm).action == "stop"


def test_a_jump_is_a_spike_and_a_fall_is_not() -> None:
    verdict = judge(SpikeSettings(), calm(), 12.0, 1.0)
    assert verdict.action == "skip"
    assert "the loss 12 lies" in verdict.reason and "of the last 100 steps" in verdict.reason
    assert judge(SpikeSettings(), calm(), 2.6, 40.0).reason.startswith("the gradient norm 40")
    assert judge(SpikeSettings(), calm(), 0.1, 0.01).action == "none"
    assert judge(SpikeSettings(policy="off"), calm(), 12.0, 40.0).action == "none"


@settings(max_examples=30)
@given(st.integers(0, 10_000))
def test_normal_noise_is_no_spike(seed: int) -> None:
    state = calm(128, seed)
    random = np.random.default_rng(seed + 1)
    for _ in range(50):
        loss, norm = 2.5 + 0.05 * random.standard_normal(), 1 + 0.05 * random.standard_normal()
        assert judge(SpikeSettings(), state, loss, norm).action == "none"
        state = after_step(SpikeSettings(), state, loss, norm, "none")


def test_nothing_but_non_numbers_is_a_spike_before_there_is_a_past() -> None:
    few = SpikeSettings(warmup_steps=32)
    assert judge(few, calm(31), 1e6, 1e6).action == "none"
    assert judge(few, calm(32), 1e6, 1e6).action == "skip"


def test_a_spike_does_not_raise_the_bar_for_the_next() -> None:
    state = calm()
    for _ in range(5):
        assert judge(SpikeSettings(), state, 12.0, 1.0).action == "skip"
        state = after_step(SpikeSettings(), state, 12.0, 1.0, "skip")
    assert state.in_a_row == 5
    assert max(state.losses) < 4
    assert after_step(SpikeSettings(), state, 2.5, 1.0, "none").in_a_row == 0


def test_skipping_turns_into_rewinding_and_rewinding_into_stopping() -> None:
    policy = SpikeSettings(policy="skip", skips_before_rewind=3, rewinds=2)
    state, actions = calm(), []
    for _ in range(9):
        verdict = judge(policy, state, 12.0, 1.0)
        actions.append(verdict.action)
        state = after_step(policy, state, 12.0, 1.0, verdict.action)
        if verdict.action == "rewind":
            state = replace(calm(), rewinds=state.rewinds + 1)
        if verdict.action == "stop":
            break
    assert actions == ["skip", "skip", "rewind"] * 2 + ["skip", "skip", "stop"]
    assert "the 3rd spike in a row, after 2 rewinds" in verdict.reason


def test_the_rewind_policy_rewinds_at_once_and_the_stop_policy_stops() -> None:
    assert judge(SpikeSettings(policy="rewind"), calm(), 12.0, 1.0).action == "rewind"
    assert judge(SpikeSettings(policy="rewind", rewinds=0), calm(), 12.0, 1.0).action == "stop"
    assert judge(SpikeSettings(policy="stop"), calm(), 12.0, 1.0).action == "stop"


def test_the_window_is_bounded() -> None:
    policy, state = SpikeSettings(window=16), SpikeState()
    for step in range(50):
        state = after_step(policy, state, float(step), 1.0, "none")
    assert state.losses == [float(step) for step in range(34, 50)]
    assert len(state.gradient_norms) == 16


def test_the_robust_deviation_is_the_standard_deviation_of_normal_noise_whatever_a_few_outliers_are() -> None:
    values = np.random.default_rng(0).standard_normal(20_000)
    assert robust_deviation(values.tolist(), 0.0) == pytest.approx(1.0, rel=0.02)
    values[:200] = 1e9
    assert robust_deviation(values.tolist(), 0.0) == pytest.approx(1.0, rel=0.05)


def test_a_very_smooth_run_sees_no_spikes_in_small_changes() -> None:
    smooth = SpikeState([2.0] * 64, [1.0] * 64)
    assert judge(SpikeSettings(), smooth, 2.3, 2.9).action == "none"
    assert judge(SpikeSettings(), smooth, 2.5, 1.0).action == "skip"
    assert judge(SpikeSettings(), smooth, 2.0, 3.1).action == "skip"
