"""Being asked to stop: SIGTERM and Ctrl-C let the step end and a checkpoint be saved; a second Ctrl-C ends at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Generator
from types import FrameType
from typing import Any

# Set for workers that a Treadle launcher started: it passes SIGTERM on, and Ctrl-C reaches them only through it.
LAUNCHED = "TREADLE_LAUNCHED"


class StopRequest:
    """Whether a signal asked this process to stop; `reason` is empty until then."""

    def __init__(self) -> None:
        self.reason = ""
        self.interrupts = 0

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self.interrupts += 1
            if self.interrupts > 1 and LAUNCHED not in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ:
                raise KeyboardInterrupt
            if not self.reason and sys.stderr.isatty():
                os.write(2, b"\nstopping after this step, with a checkpoint; Ctrl-C again ends at once\n")
        self.reason = self.reason or f"stopped by {'Ctrl-C' if number == signal.SIGINT else 'SIGTERM'}"


@contextlib.contextmanager
def listening() -> Generator[StopRequest]:
    """Listen for SIGTERM and SIGINT within the block; elsewhere than in the main thread nothing is listened for."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before: dict[int, Any] = {}
    numbers = (signal.SIGTERM, signal.SIGINT)
    try:
        for number in numbers:
            before[number] = signal.signal(
                number,
                signal.SIG_IGN if number == signal.SIGINT and LAUNCHED in os.environ else request._on_signal,
            )
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
