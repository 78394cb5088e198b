"""What is learned of steps whose true cost is known: laws with noise, bursts, slow first steps, and long silences."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serve.batch_simulation import linear, noise_of, roofline
from treadle.serve.cost_model import (
    DEFAULT_TOKEN_COST,
    FIRST_TOKENS,
    KEEP,
    UPPER,
    CostModel,
    StepWork,
    _non_negative,
    size_class,
)


def answers(count: int, context: int) -> StepWork:
    return StepWork(count, count, count * context, count * (context + 1))


def prompt(tokens: int, context: int = 0) -> StepWork:
    return StepWork.of(context, tokens, 1)


def mixed(dice: random.Random) -> StepWork:
    """A step as they come: some answers, often a piece of a prompt beside them."""
    work = answers(dice.randint(0, 16), dice.randint(20, 600))
    if not work.tokens or dice.random() < 0.3:
        work += prompt(round(2 ** dice.uniform(2, 10.5)), dice.choice((0, 0, 256, 1024)))
    return work


def learned(cost: Callable[[StepWork], float], steps: int = 800, seed: int = 1) -> CostModel:
    model, dice, noise = CostModel(), random.Random(seed), noise_of(seed)
    for _ in range(steps):
        work = mixed(dice)
        model.observe(work, cost(work) * noise())
    return model


def test_the_work_of_a_piece_counts_every_pair() -> None:
    """Brute force: token i of the piece attends to all before it and itself."""
    for computed, tokens in ((0, 1), (0, 7), (5, 1), (12, 30)):
        pairs = sum(computed + place + 1 for place in range(tokens))
        assert StepWork.of(computed, tokens, 1) == StepWork(tokens, 1, computed, pairs)


@pytest.mark.parametrize(("cost", "within"), [(linear, 0.05), (roofline, 0.2)])
def test_it_predicts_a_known_cost(cost: Callable[[StepWork], float], within: float) -> None:
    """Through noise of 5%, bursts and slow first steps. Roofline jumps by half where a tile of 64 tokens begins, which
    cannot be told apart within a class that is half an octave wide; so nine tenths are asked for."""
    fit, dice = learned(cost).fit, random.Random(7)
    works = [mixed(dice) for _ in range(300)]
    errors = sorted(abs(fit.expected(work) / cost(work) - 1) for work in works)
    assert errors[len(errors) * 9 // 10] < within


@pytest.mark.parametrize("cost", [linear, roofline])
def test_few_steps_take_longer_than_the_upper_time(cost: Callable[[StepWork], float]) -> None:
    fit, dice, noise = learned(cost).fit, random.Random(8), noise_of(9)
    for _ in range(3):
        noise()  # the slow first ones
    works = [mixed(dice) for _ in range(2000)]
    over = sum(cost(work) * noise() > fit.upper(work) for work in works) / len(works)
    assert over < 2 * (1 - UPPER)
    # And it is no idle bound: most are within a third of it.
    assert np.mean([cost(work) > fit.upper(work) / 1.5 for work in works]) > 0.8


def test_a_long_time_without_prompts_forgets_nothing_about_them() -> None:
    """What recursive least squares with forgetting fails at."""
    model, noise = learned(linear), noise_of(3)
    for step in range(20_000):
        work = answers(1 + step % 8, 200)
        model.observe(work, linear(work) * noise())
    work = answers(8, 200) + prompt(500)
    assert model.fit.expected(work) == pytest.approx(linear(work), rel=0.1)


def test_a_machine_that_became_slower_is_noticed_at_once() -> None:
    model, dice = learned(linear), random.Random(4)
    for _ in range(KEEP * 8):
        work = mixed(dice)
        model.observe(work, 2 * linear(work))
    for _ in range(100):
        work = mixed(dice)
        assert model.fit.expected(work) == pytest.approx(2 * linear(work), rel=0.1)


def test_one_disturbed_step_changes_little_and_one_bad_size_is_tried_again() -> None:
    model, work = learned(linear), answers(8, 200) + prompt(200)
    before = model.fit.upper(work)
    model.observe(work, 10 * linear(work))
    model.refit()
    assert model.fit.upper(work) < 1.2 * before
    # A size that was only ever measured while something else took the machine is avoided, but not for ever.
    large = prompt(5000)
    for _ in range(3):
        model.observe(large, 20 * linear(large))
    model.refit()
    assert model.fit.upper(large) > 10 * linear(large)
    for step in range(8000):
        small = answers(1 + step % 8, 200)
        model.observe(small, linear(small))
    assert model.fit.upper(large) < 3 * linear(large)


def test_what_one_more_guess_costs() -> None:
    model, dice = CostModel(), random.Random(2)
    assert model.fit.token_cost(answers(4, 100)) == DEFAULT_TOKEN_COST
    for _ in range(600):
        work = mixed(dice)
        for _ in range(dice.randint(0, 3)):  # guesses: a row of logits each
            work += StepWork(1, 1, 0, 100)
        model.observe(work, linear(work))
    for count in (1, 4, 16):
        work = answers(count, 100)
        true = (linear(work + StepWork(1, 1, 0, 101)) - linear(work)) / linear(work)
        assert model.fit.token_cost(work) == pytest.approx(true, rel=0.25)


def test_larger_steps_are_tried_by_doubling() -> None:
    model = CostModel()
    assert model.fit.trusted == FIRST_TOKENS and not model.fit.ready
    for tokens in (100, 100, 900):
        model.observe(prompt(tokens), linear(prompt(tokens)))
    assert model.fit.trusted == 200, "what was measured once may have been luck"
    model.observe(prompt(900), linear(prompt(900)))
    model.refit()
    assert model.fit.trusted == 1800


WORK = st.builds(
    StepWork, st.integers(0, 1 << 20), st.integers(0, 1 << 12), st.integers(0, 1 << 30), st.integers(0, 1 << 40)
)
SECONDS = st.one_of(st.floats(1e-7, 1e4), st.sampled_from([0.0, -1.0, float("nan"), float("inf"), 1e-300, 1e300]))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(WORK, SECONDS), min_size=1, max_size=60), WORK)
def test_whatever_is_measured_the_fit_stays_finite_and_not_negative(
    measured: list[tuple[StepWork, float]], asked: StepWork
) -> None:
    model = CostModel()
    for work, seconds in measured:
        model.observe(work, seconds)
    model.refit()
    fit = model.fit
    for value in (fit.expected(asked), fit.upper(asked), fit.token_cost(asked), *fit.weights):
        assert np.isfinite(value) and value >= 0
    assert sum(1 for _ in model.samples()) <= len(measured)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(3, 40), st.floats(0, 1))
def test_the_fit_is_the_best_of_all_that_are_not_negative(seed: int, count: int, collinear: float) -> None:
    """By the conditions of Karush, Kuhn and Tucker: no slope where a weight is used, none downhill where it is not."""
    dice = np.random.default_rng(seed)
    rows = dice.random((count, 5))
    rows[:, 1] = collinear * rows[:, 0] + (1 - collinear) * rows[:, 1]
    factors = dice.random(count) + 0.1
    found = _non_negative(rows, factors)
    scale = np.sqrt((rows * factors[:, None] * rows).sum(0))
    slope = rows.T @ (factors * (rows @ found - 1)) / scale + 1e-4 * found * scale  # with the ridge that is in it
    assert (found >= 0).all()
    assert (slope > -1e-6).all() and (np.abs(slope[found > 0]) < 1e-6).all()


def test_memory_is_bounded_and_steps_are_classed_by_half_octaves() -> None:
    model = CostModel()
    for step in range(20 * KEEP):
        model.observe(prompt(1 + step % 4), 0.01)
    assert sum(1 for _ in model.samples()) <= 4 * KEEP
    assert [size_class(tokens) for tokens in (1, 2, 4, 1024)] == [0, 2, 4, 20]
