"""An engine in a process of its own: a busy loop that no web server slows down, and that may hang or die alone.

Started by client.py as `python -m treadle.serve.engine_process FD`, FD being one end of a pair of sockets, over which
the messages of messages.py go.
"""

from __future__ import annotations

import ctypes
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING

from treadle.config import TreadleError, UserError, parse_settings
from treadle.serve import messages
from treadle.serve.channel import Channel
from treadle.serve.interface import Prepared, Ticket
from treadle.serve.request import Delta, SamplingSettings

if TYPE_CHECKING:
    from treadle.serve.engine import Engine

STATS_EVERY = 0.1  # seconds


class EngineProcess:
    """The loop: one thread receives; the engine's own thread and those of commands send."""

    engine: Engine

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._tickets: dict[int, Ticket] = {}
        self._left: dict[int, int] = {}  # choices of each prompt that are not finished
        self._deltas: list[tuple[int, Delta]] = []
        self._told = 0.0
        self._asked_to_close = False

    def run(self) -> int:
        """Serve until told to close, or until the server is gone. Returns the exit code."""
        first = self._channel.receive()
        if first is None:
            return 0
        try:
            self._load(messages.decode_to_engine(first))
        except TreadleError as error:
            self._send(messages.Failed(str(error), isinstance(error, UserError)))
            return error.exit_code
        with self.engine:
            while (frame := self._channel.receive()) is not None:
                self._handle(messages.decode_to_engine(frame))
            return int(self.engine.ended and not self._asked_to_close)

    def _load(self, start: messages.ToEngine) -> None:
        import torch

        from treadle.serve.engine import Engine, EngineSettings
        from treadle.serve.model import load
        from treadle.serve.summary import engine_summary

        assert isinstance(start, messages.Start)
        if start.threads:
            torch.set_num_threads(start.threads)
        ranks = parse_settings(EngineSettings, start.settings, source="the engine's settings").ranks
        engine = Engine(load(start.model, start.dtype, start.device, **ranks), **start.settings)
        state = engine.weight_version, list(engine.adapters)
        self._send(messages.Ready(engine.capacity, engine_summary(engine), *state))
        self.engine = engine
        engine.after_step = self._flush

    def _handle(self, message: messages.ToEngine) -> None:
        if isinstance(message, messages.Submit):
            self._submit(message)
        elif isinstance(message, messages.Cancel):
            ticket = self._tickets.get(message.number)
            if ticket is not None:
                ticket.cancel()
        elif isinstance(message, messages.Ping):
            self._send(messages.Pong(self.engine.stats, self.engine.unhealthy))
        elif isinstance(message, messages.Command):
            # Reading weights takes long: the loop goes on meanwhile.
            threading.Thread(target=self._command, args=(message,), daemon=True).start()
        elif isinstance(message, messages.Close):
            threading.Thread(target=self._close, args=(message.timeout,), daemon=True).start()

    def _submit(self, message: messages.Submit) -> None:
        number = message.number
        settings = parse_settings(SamplingSettings, message.settings, source="the sampling settings")
        prepared = Prepared(message.tokens, settings, message.max_tokens, frozenset(message.stop_ids), message.embeds)
        self._left[number] = settings.n

        def deliver(delta: Delta) -> None:
            self._deltas.append((number, delta))
            if delta.finish_reason is not None:
                self._left[number] -= 1
                if not self._left[number]:
                    del self._left[number]
                    self._tickets.pop(number, None)

        try:
            ticket = self.engine.hand_over(prepared, deliver)
        except TreadleError as error:
            self._left.pop(number, None)
            self._send(messages.Result(number, error=str(error), users_mistake=isinstance(error, UserError)))
            return
        self._tickets[number] = ticket
        if number not in self._left:  # the engine was faster
            self._tickets.pop(number, None)

    def _command(self, message: messages.Command) -> None:
        try:
            result = messages.Result(message.number, self.engine.command(message.name, **message.arguments))
        except TreadleError as error:
            result = messages.Result(message.number, error=str(error), users_mistake=isinstance(error, UserError))
        except Exception as error:
            result = messages.Result(message.number, error=f"{message.name} failed: {type(error).__name__}: {error}")
        self._send(result)

    def _close(self, timeout: float) -> None:
        self._asked_to_close = True
        self.engine.close(timeout)

    def _flush(self) -> None:
        """Send what the last step brought. Called in the engine's thread after every step."""
        deltas, self._deltas = self._deltas, []
        now = time.monotonic()
        stats = None
        if now - self._told > STATS_EVERY:
            stats, self._told = self.engine.stats, now
        if deltas or stats is not None:
            self._send(messages.Deltas(deltas, stats))
        if self.engine.ended:
            self._send(messages.Failed(self.engine.failure, False))
            self._channel.stop_receiving()

    def _send(self, message: messages.FromEngine) -> None:
        try:
            self._channel.send(messages.encode(message))
        except OSError:
            self._channel.stop_receiving()  # the server is gone: nobody is left to serve


def main() -> int:
    """Run the process whose end of the channel is the only argument."""
    # Ctrl-C reaches every process of a terminal; the server tells this one when to end, and it ends with the server.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    return EngineProcess(Channel(socket.socket(fileno=int(sys.argv[1])))).run()


if __name__ == "__main__":
    sys.exit(main())
