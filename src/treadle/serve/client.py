"""Engines in processes of their own, seen from the server: one for each data-parallel replica.

What cannot be carried out is refused here, before it travels. A replica that dies ends them all: the requests at hand
get an error, and `failure` says which one it was and how it ended.
"""

from __future__ import annotations

import itertools
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, fields, replace
from typing import Any

from treadle.config import TreadleError, UserError
from treadle.serve import messages
from treadle.serve.capacity import Capacity
from treadle.serve.channel import Channel
from treadle.serve.commands import COMMANDS, WeightsArguments, check_command
from treadle.serve.interface import EngineInterface, Prepared, Ticket
from treadle.serve.request import Delta, FinishReason
from treadle.serve.router import Memory, Replica, choose_replica, prefix_digests
from treadle.serve.stats import Distribution, EngineStats
from treadle.serve.versions import ASLEEP, FALLING_ASLEEP, Unavailable

PING_EVERY = 1.0  # seconds
SILENCE = 5.0  # seconds without an answer after which a process counts as frozen
END_SECONDS = 10.0  # that a process gets to end once it was told to


@dataclass(frozen=True)
class EngineOptions:
    """What engine processes are started with."""

    model: str
    dtype: str = "auto"
    device: str | None = None
    settings: dict[str, Any] | None = None
    replicas: int = 1


class _Sent:
    """A prompt on its way."""

    def __init__(self, prepared: Prepared, deliver: Callable[[Delta], None], replica: _Process) -> None:
        self.prepared, self.deliver, self.replica = prepared, deliver, replica
        self.open = set(range(prepared.settings.n))  # choices that have not ended
        self.started = False


class _Ticket(Ticket):
    def __init__(self, client: EngineClient, number: int, prompt_tokens: int) -> None:
        self._client, self._number, self.prompt_tokens = client, number, prompt_tokens

    def cancel(self) -> None:
        self._client._cancel(self._number)


class _Process:
    """One engine process and what is known of it."""

    def __init__(self, index: int, options: EngineOptions, threads: int) -> None:
        self.index = index
        self.stats = EngineStats()
        self.unhealthy = ""
        self.heard = time.monotonic()
        self.memory = Memory()
        self.failed = ""  # why it ended, in its own words
        self.pending = 0  # prompt tokens sent whose answer has not begun
        self.ready: Future[messages.Ready] = Future()
        here, there = socket.socketpair()
        command = [sys.executable, "-m", "treadle.serve.engine_process", str(there.fileno())]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=[there.fileno()])
        there.close()
        self.channel = Channel(here)
        # Sending waits while a frozen process does not read; the server's event loop must not.
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(target=self._send_all, name=f"treadle-to-engine-{index}", daemon=True).start()
        self.send(messages.Start(options.model, options.dtype, options.device, options.settings or {}, threads))

    @property
    def name(self) -> str:
        return f"engine process {self.index} (pid {self.process.pid})"

    def send(self, message: messages.ToEngine) -> None:
        self._outbox.put(messages.encode(message))

    def _send_all(self) -> None:
        while (frame := self._outbox.get()) is not None:
            try:
                self.channel.send(frame)
            except OSError:
                return  # it is gone, which whoever receives will notice

    def how_it_ended(self) -> str:
        """Return in words how the process ended."""
        try:
            code = self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return "cut its connection"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def end(self) -> None:
        """Make sure that the process is gone."""
        self._outbox.put(None)
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.channel.close()


class EngineClient(EngineInterface):
    """Serves one model through engine processes. Close it, or use it in a `with` block."""

    capacity: Capacity

    def __init__(
        self,
        options: EngineOptions,
        on_failure: Callable[[str], None] = lambda why: None,
    ) -> None:
        """Start the processes and wait until their models are loaded. Raises what the first one failed of."""
        from treadle.model.families import read_spec
        from treadle.weights.checkpoint import open_checkpoint
        from treadle.weights.load import load_tokenizer

        self._numbers = itertools.count(1)
        self._sent: dict[int, _Sent] = {}
        self._commands: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._refusing = ""
        self._closing = False
        self.on_failure = on_failure
        threads = 0 if options.replicas == 1 else max(1, (os.cpu_count() or 1) // options.replicas)
        self._replicas = [_Process(index, options, threads) for index in range(options.replicas)]
        for replica in self._replicas:
            threading.Thread(
                target=self._receive, args=(replica,), name=f"treadle-from-engine-{replica.index}", daemon=True
            ).start()
        try:
            # While they load their models, this process reads the tokenizer.
            checkpoint = open_checkpoint(options.model)
            spec = read_spec(checkpoint.config)
            tokenizer = load_tokenizer(checkpoint, spec.vocabulary)
            ready = [replica.ready.result() for replica in self._replicas]
        except BaseException:
            self._closing = True
            for replica in self._replicas:
                replica.process.kill()
                replica.end()
            raise
        self.capacity, self.summary = ready[0].capacity, ready[0].summary
        self._version, self._adapters, self._asleep = ready[0].weight_version, tuple(ready[0].adapters), ""
        super().__init__(tokenizer, spec, self.capacity.length)
        self._ended = threading.Event()
        self._pinging = threading.Thread(target=self._ping, name="treadle-ping", daemon=True)
        self._pinging.start()

    # --- EngineInterface

    @property
    def stats(self) -> EngineStats:
        """The sums over all replicas."""
        if len(self._replicas) == 1:
            return self._replicas[0].stats
        total = EngineStats()
        for replica in self._replicas:
            total = _sum(total, replica.stats)
        return total

    @property
    def engine_stats(self) -> list[EngineStats]:
        """Those of each replica."""
        return [replica.stats for replica in self._replicas]

    @property
    def closing(self) -> bool:
        """Whether it was told to end."""
        return self._closing

    @property
    def pids(self) -> list[int]:
        """The processes' numbers, replica after replica."""
        return [replica.process.pid for replica in self._replicas]

    @property
    def weight_version(self) -> str:
        """The name of the weights that new requests get."""
        return self._version

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the LoRA adapters that requests may ask for."""
        return self._adapters

    @property
    def asleep(self) -> str:
        """Why requests are refused while the engines sleep, or ""."""
        return self._asleep

    @property
    def pending(self) -> int:
        """How many prompts were sent whose answer has not begun."""
        return sum(not sent.started for sent in list(self._sent.values()))

    @property
    def failure(self) -> str:
        """Why no requests are taken any more, or ""."""
        return self._refusing

    @property
    def unhealthy(self) -> str:
        """Why a replica makes no steps although it should, or ""."""
        if self._refusing:
            return self._refusing
        for replica in self._replicas:
            silent = time.monotonic() - replica.heard
            if silent > SILENCE:
                return f"{replica.name} has not answered for {silent:.0f} s"
            if replica.unhealthy:
                return f"{replica.name}: {replica.unhealthy}"
        return ""

    def hand_over(self, prepared: Prepared, deliver: Callable[[Delta], None]) -> Ticket:
        """Send a prompt to a replica. Raises TreadleError once the engines are closing or one has failed."""
        count = len(prepared.tokens)
        with self._lock:
            if self._refusing:
                raise TreadleError(self._refusing)
            if self._asleep:
                raise Unavailable(self._asleep)
            replica = self._choose(prepared)
            number = next(self._numbers)
            self._sent[number] = _Sent(prepared, deliver, replica)
            replica.pending += count
        settings = prepared.settings.model_dump(mode="json", exclude_unset=True)
        replica.send(
            messages.Submit(
                number, prepared.tokens, settings, prepared.max_tokens, list(prepared.stop_ids), prepared.embeds
            )
        )
        return _Ticket(self, number, count)

    def command(self, name: str, /, **arguments: Any) -> Any:
        """Carry out a command on every replica; returns the first one's result. Raises UserError, TreadleError.

        Where it fails on some of several replicas, it is undone on the others.
        """
        checked = check_command(name, arguments)
        if name == "load_weights" and len(self._replicas) > 1:  # none switches before all have loaded
            stage = WeightsArguments.model_fields.keys()
            self.command("stage_weights", **checked.model_dump(include=set(stage)))
            return self.command("switch_weights", **checked.model_dump(exclude=set(stage)))
        before = self._asleep
        if name == "sleep":
            self._asleep = self._asleep or FALLING_ASLEEP
        done = self._ask_all(name, arguments)
        failed = [one for one in done if one.exception() is not None]
        if not failed:
            result = done[0].result()
            self._note(result)
            return result
        if name == "sleep":
            self._asleep = before
        way_back = COMMANDS[name].undo
        if way_back is not None and len(failed) < len(done):
            undo, names = way_back
            well = [replica for replica, one in zip(self._replicas, done, strict=True) if one.exception() is None]
            self._ask_all(undo, {key: arguments[key] for key in names}, well)
        return failed[0].result()

    def _ask_all(
        self, name: str, arguments: dict[str, Any], replicas: Sequence[_Process] | None = None
    ) -> list[Future[Any]]:
        """Carry out a command on the replicas, all by default, and return what came of it on each, once it has."""
        asked: list[Future[Any]] = []
        with self._lock:
            if self._refusing:
                raise TreadleError(self._refusing)
            for replica in self._replicas if replicas is None else replicas:
                number = next(self._numbers)
                self._commands[number] = done = Future()
                asked.append(done)
                replica.send(messages.Command(number, name, arguments))
        wait(asked)
        return asked

    def _note(self, result: Any) -> None:
        """Keep what a command's result says of what requests get now."""
        if isinstance(result, dict) and "weight_version" in result:
            self._version, self._adapters = result["weight_version"], tuple(result["adapters"])
            self._asleep = ASLEEP if result["asleep"] else ""

    def close(self, timeout: float = 0.0) -> None:
        """Refuse new requests, let those at hand finish for up to `timeout` seconds, end the rest and the processes."""
        with self._lock:
            again, self._closing = self._closing, True
            self._refusing = self._refusing or "the engine is closing and takes no new requests"
        for replica in self._replicas:
            replica.send(messages.Close(timeout))
        if again:
            return
        deadline = time.monotonic() + timeout + END_SECONDS
        for replica in self._replicas:
            try:
                replica.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                replica.process.kill()
            replica.end()
        self._ended.set()
        self._pinging.join()
        self._fail_all("the engine is closed; it takes no more requests")

    # --- within

    def _choose(self, prepared: Prepared) -> _Process:
        if len(self._replicas) == 1:
            return self._replicas[0]
        settings = prepared.settings
        digests = prefix_digests(prepared.tokens, f"{settings.adapter}\0{settings.cache_salt}")
        states = [
            Replica(replica.memory.seen(digests), replica.pending + replica.stats.running * 8)
            for replica in self._replicas
        ]
        index, _ = choose_replica(len(prepared.tokens), states)
        self._replicas[index].memory.note(digests)
        return self._replicas[index]

    def _cancel(self, number: int) -> None:
        sent = self._sent.get(number)
        if sent is not None:
            sent.replica.send(messages.Cancel(number))

    def _receive(self, replica: _Process) -> None:
        """Take what a process sends until it ends."""
        while (frame := replica.channel.receive()) is not None:
            replica.heard = time.monotonic()
            self._take(replica, messages.decode_from_engine(frame))
        how = replica.failed or replica.how_it_ended()
        if self._closing:
            self._fail_all("the engine is closed; it takes no more requests")
            return
        why = f"{replica.name}: {how}"
        if not replica.ready.done():
            replica.ready.set_exception(TreadleError(f"{why} before its model was loaded"))
            return
        self._fail_all(why)
        self.on_failure(why)

    def _take(self, replica: _Process, message: messages.FromEngine) -> None:
        if isinstance(message, messages.Deltas):
            if message.stats is not None:
                replica.stats = message.stats
            for number, delta in message.deltas:
                self._deliver(number, delta)
        elif isinstance(message, messages.Pong):
            replica.stats, replica.unhealthy = message.stats, message.unhealthy
        elif isinstance(message, messages.Result):
            self._answer(message)
        elif isinstance(message, messages.Ready):
            replica.ready.set_result(message)
        elif replica.ready.done():
            replica.failed = message.why
        else:
            error = UserError if message.users_mistake else TreadleError
            replica.ready.set_exception(error(message.why))

    def _answer(self, message: messages.Result) -> None:
        error = None
        if message.error:
            error = (UserError if message.users_mistake else TreadleError)(message.error)
        done = self._commands.pop(message.number, None)
        if done is None:  # a prompt that the engine refused
            sent = self._sent.get(message.number)
            for index in sorted(sent.open) if sent is not None else ():
                self._deliver(message.number, Delta(index, finish_reason=FinishReason.ERROR, error=message.error))
        elif error is not None:
            done.set_exception(error)
        else:
            done.set_result(message.value)

    def _deliver(self, number: int, delta: Delta) -> None:
        sent = self._sent.get(number)
        if sent is None:
            return
        if not sent.started:
            sent.started = True
            sent.replica.pending -= len(sent.prepared.tokens)
        if delta.finish_reason is not None:
            sent.open.discard(delta.index)
            if not sent.open:
                del self._sent[number]
        try:
            sent.deliver(delta)
        except Exception:  # whoever asked has gone, with its event loop
            self._cancel(number)

    def _fail_all(self, why: str) -> None:
        """End everything at hand with an error, and take nothing more."""
        with self._lock:
            if not self._closing:
                self._refusing = why
            numbers = list(self._sent)
            commands = list(self._commands.values())
            self._commands.clear()
        for number in numbers:
            sent = self._sent.get(number)
            for index in sorted(sent.open) if sent is not None else ():
                self._deliver(number, Delta(index, finish_reason=FinishReason.ERROR, error=why))
        for done in commands:
            done.set_exception(TreadleError(why))

    def _ping(self) -> None:
        while not self._ended.wait(PING_EVERY):
            for replica in self._replicas:
                replica.send(messages.Ping())


def _sum(a: EngineStats, b: EngineStats) -> EngineStats:
    """Return the sum of the counters; of what is no counter, b's."""
    changes: dict[str, Any] = {}
    for one in fields(EngineStats):
        x, y = getattr(a, one.name), getattr(b, one.name)
        if isinstance(y, dict):
            changes[one.name] = {key: x.get(key, 0) + y.get(key, 0) for key in x.keys() | y.keys()}
        elif isinstance(y, Distribution):
            changes[one.name] = x.plus(y)
        elif isinstance(y, (str, bool)) or one.name == "stepped":
            changes[one.name] = y
        else:
            changes[one.name] = x + y
    return replace(b, **changes)
