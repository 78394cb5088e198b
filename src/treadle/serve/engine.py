"""The engine in this process: requests in from any thread, tokens out, one background thread that runs step after step.

    with Engine("path/to/model", max_num_seqs=8) as engine:
        print(engine.generate(["Once upon a time"], max_tokens=32)[0])

An asynchronous caller iterates over `engine.stream(...)`; leaving the loop cancels the request.
"""

from __future__ import annotations

import atexit
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from pydantic import ByteSize, Field

from treadle.config import TreadleError, UserError, parse_settings
from treadle.serve.assembly import assemble
from treadle.serve.batching import BatchPolicy, BatchSettings
from treadle.serve.changes import Changes
from treadle.serve.commands import run_command
from treadle.serve.core import sentence
from treadle.serve.interface import EngineInterface, Prepared, Ticket, make_requests
from treadle.serve.model import Model, load
from treadle.serve.parallel_settings import ParallelSettings
from treadle.serve.probe import probe_kernels
from treadle.serve.request import Delta, Phase, Request
from treadle.serve.stats import EngineStats

# Without a step for so long while there is work, an engine counts as hanging. Long prompts on a slow machine take long.
HANG_SECONDS = 120.0


class EngineSettings(ParallelSettings):
    """What an engine is started with; the names are vLLM's. None means: as much as the memory allows."""

    max_num_seqs: int | None = Field(None, ge=1, le=4096)  # sequences that run at once
    max_model_len: int | None = Field(None, ge=1)  # tokens of the longest sequence, prompt and answer
    max_num_batched_tokens: int = Field(2048, ge=1)  # tokens that one step computes at most
    enable_chunked_prefill: bool = True  # prompts may be computed in pieces beside answers in progress
    enable_prefix_caching: bool = True  # a prompt that begins as an earlier one goes on from its blocks
    kv_cache_dtype: str = "auto"  # auto (the model's), float32, bf16, fp8, int8, int4
    kv_cache_memory: ByteSize | None = None  # bytes of all blocks, or a text such as 4GiB
    block_size: int = Field(16, ge=1, le=1024)  # tokens of a block
    batch: BatchSettings | None = None  # steps within a latency bound; None: as many as fit
    num_speculative_tokens: int = Field(0, ge=0, le=64)  # guesses by prompt lookup, checked beside the next token
    deterministic: bool = False  # the same bits whatever else is in the batch or the cache
    seed: int | None = None  # of the requests that have none of their own; None: a fresh one
    check_blocks: bool = False  # verify the cache's bookkeeping after every step
    weight_version: str = Field("", max_length=256)  # what answers name the weights by; empty: by their content
    enable_lora: bool = False  # set memory aside for adapters at the start
    lora_modules: Mapping[str, str] = Field(default_factory=dict)  # adapters to begin with: name -> PEFT directory
    max_loras: int = Field(8, ge=1, le=10000)  # adapters that are loaded at once
    max_lora_rank: int = Field(64, ge=1, le=4096)


class _Ticket(Ticket):
    def __init__(self, engine: Engine, requests: list[Request]) -> None:
        self._engine, self.requests = engine, requests
        self.prompt_tokens = requests[0].prompt_tokens

    def cancel(self) -> None:
        self._engine._cancel(self.requests)


class Engine(EngineInterface):
    """Serves one model to any number of threads. Close it, or use it in a `with` block."""

    def __init__(self, model: Model | str | Path, **settings: Any) -> None:
        """`settings` are those of EngineSettings. Raises UserError for wrong ones, or a cache that does not fit."""
        self.settings = parse_settings(EngineSettings, settings, source="the engine's settings")
        self._owns_model = not isinstance(model, Model)
        chosen = model if isinstance(model, Model) else load(model, **self.settings.ranks)
        if chosen.ranks is None and self.settings.plan.ranks() > 1:
            raise UserError(
                "a model that is loaded whole cannot be shared by ranks; give its path to the engine, or load it with "
                "tensor_parallel_size or pipeline_parallel_size"
            )
        self._core, self.capacity = assemble(chosen, self.settings)
        self.changes = Changes(self, self._core)
        super().__init__(chosen.tokenizer, chosen.spec, self.capacity.length)
        self._seeds = random.Random(self.settings.seed)  # noqa: S311 - sampling, not secrets
        # Guards what other threads hand over: arrivals, cancellations, calls, closing.
        self._changed = threading.Condition()
        self._arrivals: deque[Request] = deque()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._cancellations = False
        self._refusing = ""
        self._stopping = False
        self._busy_since: float | None = None
        self.ended = False  # nothing more will come
        self._failure: TreadleError | None = None  # told from outside, such as the loss of a rank
        self.after_step: Callable[[], None] = lambda: None  # called in the engine's thread
        threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, args=(threads,), name="treadle-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        if chosen.ranks is not None:
            chosen.ranks.on_lost = self.fail
            if chosen.ranks.error is not None:  # it was lost before there was anyone to tell
                self.fail(chosen.ranks.error)
        try:
            for name, path in self.settings.lora_modules.items():
                self.command("add_adapter", name=name, path=path)
        except BaseException:
            self.close()
            raise

    @property
    def model(self) -> Model:
        """The model with the weights that new requests get."""
        return self._core.model

    def fail(self, error: TreadleError) -> None:
        """End the engine with an error, which every request gets. Called from any thread."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def hand_over(self, prepared: Prepared, deliver: Callable[[Delta], None]) -> Ticket:
        """Queue what was prepared. Raises TreadleError once the engine is closing or has failed."""
        # This may take a while: not in the engine's thread, and under no lock.
        matcher = self.matcher(prepared.settings, checked=True)
        with self._changed:
            if self._refusing:
                raise TreadleError(self._refusing)
            requests = make_requests(prepared, self._seeds.getrandbits(64), deliver)
            for request in requests:
                request.matcher = None if matcher is None else matcher.clone()
            self._core.admit(requests)
            self._arrivals.extend(requests)
            self._changed.notify_all()
        return _Ticket(self, requests)

    def command(self, name: str, /, **arguments: Any) -> Any:
        """Carry out a command (see commands.py) and return its result. Blocks. Raises UserError, TreadleError."""
        return run_command(self, self._core, name, arguments)

    def call(self, work: Callable[[], Any]) -> Any:
        """Run `work` in the engine's thread, between two steps, and return what it returns or raise what it raises."""
        done: Future[Any] = Future()
        with self._changed:
            if self._refusing:
                raise TreadleError(self._refusing)
            self._calls.append((work, done))
            self._changed.notify_all()
        return done.result()

    def probe_kernels(self) -> dict[str, str]:
        """Return for each operator the kernels that serve the model. Only before the first request."""
        core = self._core
        return self.call(lambda: probe_kernels(core.runner, core.tables.groups, self.capacity))

    def wait_idle(self) -> None:
        """Wait until no request is at hand. Raises TreadleError where the engine ends meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: self._refusing or (self._core.idle and not self._arrivals))
            if self._refusing:
                raise TreadleError(self._refusing)

    @property
    def stats(self) -> EngineStats:
        """What was counted since the start."""
        return self._core.stats

    @property
    def weight_version(self) -> str:
        """The name of the weights that new requests get."""
        return self._core.versions.current.name

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the LoRA adapters that requests may ask for."""
        return tuple(self._core.versions.adapters)

    @property
    def asleep(self) -> str:
        """Why requests are refused while it sleeps, or ""."""
        return self._core.versions.refusing

    @property
    def policy(self) -> BatchPolicy:
        """How it batches, and what that has learned."""
        return self._core.policy

    @property
    def pending(self) -> int:
        """How many requests were handed over but not seen by the engine's thread yet."""
        return len(self._arrivals)

    @property
    def failure(self) -> str:
        """Why the engine takes no requests any more, or ""."""
        return self._refusing

    @property
    def unhealthy(self) -> str:
        """Why the engine makes no steps although it should, or ""."""
        since = self._busy_since
        if self._refusing:
            return self._refusing
        if since is not None and time.monotonic() - since > HANG_SECONDS:
            return f"the engine has been in one step for {time.monotonic() - since:.0f} s"
        return ""

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
                if not self._core.wait_seconds():  # a command does not end the wait for company
                    self._core.step()
                self.after_step()
        except TreadleError as error:
            why = str(error)
        except BaseException as error:  # a defect of ours: whoever waits must hear of it
            why = f"the engine has failed and must be started again: {sentence(error)}"
        finally:
            with self._changed:
                self._refusing = why
                for request in self._arrivals:
                    self._core.add(request)
                self._arrivals.clear()
                for _, done in self._calls:
                    done.set_exception(TreadleError(why))
                self._calls.clear()
            self._core.fail_all(why)
            self._core.close()
            if self._owns_model:
                self.model.close()
            self.ended = True
            self.after_step()

    def _collect(self) -> bool:
        """Wait until there is something to do and take what was handed over. Returns False when it is time to end."""
        with self._changed:
            self._busy_since = None
            while True:
                self._changed.notify_all()
                if self._failure is not None:
                    raise self._failure
                waiting = self._changed.wait_for(self._something_to_do, self._core.wait_seconds() or None)
                for request in self._arrivals:
                    self._core.add(request)
                self._arrivals.clear()
                if self._failure is not None:
                    raise self._failure
                if not waiting or self._stopping or self._cancellations or self._calls or not self._core.wait_seconds():
                    break
            self._cancellations = False
            calls = list(self._calls)
            self._calls.clear()
            stopping = self._stopping
            self._busy_since = time.monotonic()
        self._core.drop_cancelled()
        for work, done in calls:
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)
        return not stopping

    def _something_to_do(self) -> bool:
        if self._failure or self._stopping or self._cancellations or self._arrivals or self._calls:
            return True
        return not self._core.idle and not self._core.wait_seconds()
