"""What the next engine step runs: a pure decision about a state, returned with its reason.

Running sequences that need one token come first, so that no prompt delays an answer in progress; then prompts that
were begun, then those that wait, in pieces that fit the step's token budget. The order among equals is urgency: the
time of arrival, later by PATIENCE seconds for each step of priority. As it never changes, whatever arrives later than
that comes behind, so nothing starves. Where blocks run out, the least urgent sequence gives its own back and is
computed again later; the most urgent one always goes on, so something progresses in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

PATIENCE = 10.0  # seconds that one step of priority is worth
UNLIMITED = 1 << 30


def urgency(arrived: float, priority: int) -> float:
    """Return the key that requests are served by, the lowest first; `arrived` in seconds."""
    return arrived + priority * PATIENCE


@dataclass(frozen=True)
class Limits:
    """What the engine was started with, and what this step may hold."""

    max_seqs: int
    step_tokens: int
    block_size: int
    chunked: bool = True  # prompts may be computed in pieces


@dataclass(frozen=True)
class SequenceState:
    """One sequence, as far as it matters here. Where it waits, `computed` and `given` are those of a prefix hit."""

    number: int
    urgency: float
    tokens: int  # known so far: prompt and answer
    computed: int = 0  # of them in the cache
    given: int = 0  # entries of its block tables that are in use
    hit_free: tuple[int, ...] = ()  # of a prefix hit, by layer group: blocks that are counted as free
    drafts: int = 0  # guessed tokens to check beside the next one
    most: int = UNLIMITED  # tokens that it may compute in one step
    priority: int = 0

    @property
    def left(self) -> int:
        return self.tokens - self.computed

    @property
    def decoding(self) -> bool:
        return self.left == 1


@dataclass(frozen=True)
class State:
    """All sequences at hand and the free blocks by layer group. Both lists are in the order of urgency."""

    running: Sequence[SequenceState]
    waiting: Sequence[SequenceState]
    free: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """What a step computes of one sequence: `tokens` of those known, then `drafts` guessed ones."""

    number: int
    tokens: int
    drafts: int = 0


@dataclass(frozen=True)
class Decision:
    """What to do, in this order: take the blocks of `preempt` back, start `admit`, compute `run`; and why.

    Where `preempt` is not empty nothing else is decided: preempt, and decide again.
    """

    run: tuple[Piece, ...] = ()
    admit: tuple[int, ...] = ()
    preempt: tuple[int, ...] = ()
    reason: str = ""

    @property
    def tokens(self) -> int:
        return sum(piece.tokens + piece.drafts for piece in self.run)


class _Step:
    """The step that is being put together."""

    def __init__(self, state: State, limits: Limits) -> None:
        self.limits, self.free = limits, list(state.free)
        self.budget = limits.step_tokens
        self.run: list[Piece] = []
        self.admit: list[int] = []

    def blocks_for(self, sequence: SequenceState, tokens: int) -> int:
        """Return how many more blocks (in each group) a sequence needs to compute so many more tokens."""
        return max(0, -(-(sequence.computed + tokens) // self.limits.block_size) - sequence.given)

    def room(self, sequence: SequenceState) -> int:
        """Return how many more tokens of a sequence the free blocks can hold."""
        entries = sequence.given + min(self.free)
        return entries * self.limits.block_size - sequence.computed

    def add(self, sequence: SequenceState, tokens: int) -> None:
        self._take(self.blocks_for(sequence, tokens))
        self.budget -= tokens
        self.run.append(Piece(sequence.number, tokens))

    def guess(self, sequence: SequenceState) -> None:
        """Let a sequence check its guesses in whatever room and budget nobody else had a use for."""
        index = next((i for i, piece in enumerate(self.run) if piece.number == sequence.number), None)
        if index is None or not sequence.drafts:
            return
        have = self.blocks_for(sequence, 1)
        drafts = min(sequence.drafts, self.budget, self.room(sequence) + have * self.limits.block_size - 1)
        if drafts > 0:
            self._take(self.blocks_for(sequence, 1 + drafts) - have)
            self.budget -= drafts
            self.run[index] = replace(self.run[index], drafts=drafts)

    def _take(self, blocks: int) -> None:
        self.free = [free - blocks for free in self.free]
        assert min(self.free) >= 0


def decide(state: State, limits: Limits) -> Decision:
    """Return what the next step runs."""
    step = _Step(state, limits)
    decoding = [sequence for sequence in state.running if sequence.decoding]
    prompts = [sequence for sequence in state.running if not sequence.decoding]
    for sequence in decoding:
        if step.budget < 1:
            break
        if step.room(sequence) < 1:
            return _preempt(state.running, f"no block is free for the next token of request {sequence.number}")
        step.add(sequence, 1)
    first = state.running[0].number if state.running else None
    for sequence in prompts:
        tokens = min(sequence.left, sequence.most, step.budget, step.room(sequence))
        if tokens < 1:
            if sequence.number == first and step.budget > 0:
                return _preempt(state.running, f"no block is free for the prompt of request {sequence.number}")
            continue
        step.add(sequence, tokens)
    refusal = _admit(state, limits, step)
    if isinstance(refusal, Decision):
        return refusal
    for sequence in decoding:
        step.guess(sequence)
    return Decision(tuple(step.run), tuple(step.admit), reason=_describe(state, step, refusal))


def _admit(state: State, limits: Limits, step: _Step) -> str | Decision:
    """Start what waits, as far as it fits. Returns why the next one was not started, or whom to preempt for it."""
    for place, sequence in enumerate(state.waiting):
        running = len(state.running) + len(step.admit)
        if running >= limits.max_seqs:
            return _displace(state, sequence, f"all {limits.max_seqs} sequences are running")
        if step.budget < 1:
            return f"the step's {limits.step_tokens} tokens are taken"
        taken = sequence.hit_free or (0,) * len(step.free)
        free = [have - hit for have, hit in zip(step.free, taken, strict=True)]
        # All that it is known to need must be free, and a block for each that runs, or it would be preempted at once.
        needed = step.blocks_for(sequence, sequence.left) + (running if running else 0)
        if min(free) < needed:
            why = f"request {sequence.number} needs {needed} blocks, {max(0, min(free))} are free"
            return _displace(state, sequence, why)
        if not limits.chunked and sequence.left > step.budget and (step.run or place):
            return f"the {sequence.left} tokens of request {sequence.number} exceed what is left of the step"
        step.free = free
        tokens = min(sequence.left, sequence.most, step.budget if limits.chunked else sequence.left)
        step.add(sequence, tokens)
        step.admit.append(sequence.number)
    return ""


def _displace(state: State, sequence: SequenceState, why: str) -> str | Decision:
    """Make room for a request that waits by preempting one of lower priority, where there is one."""
    victim = state.running[-1] if state.running else None
    if victim is None or victim.priority <= sequence.priority or victim.urgency <= sequence.urgency:
        return why
    return Decision(preempt=(victim.number,), reason=f"{why}; request {victim.number} of lower priority makes room")


def _preempt(running: Sequence[SequenceState], why: str) -> Decision:
    victim = running[-1]
    return Decision(
        preempt=(victim.number,), reason=f"{why}; request {victim.number}, the least urgent, gives its back"
    )


def _describe(state: State, step: _Step, refusal: str) -> str:
    tokens = step.limits.step_tokens - step.budget
    text = f"{len(step.run)} sequences, {tokens} tokens, {len(step.admit)} of them started"
    waiting = len(state.waiting) - len(step.admit)
    return f"{text}; {waiting} wait: {refusal}" if refusal else text


def with_budget(limits: Limits, step_tokens: int) -> Limits:
    """Return the limits of a step that may hold at most `step_tokens` tokens, one at least."""
    return replace(limits, step_tokens=max(1, min(limits.step_tokens, step_tokens)))
