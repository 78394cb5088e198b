"""Being asked to stop: SIGTERM, Ctrl-C and SIGHUP let the step end and a checkpoint be saved.

A second Ctrl-C ends at once. SIGHUP comes when the terminal is closed; where it is ignored (nohup), it stays so.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Generator, Iterable
from types import FrameType
from typing import Any

# Set for workers that a Treadle launcher started, which passes signals on and knows when to end them.
LAUNCHED = "TREADLE_LAUNCHED"


NAMES: dict[int, str] = {
    signal.SIGTERM: "SIGTERM",
    signal.SIGINT: "Ctrl-C",
    signal.SIGHUP: "SIGHUP (the terminal was closed)",
}


def heard() -> list[int]:
    """Return the signals that ask a run to stop: those of NAMES, without SIGHUP where it is ignored."""
    return [number for number in NAMES if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


def terminals() -> list[int]:
    """Return which of the descriptors of this process's output are a terminal."""
    return [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]


def silence(descriptors: Iterable[int]) -> None:
    """Send what goes to these descriptors nowhere: whoever read it is gone, and writing would fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


class StopRequest:
    """Whether a signal asked this process to stop; `reason` is empty until then."""

    def __init__(self) -> None:
        self.reason = ""
        self.interrupts = 0
        self.terminals = terminals()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self.interrupts += 1
            # Of several ranks the launcher ends all; what it passes on may arrive more than once.
            if self.interrupts > 1 and LAUNCHED not in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ:
                raise KeyboardInterrupt
        if number == signal.SIGHUP:
            silence(self.terminals)
        # A launcher passes on SIGTERM, and then what it really was.
        if number != signal.SIGTERM or not self.reason:
            self.reason = f"stopped by {NAMES[number]}"

    @property
    def notice(self) -> str:
        """What a person is told meanwhile; empty until there is something to tell."""
        return "stopping after this step, with a checkpoint; Ctrl-C again ends at once" if self.reason else ""


@contextlib.contextmanager
def listening() -> Generator[StopRequest]:
    """Listen for SIGTERM and SIGINT within the block; elsewhere than in the main thread nothing is listened for."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before: dict[int, Any] = {}
    try:
        for number in heard():
            before[number] = signal.signal(number, request._on_signal)
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
