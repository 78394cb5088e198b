"""Policies in simulated time over costs that are known, their settings, and an engine that keeps what it learned."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serve.batch_simulation import Arrival, Cost, Simulation, linear, noise_of, poisson, roofline, simulate
from treadle.config import UserError, parse_settings
from treadle.serve.batching import BatchPolicy, BatchSettings, DynamicBatchPolicy, make_policy
from treadle.serve.cost_model import StepWork
from treadle.serve.engine import Engine
from treadle.serve.request import SamplingSettings
from treadle.serve.scheduler import Limits

LIMITS = Limits(16, 2048, 16)
PROMPTS, ANSWERS = (250, 0.8), (16, 96)  # lognormal: median and sigma; uniform


def dynamic(milliseconds: float, **more: object) -> DynamicBatchPolicy:
    return DynamicBatchPolicy(BatchSettings(max_latency_ms=milliseconds, **more))  # pyrefly: ignore[bad-argument-type]


def saturated(count: int, seed: int) -> list[Arrival]:
    """Everything at once: how fast it is done is the throughput."""
    dice = random.Random(seed)
    lengths = [min(4000, max(4, round(PROMPTS[0] * dice.lognormvariate(0, PROMPTS[1])))) for _ in range(count)]
    return [Arrival(0.0, length, dice.randint(*ANSWERS)) for length in lengths]


def both(cost: Cost, bound: float, arrivals: list[Arrival], seed: int, **more: object) -> tuple[Simulation, Simulation]:
    """Return what the plain and the dynamic policy make of it, under the same kind of noise."""
    # The time to learn is left out: 10 seconds are a few hundred steps.
    plain = simulate(BatchPolicy(), arrivals, LIMITS, cost, noise_of(seed), warmup=10)
    return plain, simulate(dynamic(bound, **more), arrivals, LIMITS, cost, noise_of(seed), warmup=10)


@pytest.mark.parametrize(
    ("cost", "bound", "rate"), [(linear, 120, 2.0), (linear, 200, 3.0), (roofline, 250, 1.5), (roofline, 250, 2.0)]
)
@pytest.mark.parametrize("strategy", ["length_aware", "fcfs"])
def test_gaps_between_tokens_stay_within_the_bound_where_the_plain_policy_breaks_it(
    cost: Cost, bound: float, rate: float, strategy: str
) -> None:
    arrivals = poisson(rate, 80, PROMPTS, ANSWERS, seed=1)
    plain, bounded = both(cost, bound, arrivals, seed=3, strategy=strategy)
    assert bounded.gap(0.99) <= bound / 1000 < plain.gap(0.99) / 2
    assert bounded.throughput >= 0.95 * plain.throughput
    # And answers do not begin much later for it.
    assert sum(bounded.first) / len(bounded.first) < 1.5 * sum(plain.first) / len(plain.first) + 0.2


@pytest.mark.parametrize(("cost", "bound"), [(linear, 150), (roofline, 300)])
def test_under_full_load_the_bound_costs_less_than_a_tenth(cost: Cost, bound: float) -> None:
    plain, bounded = both(cost, bound, saturated(200, 5), seed=1)
    assert bounded.gap(0.99) <= bound / 1000 < plain.gap(0.99)
    assert bounded.throughput >= 0.9 * plain.throughput


def test_long_prompts_and_a_machine_that_is_slower_for_a_while() -> None:
    now = 0.0

    def drifting(work: StepWork) -> float:
        nonlocal now
        seconds = linear(work) * (2.0 if 30 < now < 50 else 1.0)
        now += seconds
        return seconds

    arrivals = [
        Arrival(one.seconds, 3500 if place % 10 == 0 else one.prompt, one.answer)
        for place, one in enumerate(poisson(0.7, 80, PROMPTS, ANSWERS, seed=4))
    ]
    bounded = simulate(dynamic(200), arrivals, LIMITS, drifting, noise_of(2), warmup=10)
    assert bounded.gap(0.99) <= 0.2


def test_max_size_caps_the_sequences() -> None:
    policy = DynamicBatchPolicy(BatchSettings(max_size=3))
    result = simulate(policy, saturated(30, 2), LIMITS, linear)
    assert max(len(decision.run) for decision, _ in result.steps) == 3


def test_prompts_are_never_split_where_that_is_off() -> None:
    policy = DynamicBatchPolicy(BatchSettings(max_size=3))
    result = simulate(policy, saturated(30, 2), Limits(8, 4096, 16, chunked=False), linear)
    assert len(result.first) == 30
    prompts = sorted(piece.tokens for decision, _ in result.steps for piece in decision.run if piece.tokens > 1)
    assert prompts == sorted(one.prompt for one in saturated(30, 2))


def test_what_a_guess_costs_is_that_of_a_step_of_answers() -> None:
    """A long prompt in the last step does not make guesses look cheap."""
    policy, one, step = BatchPolicy(), StepWork.of(100, 1, 1), StepWork()
    for place in range(400):
        step = sum([one] * (place % 8 + 1), StepWork())
        policy.observe(step, linear(step))
    before = policy.token_cost()
    assert before == pytest.approx((linear(step + one) - linear(step)) / linear(step), rel=0.3)
    for _ in range(8):
        policy.observe(step + StepWork.of(0, 1500, 1), linear(step + StepWork.of(0, 1500, 1)))
    policy.costs.refit()
    assert policy.token_cost() == pytest.approx(before, rel=0.2)


def test_few_requests_are_computed_together_where_the_bound_leaves_time() -> None:
    arrivals = [Arrival(group + place / 100, 40, 4) for group in range(8) for place in range(3)]
    alone = simulate(dynamic(300), arrivals, LIMITS, linear)
    together = simulate(dynamic(300, min_size=3), arrivals, LIMITS, linear)
    assert len(together.steps) < len(alone.steps)
    # Half the bound is waited before costs are known, then what the step leaves of it.
    assert max(together.first) <= 0.3


REQUEST = st.tuples(st.floats(0, 3), st.integers(1, 400), st.integers(1, 12), st.integers(-1, 1))


@settings(max_examples=80, deadline=None)
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=25),
    max_seqs=st.integers(1, 6),
    more_tokens=st.integers(0, 200),
    block_size=st.sampled_from([1, 4, 16]),
    spare=st.integers(0, 60),
    bound=st.floats(1, 200),
    min_size=st.integers(1, 6),
    strategy=st.sampled_from(["length_aware", "fcfs"]),
)
def test_everything_finishes_whatever_the_bound(
    requests: list[tuple[float, int, int, int]],
    max_seqs: int,
    more_tokens: int,
    block_size: int,
    spare: int,
    bound: float,
    min_size: int,
    strategy: str,
) -> None:
    """On a cache that just holds the longest, or more; each step of the simulation must progress."""
    limits = Limits(max_seqs, max_seqs + more_tokens, block_size)
    blocks = max(-(-(prompt + answer) // block_size) for _, prompt, answer, _ in requests) + spare
    arrivals = [Arrival(*request) for request in requests]
    policy = dynamic(bound, min_size=min_size, strategy=strategy)
    result = simulate(policy, arrivals, limits, linear, blocks=blocks)
    assert len(result.first) == len(requests)
    assert len(result.gaps) == sum(answer - 1 for _, _, answer, _ in requests)


def test_a_long_prompt_is_not_passed_for_ever() -> None:
    """Short prompts that fit what a step leaves keep coming; the long one still takes the larger part of each step."""
    long = Arrival(0.5, 4000, 4)
    short = [Arrival(place * 0.02, 30, 8) for place in range(400)]
    result = simulate(dynamic(100), [long, *short], Limits(64, 2048, 16), linear)
    assert result.steps and max(result.first) < 8, "it begins its answer long before the short ones end"


def test_settings_are_strict() -> None:
    read = lambda **given: parse_settings(BatchSettings, given, source="batch")  # noqa: E731
    assert read() == BatchSettings() == read(min_size=1, strategy="length_aware")
    assert read(max_latency_ms=50, min_size=4, max_size=16).max_size == 16
    for wrong, says in (
        ({"max_latency": 50}, "did you mean 'max_latency_ms'"),
        ({"min_size": 4}, "needs max_latency_ms"),
        ({"min_size": 4, "max_size": 2, "max_latency_ms": 50}, "min_size=4 is more than max_size=2"),
        ({"min_size": 0}, "min_size"),
        ({"max_latency_ms": 0}, "max_latency_ms"),
        ({"max_latency_ms": float("nan")}, "max_latency_ms"),
        ({"strategy": "random"}, "length_aware"),
    ):
        with pytest.raises(UserError, match=says):
            read(**wrong)
    with pytest.raises(UserError, match="prompts that can be split"):
        make_policy(BatchSettings(max_latency_ms=50), chunked=False)
    assert type(make_policy(None)) is BatchPolicy


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path))
    return tmp_path


def test_an_engine_keeps_what_it_learned_for_its_next_start(engine_of: Callable[..., Engine], cache: Path) -> None:
    batch = {"max_latency_ms": 1000, "max_size": 3}
    first = engine_of(max_num_seqs=4, max_num_batched_tokens=64, batch=batch)
    prompts = [[place % 50 + 1] * (place * 7 % 60 + 1) for place in range(12)]
    plain = engine_of(max_num_seqs=4, max_num_batched_tokens=64)
    wanted = plain.generate(prompts, temperature=0, max_tokens=20, ignore_eos=True)
    assert first.generate(prompts, temperature=0, max_tokens=20, ignore_eos=True) == wanted
    assert first.stats.budget_seqs == 3 and "answers and no prompt" in first.stats.decision
    assert first.call(lambda: first.policy.costs.steps == first.stats.steps)
    assert first.call(lambda: sum(first.stats.budget_causes.values()) == first.stats.steps)
    assert first.stats.budget_causes["answers"] > 0
    first.close()
    (kept,) = (cache / "step-costs").iterdir()
    second = engine_of(max_num_seqs=4, max_num_batched_tokens=64, batch=batch)
    assert second.policy.costs.fit.ready and "measured steps remembered" in second.policy.describe()
    assert second.policy.lengths.typical() == first.policy.lengths.typical()
    second.close()
    kept.write_text("{")
    third = engine_of(max_num_seqs=4, batch=batch)
    (note,) = third.policy.notes
    assert "learned again" in note and not third.policy.costs.fit.ready
    third.generate(prompts, temperature=0, max_tokens=20, ignore_eos=True)
    third.close()
    assert not engine_of(max_num_seqs=4, batch=batch).policy.notes, "it was replaced by a whole one"


def test_an_engine_waits_for_company_and_then_goes(engine_of: Callable[..., Engine], cache: Path) -> None:
    engine = engine_of(max_num_seqs=4, batch={"min_size": 2, "max_latency_ms": 60_000})
    both_at_once = engine.generate([[1, 2, 3], [4, 5]], temperature=0, max_tokens=2, ignore_eos=True)
    assert [len(one.tokens) for one in both_at_once] == [2, 2]
    steps = engine.call(lambda: engine.stats.steps)
    # Alone it waits, whatever commands come, until it is cancelled.
    ticket = engine.submit([1, 2, 3], SamplingSettings(max_tokens=2, temperature=0), lambda _: None)
    for _ in range(3):
        assert engine.call(lambda: (engine.stats.steps, engine.stats.waiting)) == (steps, 1)
    assert "for 1 more" in engine.call(lambda: engine.stats.decision)
    ticket.cancel()
    assert engine.call(lambda: engine.stats.waiting) == 0
