"""Progress: silent for short work, a line now and then in a log, a sign of life where nothing is counted for long."""

from __future__ import annotations

import sys
import threading

import pytest

from treadle.config.progress import amount_text, progress


class Heard:
    """A log that says when something was written."""

    def __init__(self) -> None:
        self.text, self.written = "", threading.Event()

    def write(self, text: str) -> None:
        self.text += text
        self.written.set()

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False


def listen(monkeypatch: pytest.MonkeyPatch) -> Heard:
    log = Heard()
    monkeypatch.setattr(sys, "stderr", log)
    monkeypatch.delenv("RANK", raising=False)
    return log


def test_short_work_is_silent_and_long_work_has_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    log = listen(monkeypatch)
    with progress("Reading", total=4, unit="files", after=60) as step:
        step(4)
    assert not log.text
    with progress("Reading", total=4, unit="files", after=0, every=0) as step:
        step(1)
        step(2, "b.txt")
    assert log.text == "Reading: 1 files (25%)\nReading: 3 files (75%), b.txt\n"


def test_other_ranks_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    log = listen(monkeypatch)
    monkeypatch.setenv("RANK", "1")
    with progress("Reading", total=4, after=0, alive=True) as step:
        step(4)
    assert not log.text


def test_a_sign_of_life_comes_while_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    log = listen(monkeypatch)
    with progress("Looking", total=None, unit="files", after=0.001, alive=True):
        assert log.written.wait(30)
    assert log.text.startswith("Looking: 0 files, 0 s")
    assert not any(thread.name.startswith("treadle-progress") for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(999, "", "999"), (1500, "tokens", "1.5k tokens"), (1536, "B", "1.5 KiB"), (3 << 40, "B", "3072.0 GiB")],
)
def test_amounts_are_for_reading(value: float, unit: str, text: str) -> None:
    assert amount_text(value, unit) == text
