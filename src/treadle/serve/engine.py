"""The engine: requests in from any thread, tokens out, one background thread that runs step after step.

    with Engine("path/to/model", max_num_seqs=8) as engine:
        print(engine.generate(["Once upon a time"], max_tokens=32)[0])

An asynchronous caller iterates over `engine.stream(...)`; leaving the loop cancels the request.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import itertools
import queue
import random
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from treadle.config import Settings, TreadleError, UserError, parse_settings
from treadle.serve.cache import available_memory, fit_capacity
from treadle.serve.core import Core, EngineStats, sentence
from treadle.serve.model import Model, load
from treadle.serve.request import Completion, Delta, Phase, Request, SamplingSettings
from treadle.serve.sampler import derive_seed


class EngineSettings(Settings):
    """What an engine is started with; the names are vLLM's. None means: as much as the memory allows."""

    max_num_seqs: int | None = Field(None, ge=1, le=4096)  # sequences that run at once
    max_model_len: int | None = Field(None, ge=1)  # tokens of the longest sequence, prompt and answer
    max_num_batched_tokens: int = Field(2048, ge=1)  # a step starts no further prompt beyond this many tokens
    seed: int | None = None  # of the requests that have none of their own; None: a fresh one
    reuse_prefix: bool = False  # go on from a finished sequence where a prompt begins with its tokens


class Ticket:
    """A submitted prompt: its requests (one a choice), which can be cancelled together."""

    def __init__(self, engine: Engine, requests: list[Request]) -> None:
        self._engine, self.requests = engine, requests

    @property
    def prompt_tokens(self) -> int:
        return self.requests[0].prompt_tokens

    def cancel(self) -> None:
        """End what still runs; harmless afterwards. Its last delta has the finish reason `cancelled`."""
        self._engine._cancel(self.requests)


class Engine:
    """Serves one model to any number of threads. Close it, or use it in a `with` block."""

    def __init__(self, model: Model | str | Path, **settings: Any) -> None:
        """`settings` are those of EngineSettings. Raises UserError for wrong ones, or a cache that does not fit."""
        self.settings = parse_settings(EngineSettings, settings, source="the engine's settings")
        self.model = model if isinstance(model, Model) else load(model)
        spec, dtype, device = self.model.spec, self.model.dtype, self.model.device
        self.capacity = fit_capacity(
            spec, dtype, available_memory(device), self.settings.max_num_seqs, self.settings.max_model_len
        )
        self.max_model_len = self.capacity.length
        self._core = Core(self.model, self.capacity, self.settings.max_num_batched_tokens, self.settings.reuse_prefix)
        self._seeds = random.Random(self.settings.seed)  # noqa: S311 - sampling, not secrets
        # Guards what other threads hand over: arrivals, cancellations, closing.
        self._changed = threading.Condition()
        self._arrivals: deque[Request] = deque()
        self._cancellations = False
        self._refusing = ""
        self._stopping = False
        threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, args=(threads,), name="treadle-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the prompt's token ids. Raises UserError where there are none, or one is not in the vocabulary."""
        if isinstance(prompt, str):
            self.check_length(len(prompt))
        return self.model.encode(prompt)

    def check_length(self, characters: int) -> None:
        """Raise UserError where a text of so many characters cannot fit the context, without tokenizing it."""
        if self.model.tokenizer is not None and characters > self.max_model_len * self._longest_token:
            raise UserError(
                f"the prompt has {characters} characters, more than fit the context of {self.max_model_len} tokens; "
                "shorten it"
            )

    @functools.cached_property
    def _longest_token(self) -> int:
        tokenizer = self.model.tokenizer
        return 1 if tokenizer is None else max(map(len, tokenizer.backend.get_vocab()), default=1)

    def submit(
        self, prompt: str | Sequence[int], settings: SamplingSettings, deliver: Callable[[Delta], None]
    ) -> Ticket:
        """Queue a prompt; `deliver` is called in the engine's thread with each delta and must not block.

        Raises UserError for what cannot be carried out, TreadleError once the engine is closing or has failed.
        """
        tokens = self.encode(prompt)
        max_tokens = self._resolve_max_tokens(len(tokens), settings)
        self._check_ids("logit_bias", settings.logit_bias)
        self._check_ids("stop_token_ids", settings.stop_token_ids)
        tokenizer = self.model.tokenizer
        if settings.stop and tokenizer is None:
            raise UserError("the model has no tokenizer, so stop strings cannot be found; use stop_token_ids")
        ends = () if settings.ignore_eos or tokenizer is None else tokenizer.eos_ids
        stop_ids = frozenset((*settings.stop_token_ids, *ends))
        with self._changed:
            if self._refusing:
                raise TreadleError(self._refusing)
            seed = self._seeds.getrandbits(64) if settings.seed is None else settings.seed
            requests = [
                Request(tokens, settings, max_tokens, derive_seed(seed, index), stop_ids, deliver, index)
                for index in range(settings.n)
            ]
            self._arrivals.extend(requests)
            self._changed.notify_all()
        return Ticket(self, requests)

    def generate(
        self, prompts: Sequence[str | Sequence[int]] | str, settings: SamplingSettings | None = None, **sampling: Any
    ) -> list[Completion]:
        """Return the completions of `prompts`, in their order (with n > 1: n for each). Blocks.

        Raises UserError for what cannot be carried out, TreadleError where the engine failed.
        """
        chosen = SamplingSettings.of(settings, **sampling)
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        if prompts and isinstance(prompts[0], int):
            raise UserError("generate takes a list of prompts; put the token ids of one prompt into a list")
        deltas: queue.SimpleQueue[tuple[int, Delta]] = queue.SimpleQueue()
        completions = [Completion() for _ in range(len(prompts) * chosen.n)]
        tickets: list[Ticket] = []
        try:
            for first, prompt in zip(itertools.count(step=chosen.n), prompts, strict=False):
                tickets.append(self.submit(prompt, chosen, lambda delta, first=first: deltas.put((first, delta))))
            left = len(completions)
            while left:
                first, delta = deltas.get()
                completions[first + delta.index].add(delta)
                _raise_if_failed(delta)
                left -= delta.finish_reason is not None
        finally:
            for ticket in tickets:
                ticket.cancel()
        return completions

    def deltas(
        self, prompt: str | Sequence[int], settings: SamplingSettings | None = None, **sampling: Any
    ) -> Iterator[Delta]:
        """Yield what a prompt gives as it comes, as `stream` does, for a caller that may block."""
        chosen = SamplingSettings.of(settings, **sampling)
        arrived: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        ticket = self.submit(prompt, chosen, arrived.put)
        try:
            left = chosen.n
            while left:
                delta = arrived.get()
                _raise_if_failed(delta)
                yield delta
                left -= delta.finish_reason is not None
        finally:
            ticket.cancel()

    def stream(
        self, prompt: str | Sequence[int], settings: SamplingSettings | None = None, **sampling: Any
    ) -> AsyncIterator[Delta]:
        """Return an asynchronous iterator over what a prompt gives as it comes, the deltas of n choices mixed.

        Leaving the loop cancels the request. Raises UserError for what cannot be carried out, and while iterating
        TreadleError where the engine failed.
        """
        chosen = SamplingSettings.of(settings, **sampling)
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Delta] = asyncio.Queue()

        def deliver(delta: Delta) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, delta)

        ticket = self.submit(prompt, chosen, deliver)

        async def deltas() -> AsyncIterator[Delta]:
            try:
                left = chosen.n
                while left:
                    delta = await arrived.get()
                    _raise_if_failed(delta)
                    yield delta
                    left -= delta.finish_reason is not None
            finally:
                ticket.cancel()

        return deltas()

    @property
    def stats(self) -> EngineStats:
        """What was counted since the start."""
        return self._core.stats

    @property
    def failure(self) -> str:
        """Why the engine takes no requests any more, or ""."""
        return self._refusing

    def close(self, timeout: float = 0.0) -> None:
        """Refuse new requests, let those at hand finish for up to `timeout` seconds, end the rest."""
        with self._changed:
            self._refusing = self._refusing or "the engine is closing and takes no new requests"
            self._changed.wait_for(lambda: self._core.idle and not self._arrivals, timeout)
            self._stopping = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        atexit.unregister(self.close)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _resolve_max_tokens(self, prompt_tokens: int, settings: SamplingSettings) -> int:
        room = self.max_model_len - prompt_tokens
        if room < 1:
            raise UserError(
                f"the prompt has {prompt_tokens} tokens, but the context holds {self.max_model_len} with the answer; "
                "shorten it"
            )
        wanted = room if settings.max_tokens is None else settings.max_tokens
        if wanted > room:
            raise UserError(
                f"the prompt's {prompt_tokens} tokens and max_tokens={wanted} exceed the context of "
                f"{self.max_model_len} tokens; ask for at most {room}"
            )
        if settings.min_tokens > wanted:
            raise UserError(f"min_tokens={settings.min_tokens} is more than the {wanted} tokens that may be made")
        return wanted

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        vocabulary = self.model.spec.vocabulary
        for token in ids:
            if not 0 <= token < vocabulary:
                raise UserError(f"{name}: {token} is not a token id; they lie in 0 to {vocabulary - 1}")

    def _cancel(self, requests: list[Request]) -> None:
        with self._changed:
            for request in requests:
                if request.phase is not Phase.FINISHED:
                    request.cancelled = self._cancellations = True
            self._changed.notify_all()

    def _run(self, threads: int) -> None:
        """The engine's thread. It computes with as many threads as whoever started it."""
        torch.set_num_threads(threads)
        why = "the engine is closed; it takes no more requests"
        try:
            while self._collect():
                self._core.step()
        except BaseException as error:  # a defect of ours: whoever waits must hear of it
            why = f"the engine has failed and must be started again: {sentence(error)}"
        finally:
            with self._changed:
                self._refusing = why
                for request in self._arrivals:
                    self._core.add(request)
                self._arrivals.clear()
            self._core.fail_all(why)

    def _collect(self) -> bool:
        """Wait until there is something to do and take what was handed over. Returns False when it is time to end."""
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._stopping or self._cancellations or self._arrivals or not self._core.idle
            )
            for request in self._arrivals:
                self._core.add(request)
            self._arrivals.clear()
            self._cancellations = False
            stopping = self._stopping
        self._core.drop_cancelled()
        return not stopping


def _raise_if_failed(delta: Delta) -> None:
    if delta.error is not None:
        raise TreadleError(delta.error)
