"""What one thread does: it admits requests, runs steps, ends requests. It knows nothing of threads or clients."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from dataclasses import dataclass, field, replace

import torch

from treadle.serve.cache import Capacity, Chunk, KeyValueCache, Slots, length_dependent_ropes, rope_regime
from treadle.serve.model import Model
from treadle.serve.request import Delta, FinishReason, Phase, Request
from treadle.serve.runner import Runner
from treadle.serve.sampler import Choice, choose
from treadle.serve.scheduler import Decision, Limits, Load, decide
from treadle.serve.text import TextOutput


@dataclass
class EngineStats:
    """Counters since the start, for metrics; written by the engine's thread only."""

    requests: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    running: int = 0
    waiting: int = 0
    cache_tokens_used: int = 0


class Core:
    """The requests at hand and the cache that they share."""

    def __init__(self, model: Model, capacity: Capacity, step_tokens: int, reuse_prefix: bool) -> None:
        self.model = model
        self.stats = EngineStats()
        self.decision: Decision | None = None  # of the last step
        self._ropes = length_dependent_ropes(model.spec)
        # Where angles depend on the length, a prefix of a longer sequence holds other keys than a short prompt's own.
        self.slots = Slots(capacity.seqs, reuse_prefix and not self._ropes)
        self.limits = Limits(capacity.seqs, capacity.seqs * capacity.length, step_tokens)
        self._runner = Runner(
            model.module, KeyValueCache(model.spec, capacity.seqs, capacity.length, model.dtype, model.device)
        )
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._outputs: dict[int, TextOutput] = {}

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running

    def add(self, request: Request) -> None:
        """Queue a request behind those that wait."""
        self._waiting.append(request)
        self.stats.requests += 1
        self._gauge()

    def drop_cancelled(self) -> None:
        """End the requests that were cancelled, and free what they held."""
        for request in [one for one in (*self._running, *self._waiting) if one.cancelled]:
            self._end(request, Delta(request.index, finish_reason=FinishReason.CANCELLED))

    def fail_all(self, why: str) -> None:
        """End everything at hand with an error."""
        for request in [*self._running, *self._waiting]:
            self._end(request, Delta(request.index, finish_reason=FinishReason.ERROR, error=why))

    def step(self) -> None:
        """Decide what runs next, run it, and give every request in it its token."""
        self.decision = decide(
            [_load(request) for request in itertools.islice(self._waiting, self.limits.max_seqs + 1)],
            [_load(request) for request in self._running],
            self.limits,
        )
        for number in self.decision.start:
            request = self._waiting.popleft()
            assert request.number == number
            request.start(*self.slots.take(request.tokens))
            self._running.append(request)
        batch = self._running.copy()
        if not batch:
            return
        self._gauge()
        for request, choice in zip(batch, self._compute(batch), strict=True):
            self._advance(request, choice)
        self.stats.steps += 1
        self._gauge()

    def _compute(self, batch: list[Request]) -> list[Choice]:
        """Run the batch; where that fails, each request alone, so that only those at fault fail."""
        try:
            with torch.inference_mode():
                return choose(self._runner.step([self._chunk(request) for request in batch]), batch)
        except Exception as error:
            if len(batch) > 1:
                return [self._compute([request])[0] for request in batch]
            return [Choice(error=f"the model could not compute this request: {sentence(error)}")]

    def _chunk(self, request: Request) -> Chunk:
        assert request.slot is not None
        past = request.computed
        if past and rope_regime(self._ropes, past) != rope_regime(self._ropes, len(request.tokens)):
            past = 0  # the keys in the cache were turned by other angles
        return Chunk(request.slot, past, request.tokens[past:])

    def _advance(self, request: Request, choice: Choice) -> None:
        """Give `request` its token, and end it if that was the last."""
        if choice.error:
            self._end(request, Delta(request.index, finish_reason=FinishReason.ERROR, error=choice.error))
            return
        if not request.completion_tokens:
            self.stats.prompt_tokens += request.prompt_tokens
            self.stats.cached_tokens += request.cached_tokens
        self.stats.generated_tokens += 1
        request.computed = len(request.tokens)
        request.tokens.append(choice.token)
        delta = Delta(request.index, tokens=(choice.token,), logprobs=(choice.logprob,) if choice.logprob else ())
        if choice.token in request.stop_ids:
            tokenizer = self.model.tokenizer
            by_eos = tokenizer is not None and choice.token in tokenizer.eos_ids
            stopped = replace(delta, finish_reason=FinishReason.STOP, stop_reason=None if by_eos else choice.token)
            self._end(request, stopped)
            return
        text, stop = self._output(request).push(
            choice.token, watch=request.completion_tokens >= request.settings.min_tokens
        )
        delta = replace(delta, text=text)
        if stop is not None:
            self._outputs.pop(request.number)  # what comes after the stop string is nobody's business
            self._end(request, replace(delta, finish_reason=FinishReason.STOP, stop_reason=stop))
        elif request.completion_tokens == request.max_tokens:
            self._end(request, replace(delta, finish_reason=FinishReason.LENGTH))
        else:
            self._deliver(request, delta)

    def _output(self, request: Request) -> TextOutput:
        if request.number not in self._outputs:
            tokenizer = self.model.tokenizer
            decoder = None if tokenizer is None else tokenizer.stream(request.settings.skip_special_tokens)
            self._outputs[request.number] = TextOutput(decoder, request.settings.stop)
        return self._outputs[request.number]

    def _end(self, request: Request, last: Delta) -> None:
        """Finish a request from wherever it stands: free its slot, give what was held back with its last delta."""
        if request.phase is Phase.RUNNING:
            assert request.slot is not None
            self._running.remove(request)
            self.slots.give_back(request.slot, request.tokens[: request.computed])
        else:
            self._waiting.remove(request)
        request.finish()
        output = self._outputs.pop(request.number, None)
        if output is not None:
            rest, stop = output.finish()
            last = replace(last, text=last.text + rest)
            if stop is not None and last.finish_reason is not FinishReason.ERROR:
                last = replace(last, finish_reason=FinishReason.STOP, stop_reason=stop)
        assert last.finish_reason is not None
        self.stats.finished[last.finish_reason.value] += 1
        self._gauge()
        self._deliver(request, last)

    def _deliver(self, request: Request, delta: Delta) -> None:
        counted = replace(
            delta,
            prompt_tokens=request.prompt_tokens,
            completion_tokens=request.completion_tokens,
            cached_tokens=request.cached_tokens,
        )
        try:
            request.deliver(counted)
        except Exception:  # whoever asked has gone, with its event loop
            request.cancelled = True

    def _gauge(self) -> None:
        self.stats.running, self.stats.waiting = len(self._running), len(self._waiting)
        self.stats.cache_tokens_used = sum(request.computed for request in self._running)


def _load(request: Request) -> Load:
    return Load(request.number, len(request.tokens) - request.computed, request.reserve)


def sentence(error: BaseException) -> str:
    """Return what went wrong on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
