"""Decisions on hand-made states, and the properties of whole schedules in a simulated engine."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.serve.scheduler import PATIENCE, Decision, Limits, Piece, SequenceState, State, decide, urgency

LIMITS = Limits(max_seqs=4, step_tokens=16, block_size=4)


def decoding(number: int, tokens: int = 5, **more: object) -> SequenceState:
    return replace(SequenceState(number, float(number), tokens, tokens - 1, -(-tokens // 4)), **more)  # pyrefly: ignore[bad-argument-type]


def test_answers_in_progress_come_before_prompts() -> None:
    prompt = SequenceState(1, 1.0, 40, 16, 4)
    decision = decide(State([prompt, decoding(2), decoding(3)], [], (20,)), LIMITS)
    assert decision.run == (Piece(2, 1), Piece(3, 1), Piece(1, 14))


def test_prompts_are_cut_to_what_the_step_may_hold() -> None:
    decision = decide(State([decoding(1)], [SequenceState(2, 2.0, 40)], (20,)), LIMITS)
    assert decision.run == (Piece(1, 1), Piece(2, 15)) and decision.admit == (2,)
    whole = replace(LIMITS, chunked=False)
    assert decide(State([decoding(1)], [SequenceState(2, 2.0, 40)], (20,)), whole).run == (Piece(1, 1),)
    assert decide(State([], [SequenceState(2, 2.0, 40)], (20,)), whole).run == (Piece(2, 40),)


def test_a_prompt_waits_until_all_of_it_fits_the_cache() -> None:
    decision = decide(State([decoding(1)], [SequenceState(2, 2.0, 40)], (10,)), LIMITS)
    assert decision.admit == () and "needs 11 blocks, 10 are free" in decision.reason
    assert decide(State([], [SequenceState(2, 2.0, 40)], (10,)), LIMITS).admit == (2,)


def test_a_prefix_hit_needs_fewer_blocks() -> None:
    held = SequenceState(2, 2.0, 40, 32, 8, (0,))  # shared with one that runs
    idle = SequenceState(2, 2.0, 40, 32, 8, (8,))  # only remembered, so counted as free
    for state, free, admitted in ((held, 3, True), (held, 2, False), (idle, 11, True), (idle, 10, False)):
        assert bool(decide(State([decoding(1)], [state], (free,)), LIMITS).admit) is admitted


def test_the_least_urgent_gives_its_blocks_back() -> None:
    running = [decoding(1, 5, given=1), decoding(2, 9, given=2), decoding(3, 6, given=2)]
    decision = decide(State(running, [], (1,)), LIMITS)
    assert decision.preempt == (3,) and not decision.run
    assert decide(State(running[:2], [], (2,)), LIMITS).run == (Piece(1, 1), Piece(2, 1))


def test_lower_priority_makes_room_for_higher() -> None:
    low = [decoding(n, urgency=urgency(0.0, 1), priority=1) for n in range(1, 5)]
    waiting = SequenceState(9, urgency(5.0, 0), 8)
    assert decide(State(low, [waiting], (20,)), LIMITS).preempt == (4,)
    # Patience has an end: what arrives too late does not pass.
    late = replace(waiting, urgency=urgency(PATIENCE + 1, 0))
    assert decide(State(low, [late], (20,)), LIMITS).preempt == ()
    equal = [replace(one, priority=0) for one in low]
    assert decide(State(equal, [waiting], (20,)), LIMITS).preempt == ()


def test_guesses_take_only_what_is_left() -> None:
    running = [decoding(1, drafts=5), decoding(2, drafts=5)]
    assert decide(State(running, [], (20,)), LIMITS).run == (Piece(1, 1, 5), Piece(2, 1, 5))
    with_prompt = decide(State(running, [SequenceState(3, 3.0, 10)], (20,)), LIMITS)
    assert with_prompt.run == (Piece(1, 1, 4), Piece(2, 1, 0), Piece(3, 10))
    # Where no block is free, guesses go as far as the last one reaches.
    assert decide(State(running, [], (0,)), LIMITS).run == (Piece(1, 1, 3), Piece(2, 1, 3))


@dataclass
class Sim:
    """A request in the simulated engine."""

    state: SequenceState
    answer: int
    drafts: int = 0
    made: int = 0
    running: bool = False
    skipped: int = 0


class Engine:
    """Carries decisions out on counts, and asserts that each is possible."""

    def __init__(self, blocks: tuple[int, ...], limits: Limits) -> None:
        self.blocks, self.limits = blocks, limits
        self.requests: dict[int, Sim] = {}

    def free(self) -> tuple[int, ...]:
        used = sum(sim.state.given for sim in self.requests.values() if sim.running)
        return tuple(count - used for count in self.blocks)

    def step(self) -> Decision:
        for _ in range(len(self.requests) + 1):
            ordered = sorted(self.requests.values(), key=lambda sim: (sim.state.urgency, sim.state.number))
            running = [sim.state for sim in ordered if sim.running]
            waiting = [sim.state for sim in ordered if not sim.running]
            decision = decide(State(running, waiting, self.free()), self.limits)
            if not decision.preempt:
                break
            assert not decision.run and not decision.admit
            for number in decision.preempt:
                sim = self.requests[number]
                assert sim.running
                sim.running, sim.state = False, replace(sim.state, computed=0, given=0)
        else:
            raise AssertionError("preempting without end")
        self.carry_out(decision)
        return decision

    def carry_out(self, decision: Decision) -> None:
        for number in decision.admit:
            assert not self.requests[number].running
            self.requests[number].running = True
        assert decision.tokens <= self.limits.step_tokens
        assert sum(sim.running for sim in self.requests.values()) <= self.limits.max_seqs
        assert len({piece.number for piece in decision.run}) == len(decision.run)
        for piece in decision.run:
            sim = self.requests[piece.number]
            assert sim.running and 1 <= piece.tokens <= sim.state.left
            end = sim.state.computed + piece.tokens + piece.drafts
            given = max(sim.state.given, -(-end // self.limits.block_size))
            sim.state = replace(sim.state, computed=sim.state.computed + piece.tokens, given=given)
            if sim.state.left == 0:
                sim.made += 1
                sim.state = replace(sim.state, tokens=sim.state.tokens + 1, drafts=sim.drafts)
        assert min(self.free()) >= 0, "more blocks were used than there are"
        for number in [number for number, sim in self.requests.items() if sim.made >= sim.answer]:
            del self.requests[number]


REQUEST = st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(-2, 2), st.integers(0, 4))


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=25),
    block_size=st.integers(1, 8),
    spare=st.integers(0, 20),
    max_seqs=st.integers(1, 6),
    more_tokens=st.integers(0, 20),
    groups=st.integers(1, 2),
    gap=st.floats(0, 3),
)
def test_everything_finishes_and_something_progresses_in_every_step(
    requests: list[tuple[int, int, int, int]],
    block_size: int,
    spare: int,
    max_seqs: int,
    more_tokens: int,
    groups: int,
    gap: float,
) -> None:
    longest = max(-(-(prompt + answer) // block_size) for prompt, answer, _, _ in requests)
    limits = Limits(max_seqs, max_seqs + more_tokens, block_size)
    engine = Engine(tuple(longest + spare * (group + 1) for group in range(groups)), limits)
    work = sum(prompt + answer for prompt, answer, _, _ in requests)
    arrivals = list(enumerate(requests))
    for step in range(50 * work + 100):
        while arrivals and arrivals[0][0] * gap <= step:
            number, (prompt, answer, priority, drafts) = arrivals.pop(0)
            state = SequenceState(number, urgency(float(step), priority), prompt, priority=priority)
            engine.requests[number] = Sim(state, answer, drafts)
        if not engine.requests:
            if not arrivals:
                return
            continue
        decision = engine.step()
        assert decision.run, f"nothing progressed: {decision.reason}"
    raise AssertionError(f"not finished: {engine.requests}")


def test_nothing_starves_under_an_endless_stream_of_higher_priority() -> None:
    """A request of low priority is served although ones of high priority arrive faster than they can be served."""
    engine = Engine((12,), Limits(max_seqs=2, step_tokens=8, block_size=4))
    engine.requests[0] = Sim(SequenceState(0, urgency(0.0, 5), 6, priority=5), answer=3)
    for step in range(1, 2000):
        engine.requests[step] = Sim(SequenceState(step, urgency(float(step), -1), 6, priority=-1), answer=3)
        engine.step()
        if 0 not in engine.requests:
            break
    assert 0 not in engine.requests
    # It waits for those that arrived within its patience (two a step are made), and no longer.
    assert step < 6 * PATIENCE * 8


@pytest.mark.parametrize("drafts", [0, 3])
def test_equal_requests_are_served_in_the_order_of_arrival(drafts: int) -> None:
    engine = Engine((40,), Limits(max_seqs=3, step_tokens=8, block_size=4))
    for number in range(9):
        engine.requests[number] = Sim(SequenceState(number, float(number), 10), answer=4, drafts=drafts)
    finished: list[int] = []
    while engine.requests:
        before = set(engine.requests)
        engine.step()
        finished += sorted(before - set(engine.requests))
    assert finished == sorted(finished)
