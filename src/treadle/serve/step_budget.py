"""How large the next step may be, which prompts it takes, whether to wait: pure functions that give their reason."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from treadle.serve.cost_model import Fit, StepWork
from treadle.serve.scheduler import UNLIMITED, Limits, SequenceState, State

# Of the bound: what the answers in progress may take alone before no more sequences are started, so that prompts
# still find some room beside them.
ANSWERS_SHARE = 0.85


class Cause(StrEnum):
    """What a budget was decided by; the reason says it with numbers."""

    FREE = "free"  # nobody waits for the step, or there is no bound
    ANSWERS = "answers"  # no prompt is there that could be cut
    FITS = "fits"  # all that is there stays within the bound
    BOUND = "bound"  # more would break the bound
    LEARNING = "learning"  # more was never measured
    UNREACHABLE = "unreachable"  # even the least breaks the bound


@dataclass(frozen=True)
class Chunk:
    """How many tokens of a prompt a step computes."""

    sequence: SequenceState
    tokens: int

    @property
    def work(self) -> StepWork:
        # A prompt whose pieces are limited is one whose logits are all wanted.
        rows = self.tokens if self.sequence.most < UNLIMITED else int(self.tokens == self.sequence.left)
        return StepWork.of(self.sequence.computed, self.tokens, rows)


@dataclass(frozen=True)
class Budget:
    """A decision: tokens and sequences that the next step may hold at most, and the chunks that fill it."""

    tokens: int
    seqs: int
    chunks: tuple[Chunk, ...]
    work: StepWork  # that comes of it where blocks do not run out
    seconds: float  # that the step should rarely exceed, 0: not known
    cause: Cause
    reason: str


@dataclass(frozen=True)
class Hold:
    """A decision: for how many seconds an idle engine waits for company."""

    seconds: float
    reason: str


def plan_chunks(prompts: Sequence[SequenceState], tokens: int, unit: int, by_length: bool) -> tuple[Chunk, ...]:
    """Return what `tokens` tokens are spent on. The first prompt, the most urgent, always gets some.

    Without `by_length` each takes what is left, in their order. With it the prompts are grouped by what fits: one that
    needs several steps takes even parts of about this size, then come those that fit whole, then one that is begun if a
    `unit` at least is left for it. So no step is spent on slivers, each of which reads its context again. None passes
    one of higher priority, and as the first always advances none waits for ever.
    """
    chunks: list[Chunk] = []
    postponed: list[SequenceState] = []
    for sequence in prompts:
        if tokens < 1:
            break
        wanted = min(sequence.left, sequence.most)
        if not by_length:
            taken = min(wanted, tokens)
        elif not chunks and not postponed:
            taken = _even_part(wanted, tokens, unit)
        elif wanted > tokens or any(sequence.priority > other.priority for other in postponed):
            postponed.append(sequence)
            continue
        else:
            taken = wanted
        chunks.append(Chunk(sequence, taken))
        tokens -= taken
    if postponed and tokens >= unit:
        first = postponed[0]
        chunks.append(Chunk(first, min(first.left, first.most, tokens // unit * unit)))
    return tuple(chunks)


def _even_part(wanted: int, tokens: int, unit: int) -> int:
    """Return the part of `wanted` to compute now so that all parts are of about one size, at most `tokens`."""
    parts = -(-wanted // tokens)
    even = -(-wanted // parts)
    return min(wanted, tokens, -(-even // unit) * unit)


def work_of_decoding(decoding: Sequence[SequenceState]) -> StepWork:
    """Return the work of one more token for each of these sequences."""
    context = sum(sequence.computed for sequence in decoding)
    return StepWork(len(decoding), len(decoding), context, context + len(decoding))


def choose_budget(
    state: State,
    limits: Limits,
    fit: Fit,
    bound: float | None,
    candidates: Sequence[int],
    by_length: bool = True,
) -> Budget:
    """Return the largest of `candidates` with which the next step stays within `bound` seconds.

    The bound counts while sequences are decoding, whom a long step would keep waiting. The budget is never below
    their number and one more, so that prompts advance even where the bound cannot be kept.
    """
    decoding = [sequence for sequence in state.running if sequence.decoding]
    answers = work_of_decoding(decoding)
    most = limits.step_tokens
    seqs, why_seqs = _most_sequences(state, limits, fit, bound, answers)
    slots = max(0, seqs - len(state.running))
    prompts = [*(one for one in state.running if not one.decoding), *state.waiting[:slots]]
    drafts = sum(sequence.drafts for sequence in decoding)

    def budget(tokens: int, cause: Cause, reason: str = "") -> Budget:
        chunks = plan_chunks(prompts, tokens - len(decoding), limits.block_size, by_length)
        work = _whole(answers, chunks, drafts, tokens)
        seconds = fit.upper(work) if fit.ready else 0.0
        return Budget(tokens, seqs, chunks, work, seconds, cause, "; ".join(filter(None, (reason, why_seqs))))

    if bound is None:
        return budget(most, Cause.FREE, "no latency bound")
    if not decoding:
        return budget(most, Cause.FREE, "no answer is in progress, so nobody waits for this step")
    least = min(most, len(decoding) + 1)
    if not prompts and not drafts:
        return budget(most, Cause.ANSWERS, f"{len(decoding)} answers and no prompt")
    # What lies beyond anything that was measured is tried by and by.
    trusted = max(least, fit.trusted)
    sizes = [least, *(size for size in candidates if least < size <= min(most, trusted))]
    if not fit.ready:
        size = sizes[min(1, len(sizes) - 1)]
        return budget(size, Cause.LEARNING, f"{size} tokens to begin with, as too few steps were measured")
    # Steps grow with their tokens, so the largest that is fast enough is found by bisection.
    fitting = bisect_left(sizes, True, key=lambda size: budget(size, Cause.FITS).seconds > bound)
    chosen = budget(sizes[max(0, fitting - 1)], Cause.FITS)
    cause, why = Cause.FITS, f"{chosen.work.tokens} tokens take at most {_ms(chosen.seconds)} of {_ms(bound)}"
    if fitting == 0:
        cause = Cause.UNREACHABLE
        why = f"even {least} tokens take {_ms(chosen.seconds)}, longer than the bound of {_ms(bound)}"
    elif fitting < len(sizes):
        cause, why = Cause.BOUND, f"{why}, {sizes[fitting]} would take more"
    elif chosen.work.tokens == sizes[-1] < most:
        cause, why = Cause.LEARNING, f"{why}, larger steps have yet to be measured"
    return replace(chosen, cause=cause, reason="; ".join(filter(None, (why, why_seqs))))


def _whole(answers: StepWork, chunks: Sequence[Chunk], drafts: int, tokens: int) -> StepWork:
    """Return the work of a step: answers, chunks, and the guesses for which there is room."""
    work = answers
    for chunk in chunks:
        work += chunk.work
    drafts = min(drafts, max(0, tokens - work.tokens))
    if drafts:
        each = answers.context // answers.tokens
        work += StepWork(drafts, drafts, 0, drafts * (each + 1))
    return work


def _most_sequences(state: State, limits: Limits, fit: Fit, bound: float | None, answers: StepWork) -> tuple[int, str]:
    """Return how many sequences may run at once so that their answers alone stay well within the bound.

    Those that run already stay. Where one alone breaks the bound nothing is gained by it, so there is no limit.
    """
    running, most = len(state.running), limits.max_seqs
    if bound is None or not fit.ready or not answers.tokens or running >= most or not state.waiting:
        return most, ""
    each = answers.context // answers.tokens
    allowed = ANSWERS_SHARE * bound

    def breaks(seqs: int) -> bool:
        return fit.upper(StepWork(seqs, seqs, seqs * each, seqs * (each + 1))) > allowed

    if breaks(1):
        return most, ""
    fitting = bisect_left(range(1, most + 1), True, key=breaks)
    if fitting >= most:
        return most, ""
    seqs = max(running, fitting)
    return seqs, f"no more than {seqs} sequences, whose answers take {_ms(allowed)}"


def shape(state: State, limits: Limits, budget: Budget) -> tuple[State, Limits]:
    """Return the state and the limits with which the scheduler decides as the budget says."""
    planned = {chunk.sequence.number: chunk for chunk in budget.chunks}
    running = [
        one if one.decoding else replace(one, most=planned[one.number].tokens if one.number in planned else 0)
        for one in state.running
    ]
    limits = replace(limits, step_tokens=budget.tokens, max_seqs=min(limits.max_seqs, budget.seqs))
    if len(running) >= limits.max_seqs:
        return State(running, state.waiting, state.free), limits  # nothing is started, unless by preemption
    waits = {one.number for one in state.waiting}
    waiting = [replace(chunk.sequence, most=chunk.tokens) for chunk in budget.chunks if chunk.sequence.number in waits]
    return State(running, waiting, state.free), limits


def choose_hold(prompts: Sequence[int], oldest_seconds: float, min_size: int, fit: Fit, bound: float | None) -> Hold:
    """Return how long to wait for more than these prompts (their tokens) before the first step.

    `oldest_seconds` is how long the first has waited. It and the step that follows must stay within `bound` seconds.
    """
    if not prompts or len(prompts) >= min_size or bound is None:
        return Hold(0.0, "")
    work = sum((StepWork.of(0, tokens, 1) for tokens in prompts), StepWork())
    step = fit.upper(work) if fit.ready else bound / 2
    seconds = bound - oldest_seconds - step
    if seconds <= 0:
        return Hold(0.0, f"{len(prompts)} of {min_size} go, as the bound of {_ms(bound)} leaves no time to wait")
    missing = min_size - len(prompts)
    return Hold(seconds, f"waits up to {_ms(seconds)} for {missing} more, the step takes {_ms(step)} of {_ms(bound)}")


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
