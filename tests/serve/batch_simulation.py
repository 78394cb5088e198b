"""An engine in simulated time: the real scheduler and batch policy over a cost of steps that is known."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from treadle.serve.batching import BatchPolicy
from treadle.serve.cost_model import StepWork
from treadle.serve.scheduler import Decision, Limits, SequenceState, State, decide, urgency

Cost = Callable[[StepWork], float]


@dataclass(frozen=True)
class Arrival:
    """A request: when it comes, the tokens of its prompt and of its answer."""

    seconds: float
    prompt: int
    answer: int
    priority: int = 0


@dataclass
class Sequence:
    state: SequenceState
    answer: int
    arrived: float
    running: bool = False
    made: int = 0
    last: float = 0.0  # when its last token came


@dataclass
class Simulation:
    """What came of it: the gaps between the tokens of an answer, the times to the first one, all in seconds."""

    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    steps: list[tuple[Decision, float]] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0  # computed, of prompts and answers

    def gap(self, share: float) -> float:
        return sorted(self.gaps)[int(share * (len(self.gaps) - 1))]

    @property
    def throughput(self) -> float:
        return self.tokens / self.seconds


def simulate(
    policy: BatchPolicy,
    arrivals: Iterable[Arrival],
    limits: Limits,
    cost: Cost,
    noise: Callable[[], float] = lambda: 1.0,
    blocks: int = 1 << 20,
    warmup: float = 0.0,
) -> Simulation:
    """Run until everything is answered. Gaps and first tokens count after `warmup` seconds."""
    coming = sorted(arrivals, key=lambda one: one.seconds)
    result, sequences, clock, number = Simulation(), {}, 0.0, 0
    while coming or sequences:
        if not sequences:
            clock = max(clock, coming[0].seconds)
        while coming and coming[0].seconds <= clock:
            one = coming.pop(0)
            number += 1
            state = SequenceState(number, urgency(one.seconds, one.priority), one.prompt, priority=one.priority)
            sequences[number] = Sequence(state, one.answer, one.seconds)
            policy.arrived(one.prompt)
        if not any(one.running for one in sequences.values()):
            waiting = list(sequences.values())
            hold = policy.hold([one.state.tokens for one in waiting], clock - min(one.arrived for one in waiting))
            if hold.seconds > 0:
                clock = min(clock + hold.seconds, coming[0].seconds) if coming else clock + hold.seconds
                if coming and clock == coming[0].seconds:
                    continue
        decision, work = _step(sequences, policy, limits, blocks)
        assert decision.run, f"nothing progressed: {decision.reason}"
        seconds = cost(work) * noise()
        policy.observe(work, seconds)
        clock += seconds
        result.steps.append((decision, seconds))
        result.tokens += decision.tokens
        _advance(sequences, decision, limits, clock, result, warmup)
    result.seconds = clock
    return result


def _step(
    sequences: dict[int, Sequence], policy: BatchPolicy, limits: Limits, blocks: int
) -> tuple[Decision, StepWork]:
    for _ in range(len(sequences) + 1):
        ordered = sorted(sequences.values(), key=lambda one: (one.state.urgency, one.state.number))
        running = [one.state for one in ordered if one.running]
        waiting = [one.state for one in ordered if not one.running][: limits.max_seqs - len(running) + 1]
        free = blocks - sum(state.given for state in running)
        state, shaped, _ = policy.shape(State(running, waiting, (free,)), limits)
        decision = decide(state, shaped)
        if not decision.preempt:
            break
        for number in decision.preempt:
            one = sequences[number]
            one.running, one.state = False, replace(one.state, computed=0, given=0)
    else:
        raise AssertionError("preempting without end")
    assert decision.tokens <= limits.step_tokens
    for number in decision.admit:
        sequences[number].running = True
    assert sum(one.running for one in sequences.values()) <= limits.max_seqs
    work = StepWork()
    for piece in decision.run:
        state = sequences[piece.number].state
        assert sequences[piece.number].running and 1 <= piece.tokens <= state.left
        work += StepWork.of(state.computed, piece.tokens, int(piece.tokens == state.left))
    return decision, work


def _advance(
    sequences: dict[int, Sequence],
    decision: Decision,
    limits: Limits,
    clock: float,
    result: Simulation,
    warmup: float,
) -> None:
    for piece in decision.run:
        one = sequences[piece.number]
        end = one.state.computed + piece.tokens
        given = max(one.state.given, -(-end // limits.block_size))
        one.state = replace(one.state, computed=end, given=given)
        if one.state.left:
            continue
        if clock >= warmup:
            result.gaps.append(clock - one.last) if one.made else result.first.append(clock - one.arrived)
        one.made, one.last = one.made + 1, clock
        one.state = replace(one.state, tokens=one.state.tokens + 1)
        if one.made >= one.answer:
            del sequences[piece.number]


def poisson(
    rate: float, seconds: float, prompt: tuple[float, float], answer: tuple[int, int], seed: int
) -> list[Arrival]:
    """Requests at `rate` a second; prompts lognormal (median, sigma), answers uniform."""
    dice, now, arrivals = random.Random(seed), 0.0, []
    while (now := now + dice.expovariate(rate)) < seconds:
        length = min(4000, max(4, round(prompt[0] * dice.lognormvariate(0, prompt[1]))))
        arrivals.append(Arrival(now, length, dice.randint(*answer)))
    return arrivals


def linear(work: StepWork) -> float:
    """About what two cores take for a model of 135M parameters."""
    return 8e-3 + 6e-4 * work.tokens + 2e-4 * work.rows + 2e-7 * work.context + 4e-8 * work.pairs


def roofline(work: StepWork) -> float:
    """Flat while weights are read, then steps of 64 tokens at a falling price, and attention beyond linear."""
    tiles = -(-work.tokens // 64) * 64
    return max(14e-3, 5e-3 + 9e-4 * tiles**0.93) + 2e-4 * work.rows**1.1 + 3e-7 * work.context + 6e-8 * work.pairs


def noise_of(seed: int, sigma: float = 0.05, bursts: float = 0.005) -> Callable[[], float]:
    """Lognormal noise, and now and then a step that another program disturbs; the first steps are far too slow."""
    dice, count = random.Random(seed), 0

    def noise() -> float:
        nonlocal count
        count += 1
        first = 5.0 if count <= 3 else 1.0
        return first * dice.lognormvariate(0, sigma) * (3.0 if dice.random() < bursts else 1.0)

    return noise
