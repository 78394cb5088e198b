"""Being asked to stop: SIGTERM and Ctrl-C let the step end and a checkpoint be saved; a second Ctrl-C ends at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Generator
from types import FrameType
from typing import Any

# Set for workers that a Treadle launcher started, which passes signals on and knows when to end them.
LAUNCHED = "TREADLE_LAUNCHED"


class StopRequest:
    """Whether a signal asked this process to stop; `reason` is empty until then."""

    def __init__(self) -> None:
        self.reason = ""
        self.interrupts = 0

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self.interrupts += 1
            # Of several ranks the launcher ends all; what it passes on may arrive more than once.
            if self.interrupts > 1 and LAUNCHED not in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ:
                raise KeyboardInterrupt
            self.reason = "stopped by Ctrl-C"
        self.reason = self.reason or "stopped by SIGTERM"

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
    numbers = (signal.SIGTERM, signal.SIGINT)
    try:
        for number in numbers:
            before[number] = signal.signal(number, request._on_signal)
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
