"""Properties of the decisions for any state and any fit, the largest budget by trying all, and hand-made cases."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.serve.cost_model import Fit
from treadle.serve.lengths import candidate_sizes
from treadle.serve.scheduler import UNLIMITED, Limits, SequenceState, State, decide
from treadle.serve.step_budget import Budget, Cause, choose_budget, choose_hold, plan_chunks, shape

UNIT = 16
LIMITS = Limits(8, 512, UNIT)
# 10 ms, 0.5 ms a token, 0.1 ms a row; measured up to 512 tokens.
FIT = Fit((10e-3, 5e-4, 1e-4, 0.0, 0.0), ((0, 1.0, 1.0), (18, 1.0, 1.0)), 512, 100)


def sequence(number: int, tokens: int, computed: int = 0, **more: int) -> SequenceState:
    return replace(SequenceState(number, float(number), tokens, computed, -(-computed // UNIT)), **more)  # pyrefly: ignore[bad-argument-type]


def decoding(number: int, tokens: int = 100, **more: int) -> SequenceState:
    return sequence(number, tokens, tokens - 1, **more)


def choose(
    state: State, bound: float | None, fit: Fit = FIT, limits: Limits = LIMITS, by_length: bool = True
) -> Budget:
    return choose_budget(state, limits, fit, bound, candidate_sizes(limits.step_tokens, UNIT), by_length)


def test_a_step_is_cut_to_the_bound_while_somebody_waits_for_it() -> None:
    answers = [decoding(n) for n in range(1, 5)]
    budget = choose(State([*answers, sequence(9, 2000)], [], (999,)), bound=0.1)
    # 10 + 0.5 T + 0.1 x 4 <= 100 ms holds for 179 tokens; the candidate below that is 160.
    assert budget.tokens == 160 and budget.seconds == pytest.approx(0.0904)
    assert budget.cause is Cause.BOUND
    assert "160 tokens take at most 90.4 ms of 100 ms, 192 would take more" in budget.reason
    alone = choose(State([sequence(9, 2000)], [], (999,)), bound=0.1)
    assert alone.tokens == 512 and "nobody waits" in alone.reason
    assert choose(State([*answers, sequence(9, 2000)], [], (999,)), bound=None).tokens == 512
    only = choose(State(answers, [], (999,)), bound=0.001)
    assert only.reason.startswith("4 answers and no prompt")


def test_where_the_bound_cannot_be_kept_prompts_still_advance() -> None:
    state = State([decoding(1), decoding(2), sequence(9, 2000)], [], (999,))
    budget = choose(state, bound=0.005)
    assert budget.cause is Cause.UNREACHABLE
    assert budget.tokens == 3 and "longer than the bound" in budget.reason
    decision = decide(*shape(state, LIMITS, budget))
    assert {piece.number: piece.tokens for piece in decision.run} == {1: 1, 2: 1, 9: 1}


def test_guesses_count_as_what_they_cost() -> None:
    state = State([decoding(n, drafts=8) for n in range(1, 5)], [], (999,))
    # 10 + 0.6 (4 + g) <= 20 ms holds for 12 guesses.
    budget = choose(state, bound=0.02)
    assert budget.tokens == 16 and budget.work.rows == 16
    assert decide(*shape(state, LIMITS, budget)).tokens == 16


def test_sizes_that_were_never_measured_are_tried_by_doubling() -> None:
    state = State([decoding(1), sequence(9, 2000)], [], (999,))
    budget = choose(state, 10.0, replace(FIT, largest=50))
    assert budget.cause is Cause.LEARNING
    assert choose(state, 10.0).cause is Cause.FITS
    assert budget.tokens == 96 and "yet to be measured" in budget.reason
    begin = choose(state, 10.0, Fit())
    assert begin.tokens == UNIT and "too few steps were measured" in begin.reason


def test_no_more_sequences_than_answer_within_the_bound() -> None:
    """At 10 + 0.6 S ms, 85% of 15 ms hold 4 answers."""
    waiting = [sequence(n, 50) for n in range(10, 14)]
    budget = choose(State([decoding(1), decoding(2)], waiting, (999,)), bound=0.015)
    assert budget.seqs == 4 and "no more than 4 sequences" in budget.reason
    assert choose(State([decoding(n) for n in range(6)], waiting, (999,)), 0.015).seqs == 6, "none is thrown out"
    assert choose(State([decoding(1), decoding(2)], waiting, (999,)), 0.005).seqs == LIMITS.max_seqs, "no use"


def test_prompts_are_grouped_by_what_fits() -> None:
    """Even parts for the first, then what fits whole, then one that is begun; in order without grouping."""
    prompts = [sequence(1, 130), sequence(2, 500), sequence(3, 30), sequence(4, 20)]

    def chunks(tokens: int, by_length: bool) -> list[tuple[int, int]]:
        return [(one.sequence.number, one.tokens) for one in plan_chunks(prompts, tokens, UNIT, by_length)]

    assert chunks(120, False) == [(1, 120)]
    assert chunks(120, True) == [(1, 80), (3, 30)], "130 = 80 + 50; the 10 that are left begin nothing"
    assert chunks(230, True) == [(1, 130), (3, 30), (4, 20), (2, 48)]
    assert chunks(230, False) == [(1, 130), (2, 100)]
    for important in ([500, -1, 30, 0], [500, 0, 600, -1, 30, 0]):
        later = [
            sequence(number, important[2 * number], priority=important[2 * number + 1])
            for number in range(len(important) // 2)
        ]
        chunks_of = plan_chunks([prompts[0], *later], 170, UNIT, True)
        assert [one.sequence.left for one in chunks_of] == [130, 500], "30 does not pass one of higher priority"


SEQUENCE = st.builds(
    lambda tokens, share, priority, most, drafts: (tokens, share, priority, most, drafts),
    st.integers(2, 3000),
    st.floats(0, 1),
    st.integers(-1, 1),
    st.sampled_from([UNLIMITED, 128]),
    st.integers(0, 4),
)
FITS = st.builds(
    lambda weights, ratios, largest, count: Fit(
        tuple(weights), tuple((2 * k, 1.0, r) for k, r in ratios), largest, count
    ),
    st.tuples(*(st.floats(0, scale) for scale in (0.05, 2e-3, 1e-3, 1e-6, 1e-7))),
    st.lists(st.tuples(st.integers(0, 12), st.floats(0.5, 4)), max_size=5, unique_by=lambda one: one[0]).map(sorted),
    st.integers(0, 4096),
    st.integers(0, 200),
)


@st.composite
def states(draw: st.DrawFn) -> tuple[State, Limits]:
    limits = Limits(draw(st.integers(1, 12)), draw(st.integers(12, 2048)), draw(st.integers(1, 32)))
    everyone = []
    for number, (tokens, share, priority, most, drafts) in enumerate(draw(st.lists(SEQUENCE, min_size=1, max_size=20))):
        is_answer = share > 0.5
        computed = tokens - 1 if is_answer else int(share * (tokens - 2))
        given = -(-computed // limits.block_size)
        everyone.append(
            SequenceState(
                number,
                float(number),
                tokens,
                computed,
                given,
                drafts=drafts if is_answer else 0,
                most=most,
                priority=priority,
            )
        )
    running = everyone[: draw(st.integers(0, min(len(everyone), limits.max_seqs)))]
    waiting = [replace(one, computed=0, given=0, drafts=0) for one in everyone[len(running) :]]
    return State(running, waiting, (draw(st.integers(200, 5000)),)), limits


@settings(max_examples=400, deadline=None)
@given(states(), FITS, st.one_of(st.none(), st.floats(1e-3, 1.0)), st.booleans())
def test_any_decision_keeps_its_promises(
    given_state: tuple[State, Limits], fit: Fit, bound: float | None, by_length: bool
) -> None:
    state, limits = given_state
    sizes = candidate_sizes(limits.step_tokens, limits.block_size)
    budget = choose_budget(state, limits, fit, bound, sizes, by_length)
    assert budget == choose_budget(state, limits, fit, bound, sizes, by_length), "a pure function"
    assert budget.reason
    answers = [one for one in state.running if one.decoding]
    prompts = [one for one in state.running if not one.decoding]
    assert min(limits.step_tokens, len(answers) + 1) <= budget.tokens <= limits.step_tokens
    assert max(1, len(state.running)) <= budget.seqs <= limits.max_seqs
    if bound is not None and answers and fit.ready and budget.tokens > len(answers) + 1 and budget.chunks:
        assert budget.seconds <= bound
    # What the scheduler makes of it: every answer gets its token and the most urgent prompt advances.
    shaped, cut = shape(state, limits, budget)
    decision = decide(shaped, cut)
    assert decision.tokens <= budget.tokens
    if decision.preempt:  # blocks ran out, or a place was made for higher priority
        return
    run = {piece.number: piece.tokens for piece in decision.run}
    if len(answers) < limits.step_tokens:
        assert all(run.get(one.number) == 1 for one in answers)
    if prompts:
        assert run[prompts[0].number] >= 1
    elif state.waiting and len(state.running) < budget.seqs and "blocks" not in decision.reason:
        assert run.get(state.waiting[0].number, 0) >= 1, decision.reason
    for chunk in budget.chunks:
        assert 1 <= chunk.tokens <= min(chunk.sequence.left, chunk.sequence.most)
        assert run.get(chunk.sequence.number, 0) <= chunk.tokens


@settings(max_examples=200, deadline=None)
@given(states(), FITS, st.floats(1e-3, 1.0))
def test_the_budget_is_the_largest_that_fits(given_state: tuple[State, Limits], fit: Fit, bound: float) -> None:
    """By trying every candidate, with a fit that grows with the size."""
    state, limits = given_state
    fit = replace(fit, ratios=((0, 1.0, 1.2),), count=100, largest=1 << 20)
    sizes = candidate_sizes(limits.step_tokens, limits.block_size)
    budget = choose_budget(state, limits, fit, bound, sizes, False)
    answers = sum(one.decoding for one in state.running)
    if not answers or budget.seconds > bound or not budget.chunks:
        return
    for size in sizes:
        if size > budget.tokens:
            larger = choose_budget(state, replace(limits, step_tokens=size), fit, math.inf, [size], False)
            assert larger.seconds > bound or larger.tokens < size


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 3000), max_size=10),
    st.floats(0, 1),
    st.integers(1, 12),
    FITS,
    st.one_of(st.none(), st.floats(1e-3, 1.0)),
)
def test_waiting_leaves_time_for_the_step(
    prompts: list[int], oldest: float, least: int, fit: Fit, bound: float | None
) -> None:
    hold = choose_hold(prompts, oldest, least, fit, bound)
    assert hold.seconds >= 0
    if len(prompts) >= least or not prompts or bound is None:
        assert hold.seconds == 0
    elif hold.seconds > 0:
        assert oldest + hold.seconds <= bound and hold.reason
        later = choose_hold(prompts, oldest + hold.seconds + 1e-9, least, fit, bound)
        assert later.seconds == 0, "it ends by itself"


def test_a_lone_request_waits_for_what_the_step_leaves_of_the_bound() -> None:
    hold = choose_hold([100], 0.01, 4, FIT, 0.1)
    assert hold.seconds == pytest.approx(0.1 - 0.01 - 0.0601)
    assert "for 3 more" in hold.reason
