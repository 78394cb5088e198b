"""What a person sees of a run."""

from __future__ import annotations

import errno
import io

import pytest
from rich.console import Console

from treadle.train import display as module
from treadle.train.display import Display, duration

RECORD = {
    "loss": 3.25,
    "gradient_norm": 0.5,
    "learning_rate": 3e-4,
    "tokens_per_second": 2345.6,
    "peak_share": 0.42,
    "memory_bytes": 3 << 30,
    "seconds_left": 200.0,
}


def test_a_log_gets_the_first_the_last_and_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 1000, 2))  # two seconds a look; a line each five
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(clock)))
    display = Display(total_steps=20, every=5.0, live=False)
    for step in range(1, 21):
        display.step(step, RECORD)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == (
        "step 1/20 · loss 3.2500 · 2.3k tokens/s (42% of peak) · norm 0.5 · rate 0.0003 · 3.0 GiB · 3 min 20 s left"
    )
    assert lines[-1].startswith("step 20/20")
    assert 4 <= len(lines) < 15


def test_the_panel_shows_the_figures_the_curve_and_what_is_going_on(capsys: pytest.CaptureFixture[str]) -> None:
    notice = ""
    display = Display(total_steps=20, live=True, notice=lambda: notice)
    try:
        assert display.panel is not None
        for step in range(1, 10):
            display.step(step, {**RECORD, "loss": 4 - step / 10})

        def shown() -> str:
            out = Console(file=io.StringIO(), width=100, height=40)
            out.print(display.panel.render())
            return out.file.getvalue()

        display.panel.console = Console(file=io.StringIO(), width=100, height=40)
        text = shown()
        assert "step 9/20" in text and "loss 3.1000" in text and "42% of peak" in text and "3 min 20 s left" in text
        assert "⣀" in text or "⠤" in text
        display.doing("measuring the validation loss")
        notice = "stopping"
        assert "measuring the validation loss ..." in shown() and "stopping" in shown()
        display.step(10, RECORD)
        assert "measuring" not in shown()
        # A small terminal has no room for the curve: one line of bars instead.
        display.panel.console = Console(file=io.StringIO(), width=50, height=10)
        assert "█" in shown() and "┤" not in shown()
    finally:
        display.close()


def test_the_curve_of_a_very_long_run_stays_small() -> None:
    display = Display(total_steps=10**6, live=False, every=1e9)
    for step in range(1, 50_000):
        display.remember({"step": step, "loss": float(step)})
    assert len(display.losses) <= module.MOST_POINTS
    assert display.losses[-1][0] == 49_999
    assert all(abs(loss - step) < 8 for step, loss in display.losses)
    display.forget_after(1000)
    assert display.losses[-1][0] <= 1000


@pytest.mark.parametrize(("seconds", "text"), [(0, "0 s"), (59, "59 s"), (200, "3 min 20 s"), (18_600, "5 h 10 min")])
def test_times_are_for_reading(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize("live", [False, True])
def test_nobody_need_be_there_to_see_it(monkeypatch: pytest.MonkeyPatch, live: bool) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.EIO, "Input/output error")

    silenced: list[int] = []
    monkeypatch.setattr(module, "silence", silenced.extend)
    display = Display(total_steps=2, live=live)
    monkeypatch.setattr("sys.stderr", Gone())
    if display.panel is not None:
        display.panel.console.file = Gone()
    display.step(1, RECORD)
    display.say("a line")
    assert silenced and set(silenced) == {2}
    display.finish(["the end"])
