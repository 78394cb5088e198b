"""Progress that a person sees on stderr: a live bar on a terminal, a line now and then in a log.

    with progress("Loading weights", total=n_bytes, unit="B") as step:
        step(chunk)          # advance
        step(0, "shard 3")   # change the note

Nothing is shown for work that ends within `after` seconds.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Generator
from typing import Protocol


class Step(Protocol):
    """Advance the bar by `amount` (in the bar's unit) and set the note shown beside it."""

    def __call__(self, amount: float = 1.0, note: str = "") -> None: ...


@contextlib.contextmanager
def progress(
    title: str, total: float | None, unit: str = "", after: float = 1.0, every: float = 10.0, alive: bool = False
) -> Generator[Step]:
    """Show progress of something of `total` units (None: unknown) once it has run for `after` seconds.

    Without a terminal a line is printed each `every` seconds. Other ranks than 0 stay silent. `alive` shows it also
    while `step` is not called for long, with the time that has passed.
    """
    import os

    if os.environ.get("RANK", "0") != "0":
        yield lambda amount=1.0, note="": None
        return
    display = _Bar(title, total, unit) if sys.stderr.isatty() else _Lines(title, total, unit, every)
    started, done, lock, ended = time.monotonic(), 0.0, threading.Lock(), threading.Event()

    def step(amount: float = 1.0, note: str = "") -> None:
        nonlocal done
        with lock:
            done += amount
            elapsed = time.monotonic() - started
            if elapsed >= after:
                display.show(done, note or (f"{elapsed:.0f} s" if alive else ""), elapsed)

    def tick() -> None:
        while not ended.wait(min(after, 1.0)):
            step(0)

    ticking = threading.Thread(target=tick, name="treadle-progress", daemon=True)
    if alive:
        ticking.start()
    try:
        yield step
    finally:
        ended.set()
        if alive:
            ticking.join()
        display.close()


def amount_text(value: float, unit: str) -> str:
    """Return `value` with its unit in a form for reading: bytes as MiB or GiB, other large numbers with k, M, G."""
    if unit == "B":
        for name in ("B", "KiB", "MiB", "GiB"):
            if value < 1024 or name == "GiB":
                return f"{value:.0f} {name}" if name == "B" else f"{value:.1f} {name}"
            value /= 1024
    for name in ("", "k", "M", "G"):
        if abs(value) < 1000 or name == "G":
            number = f"{value:.0f}" if name == "" and value == int(value) else f"{value:.1f}"
            return f"{number}{name}{' ' + unit if unit else ''}"
        value /= 1000
    raise AssertionError("unreachable")


class _Bar:
    def __init__(self, title: str, total: float | None, unit: str) -> None:
        self.title, self.total, self.unit = title, total, unit
        self.bar = None

    def show(self, done: float, note: str, elapsed: float) -> None:
        if self.bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self.bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[note]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self.bar.start()
            self.task = self.bar.add_task(self.title, total=self.total, note="")
        text = amount_text(done, self.unit)
        if self.total:
            text += f" of {amount_text(self.total, self.unit)}"
        text += f", {amount_text(done / max(elapsed, 1e-9), self.unit)}/s" + (f", {note}" if note else "")
        self.bar.update(self.task, completed=done, note=text)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()


class _Lines:
    def __init__(self, title: str, total: float | None, unit: str, every: float) -> None:
        self.title, self.total, self.unit, self.every = title, total, unit, every
        self.last: float | None = None

    def show(self, done: float, note: str, elapsed: float) -> None:
        if self.last is not None and elapsed - self.last < self.every:
            return
        self.last = elapsed
        share = f" ({100 * done / self.total:.0f}%)" if self.total else ""
        print(
            f"{self.title}: {amount_text(done, self.unit)}{share}{', ' + note if note else ''}",
            file=sys.stderr,
            flush=True,
        )

    def close(self) -> None:
        pass
