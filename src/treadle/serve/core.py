"""What one thread does: it admits requests, runs steps, ends requests. It knows nothing of threads or clients."""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from treadle.config import TreadleError, UserError
from treadle.model.rope import length_dependent_ropes, rope_regime
from treadle.serve.batch import StepBatch, StepOutput
from treadle.serve.batching import BatchPolicy
from treadle.serve.block_tables import BlockTables
from treadle.serve.cost_model import StepWork
from treadle.serve.model import Model
from treadle.serve.request import Delta, FinishReason, Phase, Request, TokenLogprob
from treadle.serve.room import Reserve
from treadle.serve.runner import Runner
from treadle.serve.sampler import Choice, Row, choose, prompt_logprobs
from treadle.serve.scheduler import UNLIMITED, Decision, Limits, Piece, SequenceState, State, decide
from treadle.serve.speculation import Drafter
from treadle.serve.stats import EngineStats
from treadle.serve.text import TextOutput
from treadle.serve.versions import Versions

# Rows of logits that a step may hold for prompts whose log probabilities are wanted: a row is a whole vocabulary.
PROMPT_LOGPROB_ROWS = 128


class Core:
    """The requests at hand and the cache that they share."""

    def __init__(
        self,
        model: Model,
        runner: Runner,
        tables: BlockTables,
        limits: Limits,
        *,
        policy: BatchPolicy | None = None,
        reuse_prefixes: bool = True,
        drafts: int = 0,
        check: bool = False,
        version: str = "",
    ) -> None:
        """`drafts` is how many tokens are guessed at most; with `check` the pools are verified after every step."""
        self.tables, self.limits = tables, limits
        self.versions = Versions(model, runner, version or model.version)
        self.stats = EngineStats(blocks=sum(pool.count for pool in tables.pools))
        self.decision = Decision()  # of the last step
        self._ropes = length_dependent_ropes(model.spec)
        # Where angles depend on the length, a prefix of a longer sequence holds other keys than a short prompt's own.
        self._reuse = reuse_prefixes and not self._ropes
        self._drafts = 0 if self._ropes else drafts
        self.policy = policy or BatchPolicy()
        self._check = check
        self._waiting: list[Request] = []  # both in the order of urgency
        self._running: list[Request] = []
        self._outputs: dict[int, TextOutput] = {}

    @property
    def model(self) -> Model:
        """The weights of now with their tokenizer."""
        return self.versions.current.model

    @property
    def runner(self) -> Runner:
        """What computes with the weights of now."""
        return self.versions.current.runner

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running

    def wait_seconds(self) -> float:
        """Return how long the next step should be put off, in the hope of more requests."""
        if self._running or not self._waiting:
            return 0.0
        oldest = min(request.arrived for request in self._waiting)
        hold = self.policy.hold([len(request.tokens) for request in self._waiting], time.monotonic() - oldest)
        if hold.seconds > 0:
            self.stats.decision = hold.reason
        return hold.seconds

    def admit(self, requests: Sequence[Request]) -> None:
        """Refuse what cannot be computed as the engine is now.

        Called from other threads; raises UserError, or Unavailable while the engine sleeps.
        """
        for adapter in {request.settings.adapter for request in requests}:
            self.versions.check(adapter)

    def close(self) -> None:
        """Free what the runners hold."""
        for version in self.versions.all:
            version.runner.close()
        self.policy.close()

    def add(self, request: Request) -> None:
        """Queue a request."""
        if self._drafts and not request.embeds:
            request.drafter = Drafter(self._drafts)
        bisect.insort(self._waiting, request, key=_order)
        self.policy.arrived(request.prompt_tokens)
        self.stats.requests += 1
        self._gauge()
        try:
            self.versions.bind(request)
        except UserError as error:  # the adapter was there when the request was admitted
            self._end(request, Delta(request.index, finish_reason=FinishReason.ERROR, error=str(error)))

    def drop_cancelled(self) -> None:
        """End the requests that were cancelled, and free what they held."""
        for request in [one for one in (*self._running, *self._waiting) if one.cancelled]:
            self._end(request, Delta(request.index, finish_reason=FinishReason.CANCELLED))

    def fail_all(self, why: str) -> None:
        """End everything at hand with an error."""
        for request in [*self._running, *self._waiting]:
            self._end(request, Delta(request.index, finish_reason=FinishReason.ERROR, error=why))

    def step(self) -> None:
        """Decide what runs next, run it, and give the sequences in it their tokens."""
        begun = time.perf_counter()
        self.decision = decision = self._decide()
        requests = {request.number: request for request in (*self._running, *self._waiting)}
        admitted = [requests[number] for number in decision.admit]
        for request in admitted:
            self._start(request)
        batch = [(requests[piece.number], piece) for piece in decision.run]
        for request, piece in batch:
            assert request.blocks is not None
            self.tables.extend(request.blocks, request.computed + piece.tokens + piece.drafts)
        if not batch:
            return
        self._gauge()
        computing = time.perf_counter()
        outputs = self._compute(batch)
        model_seconds = time.perf_counter() - computing
        work = sum((_work(request, piece) for request, piece in batch), StepWork())
        for (request, piece), output in zip(batch, outputs, strict=True):
            self._advance(request, piece, output)
        seconds = time.perf_counter() - begun
        self.policy.observe(work, seconds)
        self._count_step(decision, model_seconds, seconds)
        if self._check:
            self.tables.check()

    # --- deciding

    def _decide(self) -> Decision:
        """Ask the scheduler until it preempts nothing more; put those that it names back into the queue."""
        while True:
            running = [self._state(request) for request in self._running]
            state = State(running, self._candidates(), self.tables.free)
            state, limits, why = self.policy.shape(state, self.limits)
            decision = decide(state, limits)
            if not decision.preempt:
                self.stats.budget_tokens, self.stats.budget_seqs = limits.step_tokens, limits.max_seqs
                return replace(decision, reason=f"{decision.reason}; {why}") if why else decision
            for request in [one for one in self._running if one.number in decision.preempt]:
                self._preempt(request)

    def _state(self, request: Request) -> SequenceState:
        assert request.blocks is not None
        if self._ropes and request.computed:
            turned, wanted = request.rope_length, len(request.tokens)
            if rope_regime(self._ropes, turned) != rope_regime(self._ropes, wanted):
                request.computed = 0  # the keys in the cache were turned by other angles
        drafts = 0
        if request.drafter is not None and len(request.tokens) - request.computed == 1:
            if not request.drafts:
                # A step's time is everybody's: a guess must bring its own sequence what it costs all of them.
                cost = self.policy.token_cost() * len(self._running)
                request.drafts = request.drafter.propose(request.tokens, cost)
            drafts = min(len(request.drafts), request.max_tokens - request.completion_tokens - 1)
        return SequenceState(
            request.number,
            request.urgency,
            len(request.tokens),
            request.computed,
            request.blocks.given,
            drafts=max(0, drafts),
            most=PROMPT_LOGPROB_ROWS if request.wants_prompt_logprobs else UNLIMITED,
            priority=request.settings.priority,
        )

    def _candidates(self) -> list[SequenceState]:
        """Return the states of the requests that could be started, a few more than could be."""
        count = self.limits.max_seqs - len(self._running) + 1
        states = []
        for request in self._waiting:
            if len(states) == count:
                break
            leader = request.leader
            if leader is not None and self._reuse and leader.phase is not Phase.FINISHED and not leader.prompt_done:
                continue  # its prompt will be there for the taking
            states.append(self._candidate(request))
        return states

    def _candidate(self, request: Request) -> SequenceState:
        if request.blocks is None:
            self._open(request)
        assert request.blocks is not None
        given, free = 0, ()
        if self._reuse and not request.wants_prompt_logprobs:
            hit = self.tables.find_prefix(request.blocks, request.tokens)
            given, free = hit.count, hit.free
        return SequenceState(
            request.number,
            request.urgency,
            len(request.tokens),
            given * self.tables.block_size,
            given,
            free,
            most=PROMPT_LOGPROB_ROWS if request.wants_prompt_logprobs else UNLIMITED,
            priority=request.settings.priority,
        )

    def _open(self, request: Request) -> None:
        """Give a request its (empty) blocks."""
        request.blocks = self.tables.open(self.versions.root(request))

    def _start(self, request: Request) -> None:
        assert request.blocks is not None
        computed = 0
        if self._reuse and not request.wants_prompt_logprobs:
            computed = self.tables.take_prefix(request.blocks, self.tables.find_prefix(request.blocks, request.tokens))
        self._waiting.remove(request)
        request.start(computed)
        bisect.insort(self._running, request, key=_order)

    def _preempt(self, request: Request) -> None:
        self._put_back(request)
        self.stats.preemptions += 1

    def _put_back(self, request: Request) -> None:
        """Let a running request wait again."""
        assert request.blocks is not None
        self.tables.release(request.blocks)
        self._running.remove(request)
        request.preempt()
        bisect.insort(self._waiting, request, key=_order)

    # --- computing

    def _compute(self, batch: Sequence[tuple[Request, Piece]]) -> list[list[Choice] | Delta]:
        """Run the batch; where that fails, each sequence alone, so that only those at fault fail.

        Returns for each sequence the choices of its rows, or the delta that ends it.
        """
        results: dict[int, list[Choice] | Delta] = {}
        for weights in dict.fromkeys(request.weights for request, _ in batch):
            part = [(request, piece) for request, piece in batch if request.weights == weights]
            runner = self.versions.runner(weights)
            for (request, _), result in zip(part, self._compute_part(part, runner), strict=True):
                results[request.number] = result
        return [results[request.number] for request, _ in batch]

    def _compute_part(self, part: Sequence[tuple[Request, Piece]], runner: Runner) -> list[list[Choice] | Delta]:
        try:
            with torch.inference_mode():
                return list(self._read(part, runner.step(self._batch(part))))
        except TreadleError:
            raise  # the runner itself is broken
        except Exception as error:
            if len(part) > 1:
                return [self._compute_part([one], runner)[0] for one in part]
            why = f"the model could not compute this request: {sentence(error)}"
            return [Delta(part[0][0].index, finish_reason=FinishReason.ERROR, error=why)]

    def _batch(self, part: Sequence[tuple[Request, Piece]]) -> StepBatch:
        tokens: list[int] = []
        rows: list[int] = []
        pooled: list[int] = []
        for request, piece in part:
            start, computed = len(tokens), request.computed
            request.rope_length = len(request.tokens)
            tokens += request.tokens[computed : computed + piece.tokens]
            tokens += request.drafts[: piece.drafts]
            if request.wants_prompt_logprobs:
                rows += range(start, len(tokens))
            elif computed + piece.tokens == len(request.tokens):
                if request.embeds:
                    pooled.append(len(tokens) - 1)
                else:
                    rows += range(start + piece.tokens - 1, len(tokens))
        sequences = [request.blocks for request, _ in part if request.blocks is not None]
        adapters = [request.adapter for request, _ in part]
        return StepBatch(
            tokens,
            [piece.tokens + piece.drafts for _, piece in part],
            [request.computed for request, _ in part],
            [request.rope_length for request, _ in part],
            rows,
            self.tables.step_tables(sequences),
            adapters if any(adapters) else [],
            pooled,
        )

    def _read(self, part: Sequence[tuple[Request, Piece]], output: StepOutput) -> Iterator[list[Choice] | Delta]:
        """Yield what each sequence of a step got."""
        rows: list[Row] = []
        wanted: list[int] = []  # of the output's rows, those that choose a token
        at = 0
        for request, piece in part:
            last = request.computed + piece.tokens == len(request.tokens)
            if request.wants_prompt_logprobs:
                self._note_prompt(request, output.logits[at : at + piece.tokens])
                at += piece.tokens - 1 if last else piece.tokens
            if last and not request.embeds:
                guesses = request.drafts[: piece.drafts]
                for count in range(len(guesses) + 1):
                    rows.append(Row(request, tuple(guesses[:count])))
                    wanted.append(at)
                    at += 1
        logits = output.logits
        if len(wanted) != len(logits):
            logits = logits[torch.tensor(wanted, dtype=torch.int64, device=logits.device)]
        choices = iter(choose(logits, rows) if rows else [])
        pooled = iter(output.hidden)
        for request, piece in part:
            if request.computed + piece.tokens < len(request.tokens):
                yield []
            elif request.embeds:
                vector = torch.nn.functional.normalize(next(pooled), dim=0)
                yield Delta(request.index, embedding=tuple(vector.tolist()), finish_reason=FinishReason.STOP)
            else:
                yield [next(choices) for _ in range(piece.drafts + 1)]

    def _note_prompt(self, request: Request, logits: Float[Tensor, "R V"]) -> None:
        """Keep the log probabilities of a piece of the prompt; a row tells of the token after it."""
        first = len(request.prompt_logprobs)  # the token whose log probability is wanted next
        targets = request.tokens[request.computed + 1 : request.prompt_tokens][: len(logits)]
        skip = first - (request.computed + 1)  # known already: the sequence is computed again
        count = request.settings.prompt_logprobs or 0
        if skip < len(targets):
            request.prompt_logprobs += prompt_logprobs(logits[skip : len(targets)], targets[skip:], count)

    # --- what comes of it

    def _advance(self, request: Request, piece: Piece, output: list[Choice] | Delta) -> None:
        """Give `request` what a step brought it, and end it if that was the last."""
        assert request.blocks is not None
        if isinstance(output, Delta):
            request.computed += 0 if output.error else piece.tokens
            if output.error is None:
                self._count_prompt(request)
            self._end(request, output)
            return
        request.computed += piece.tokens
        drafts = request.drafts[: piece.drafts]
        request.drafts = []
        held = 0
        for place, choice in enumerate(output):
            if place and drafts[place - 1] != output[place - 1].token:
                break
            if place:
                held += 1
                request.computed += 1
            if not self._give(request, choice):
                break
        if drafts:
            self._learn(request, len(drafts), held)
        if request.phase is Phase.RUNNING:
            self.tables.advance(request.blocks, request.tokens, request.computed, self._reuse)

    def _learn(self, request: Request, guessed: int, held: int) -> None:
        assert request.drafter is not None
        request.drafter.learn(guessed, held)
        self.stats.drafted_tokens += guessed
        self.stats.accepted_tokens += held
        if request.blocks is not None:
            self.tables.shrink(request.blocks, len(request.tokens))

    def _give(self, request: Request, choice: Choice) -> bool:
        """Give `request` its next token. Returns whether it goes on."""
        if choice.error:
            self._end(request, Delta(request.index, finish_reason=FinishReason.ERROR, error=choice.error))
            return False
        prompt: tuple[TokenLogprob | None, ...] = ()
        if not request.completion_tokens:
            self._count_prompt(request)
            prompt = () if request.settings.prompt_logprobs is None else tuple(request.prompt_logprobs)
        self.stats.generated_tokens += 1
        request.tokens.append(choice.token)
        logprobs = (choice.logprob,) if choice.logprob else ()
        delta = Delta(request.index, tokens=(choice.token,), logprobs=logprobs, prompt_logprobs=prompt)
        if request.matcher is not None and not request.matcher.accept(choice.token):
            why = "the grammar refuses the token that was chosen for it"
            self._end(request, Delta(request.index, finish_reason=FinishReason.ERROR, error=why))
            return False
        if choice.token in request.stop_ids:
            tokenizer = self.model.tokenizer
            by_eos = tokenizer is not None and choice.token in tokenizer.eos_ids
            stopped = replace(delta, finish_reason=FinishReason.STOP, stop_reason=None if by_eos else choice.token)
            self._end(request, stopped)
            return False
        text, stop = self._output(request).push(
            choice.token, watch=request.completion_tokens >= request.settings.min_tokens
        )
        delta = replace(delta, text=text)
        if stop is not None:
            self._outputs.pop(request.number)  # what comes after the stop string is nobody's business
            self._end(request, replace(delta, finish_reason=FinishReason.STOP, stop_reason=stop))
        elif request.matcher is not None and request.matcher.finished:
            self._end(request, replace(delta, finish_reason=FinishReason.STOP))
        elif request.completion_tokens == request.max_tokens:
            self._end(request, replace(delta, finish_reason=FinishReason.LENGTH))
        else:
            self._deliver(request, delta)
            return True
        return False

    def _output(self, request: Request) -> TextOutput:
        if request.number not in self._outputs:
            tokenizer = self.model.tokenizer
            settings = request.settings
            decoder = (
                None if tokenizer is None else tokenizer.stream(settings.skip_special_tokens, settings.shown_tokens)
            )
            self._outputs[request.number] = TextOutput(decoder, settings.stop)
        return self._outputs[request.number]

    def _end(self, request: Request, last: Delta) -> None:
        """Finish a request from wherever it stands: free its blocks, give what was held back with its last delta."""
        if request.phase is Phase.RUNNING:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        if request.blocks is not None:
            if last.error is None:  # what failed is not to be found by others
                self.tables.advance(request.blocks, request.tokens, request.computed, self._reuse)
            self.tables.close(request.blocks)
            request.blocks = None
        request.finish()
        self.versions.drop_unused(itertools.chain(self._running, self._waiting))
        output = self._outputs.pop(request.number, None)
        if output is not None:
            rest, stop = output.finish()
            last = replace(last, text=last.text + rest)
            if stop is not None and last.finish_reason is not FinishReason.ERROR:
                last = replace(last, finish_reason=FinishReason.STOP, stop_reason=stop)
        assert last.finish_reason is not None
        reason = last.finish_reason.value
        self.stats.finished[reason] = self.stats.finished.get(reason, 0) + 1
        self._gauge()
        self._deliver(request, last)

    def _deliver(self, request: Request, delta: Delta) -> None:
        counted = replace(
            delta,
            prompt_tokens=request.prompt_tokens,
            completion_tokens=request.completion_tokens,
            cached_tokens=request.cached_tokens,
            queue_seconds=0.0 if request.started is None else request.started - request.arrived,
            weight_version=request.version,
        )
        try:
            request.deliver(counted)
        except Exception:  # whoever asked has gone, with its event loop
            request.cancelled = True

    # --- weights

    def switch_weights(self, name: str, model: Model, runner: Runner, restart: bool) -> None:
        """Let requests that have not begun be computed with other weights, called `name`.

        Those that have begun, with all choices of their prompt, go on with what they began with; with `restart` they
        are computed again with the new weights, the tokens so far kept. Prefixes of the old weights are never found
        again: their digests begin with another root. Adapters go with the new weights as with the old.
        """
        self.versions.switch(name, model, runner)
        begun: set[Request] = set()
        if restart:
            for request in list(self._running):
                self._put_back(request)
        else:
            begun = {request.first for request in (*self._running, *self._waiting) if _has_begun(request)}
        for request in self._waiting:
            if request.first not in begun:
                self.versions.renew(request)
                request.begin_again()
                if request.blocks is not None:
                    self.tables.close(request.blocks)
                    request.blocks = None
        self.versions.drop_unused(itertools.chain(self._running, self._waiting))

    def remove_adapter(self, name: str) -> None:
        """Take no more requests of an adapter; it is freed once those at hand are done. Raises UserError."""
        self.versions.remove_adapter(name)
        self.versions.drop_unused(itertools.chain(self._running, self._waiting))

    def reserve(self, step_bytes: int) -> Reserve:
        """Return what memory the engine may still claim. For any thread."""
        return Reserve(tuple(pool.fresh for pool in self.tables.pools), step_bytes)

    # --- numbers

    def _count_step(self, decision: Decision, model_seconds: float, seconds: float) -> None:
        stats = self.stats
        stats.steps += 1
        stats.budget_causes[self.policy.cause] = stats.budget_causes.get(self.policy.cause, 0) + 1
        stats.model_seconds += model_seconds
        stats.step_seconds += seconds
        stats.last_step_tokens, stats.last_step_seqs = decision.tokens, len(decision.run)
        stats.steps_by_tokens.add(decision.tokens)
        stats.steps_by_seqs.add(len(decision.run))
        stats.steps_by_seconds.add(seconds)
        stats.decision, stats.stepped = decision.reason, time.monotonic()
        stats.evictions = sum(pool.evictions for pool in self.tables.pools)
        self._gauge()

    def _count_prompt(self, request: Request) -> None:
        self.stats.prompt_tokens += request.prompt_tokens
        if self._reuse and request.settings.prompt_logprobs is None:
            self.stats.looked_up_tokens += request.prompt_tokens
            self.stats.cached_tokens += request.cached_tokens

    def _gauge(self) -> None:
        self.stats.running, self.stats.waiting = len(self._running), len(self._waiting)
        self.stats.blocks_held = sum(pool.held for pool in self.tables.pools)


def _work(request: Request, piece: Piece) -> StepWork:
    """Return what computing a piece is, before it is noted as computed."""
    rows = 0
    if request.wants_prompt_logprobs:
        rows = piece.tokens
    elif request.computed + piece.tokens == len(request.tokens):
        rows = 1 + piece.drafts
    return StepWork.of(request.computed, piece.tokens + piece.drafts, rows)


def _has_begun(request: Request) -> bool:
    """Return whether a request, or the first choice of its prompt, was given anything by the weights it has."""
    return request.phase is Phase.RUNNING or request.completion_tokens > 0 or request.first.phase is Phase.FINISHED


def _order(request: Request) -> tuple[float, int]:
    return request.urgency, request.number


def sentence(error: BaseException) -> str:
    """Return what went wrong on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
