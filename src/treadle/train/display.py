"""What a person sees of a run: a live panel on a terminal, a line now and then in a log, the curve at the end."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any

from treadle.config.progress import amount_text
from treadle.train.curve import sparkline, terminal_curve
from treadle.train.signals import silence

MOST_POINTS = 20_000


def duration(seconds: float) -> str:
    """Return a time for reading: 42 s, 3 min 20 s, 5 h 10 min."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{int(seconds) // 60} min {int(seconds) % 60} s"
    return f"{int(seconds) // 3600} h {int(seconds) % 3600 // 60} min"


class Display:
    """Shows a run on stderr. `every` is the time in seconds between two lines where there is no terminal."""

    def __init__(
        self,
        total_steps: int,
        every: float = 5.0,
        live: bool | None = None,
        notice: Callable[[], str] = lambda: "",
    ) -> None:
        """`notice` is asked for what is to stand out in the panel, such as that the run is about to stop."""
        self.total, self.every, self.notice = total_steps, every, notice
        self.shown = 0.0
        self.losses: list[tuple[float, float]] = []
        self.validation: list[tuple[float, float]] = []
        self.record: Mapping[str, Any] = {}
        self.now = ""
        self.panel = _Panel(self) if (sys.stderr.isatty() if live is None else live) else None

    def remember(self, record: Mapping[str, Any]) -> None:
        """Take a record of an earlier session into the curves."""
        if record.get("loss") is not None:
            self._add(record["step"], record["loss"])
        if record.get("validation_loss") is not None:
            self.validation.append((record["step"], record["validation_loss"]))

    def _add(self, step: int, loss: float) -> None:
        """Add a point to the curve; of very long runs each two points become one now and then."""
        self.losses.append((step, loss))
        if len(self.losses) > MOST_POINTS:
            pairs = zip(self.losses[::2], self.losses[1::2], strict=False)
            self.losses = [(b[0], (a[1] + b[1]) / 2) for a, b in pairs]

    def forget_after(self, step: int) -> None:
        """Take what came after `step` out of the curves."""
        self.losses = [point for point in self.losses if point[0] <= step]
        self.validation = [point for point in self.validation if point[0] <= step]

    def say(self, text: str) -> None:
        """Print a line that stays."""
        with self._to_whom_it_concerns():
            if self.panel is not None:
                self.panel.print(text)
            else:
                print(text, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def _to_whom_it_concerns(self) -> Generator[None]:
        """A terminal that was closed, or the reader of a pipe that has ended, is no reason to end the run."""
        try:
            yield
        except OSError:
            self.panel = None
            silence([2])

    def step(self, step: int, record: Mapping[str, Any]) -> None:
        """Show what a step measured."""
        self.record = {**record, "step": step}
        self._add(step, record["loss"])
        self.now = ""
        if self.panel is None and (
            time.monotonic() - self.shown >= self.every or step == self.total or len(self.losses) == 1
        ):
            self.shown = time.monotonic()
            self.say(self.line())

    def doing(self, what: str) -> None:
        """Show what happens between two steps."""
        self.now = what

    def evaluated(self, step: int, record: Mapping[str, Any]) -> None:
        """Show a validation loss."""
        self.validation.append((step, record["validation_loss"]))
        bits = f", {record['validation_bits_per_byte']:.3f} bits a byte" if "validation_bits_per_byte" in record else ""
        self.say(
            f"step {step}: validation loss {record['validation_loss']:.4f}, "
            f"perplexity {record['validation_perplexity']:.2f}{bits}"
        )

    def line(self) -> str:
        """Return the newest record as one line."""
        record = self.record
        parts = [f"step {record['step']}/{self.total}", f"loss {record['loss']:.4f}", *self.figures()]
        return " · ".join(parts)

    def figures(self) -> list[str]:
        """Return speed, norm, rate, memory and time left, each in words."""
        record = self.record
        speed = f"{amount_text(record['tokens_per_second'], '')} tokens/s"
        if record.get("peak_share"):
            speed += f" ({100 * record['peak_share']:.0f}% of peak)"
        parts = [
            speed,
            f"norm {record['gradient_norm']:.3g}",
            f"rate {record['learning_rate']:.3g}",
            amount_text(record["memory_bytes"], "B"),
        ]
        if record.get("seconds_left") is not None:
            parts.append(f"{duration(record['seconds_left'])} left")
        return parts

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self.panel is not None:
            with self._to_whom_it_concerns():
                self.panel.close()
            self.panel = None

    def finish(self, lines: list[str]) -> None:
        """Draw the whole curve, and print `lines` below it."""
        self.close()
        width = min(72, shutil.get_terminal_size().columns - 14)
        curve = terminal_curve(self.losses, width) if width >= 20 else []
        with self._to_whom_it_concerns():
            print("\n".join([*curve, *lines]), file=sys.stderr, flush=True)


class _Panel:
    """A bar, the figures and the curve so far, redrawn in place."""

    def __init__(self, display: Display) -> None:
        from rich.console import Console
        from rich.live import Live

        self.display = display
        self.console = Console(stderr=True, highlight=False)
        self.live = Live(console=self.console, refresh_per_second=4, transient=True, get_renderable=self.render)
        self.live.start()

    def render(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        display, record = self.display, self.display.record
        notice = [Text(display.notice(), style="bold yellow")] if display.notice() else []
        if not record:
            return Group(Text("the first step ...", style="dim"), *notice)
        head = Table.grid(padding=(0, 1))
        head.add_row(
            Text(f"step {record['step']}/{display.total}", style="bold"),
            ProgressBar(total=display.total, completed=record["step"], width=max(10, self.console.width - 60)),
            Text(f"loss {record['loss']:.4f}", style="bold cyan"),
        )
        rows: list[Any] = [head, Text(" · ".join(display.figures()), style="dim", no_wrap=True)]
        width = min(72, self.console.width - 14)
        if self.console.height >= 20 and len(display.losses) > 2:
            rows += [Text(line, style="cyan", no_wrap=True) for line in terminal_curve(display.losses, width, 7)]
        else:
            rows.append(Text(sparkline([loss for _, loss in display.losses], width), style="cyan"))
        if display.now:
            rows.append(Text(f"{display.now} ...", style="dim"))
        return Group(*rows, *notice)

    def print(self, text: str) -> None:
        self.console.print(text, markup=False)

    def close(self) -> None:
        self.live.stop()
