"""Being asked to stop, in one process: the first signal is a request, a second Ctrl-C an end."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from treadle.train.signals import LAUNCHED, listening


def test_a_signal_is_a_request_and_a_second_ctrl_c_ends() -> None:
    before = signal.getsignal(signal.SIGINT)
    with listening() as stop:
        assert stop.reason == stop.notice == ""
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.reason == "stopped by Ctrl-C" and "again ends at once" in stop.notice
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_sigterm_may_come_any_number_of_times() -> None:
    with listening() as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.reason == "stopped by SIGTERM"


def test_a_worker_leaves_the_end_to_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCHED, "1")
    with listening() as stop:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert stop.reason == "stopped by Ctrl-C"


def test_another_thread_than_the_main_one_listens_to_nothing() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with listening() as stop:
            seen.append((stop.reason, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [("", before)]


@pytest.mark.parametrize("ignored", [False, True])
def test_sighup_is_a_request_unless_nohup_has_it_ignored(ignored: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with listening() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.reason == ("" if ignored else "stopped by SIGHUP (the terminal was closed)")
    finally:
        signal.signal(signal.SIGHUP, before)
