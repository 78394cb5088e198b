"""Runs on several processes as a user starts and ends them: signals, kills, errors, torchrun; nothing stays behind."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.train.runs import metrics, run_settings, write_run_corpus
from treadle.cli import main
from treadle.train.checkpoints import latest_good

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run_corpus(tmp_path_factory.mktemp("data") / "corpus")


def write(folder: Path, corpus: Path, **changes: Any) -> Path:
    """Write a run file for two processes and return its path."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run_settings(folder / "run", corpus, **{"nproc": 2, **changes})))
    return path


def start(run_file: Path, *words: str, launcher: tuple[str, ...] = ("-m", "treadle", "train")) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *launcher, str(run_file), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=ENVIRONMENT,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str], timeout: float = 120) -> tuple[int, str]:
    output, _ = process.communicate(timeout=timeout)
    return process.returncode, output


def until(condition: Callable[[], Any], seconds: float = 90) -> Any:
    """Wait for the event; fail when it does not come."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    pytest.fail("what was waited for did not happen")


def steps_done(run_file: Path) -> int:
    path = run_file.parent / "run" / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def workers(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "treadle.train.worker" in " ".join(child.cmdline())
    ]


def pending(process: psutil.Process, number: signal.Signals) -> bool:
    """Return whether a signal waits for a process that is suspended."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return bool(int(status.split("ShdPnd:")[1].split()[0], 16) >> (number - 1) & 1)


def gone(processes: list[psutil.Process]) -> bool:
    return all(not one.is_running() or one.status() == psutil.STATUS_ZOMBIE for one in processes)


# Makes standard input the controlling terminal, as a login does, and becomes the program that is named.
OWN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


def read_all(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(descriptor, 1 << 16):
            pass


ENDLESS = {"train": {"steps": 100_000, "batch_tokens": 384, "precision": "fp32", "device": "cpu"}}


def test_two_processes_train_and_leave_a_whole_checkpoint(tmp_path: Path, corpus: Path) -> None:
    run_file = write(tmp_path, corpus)
    code, output = end(start(run_file))
    assert code == 0, output
    assert "2 processes on cpu" in output and "ended at step 6: all 6 steps are done" in output
    assert latest_good(tmp_path / "run").step == 6
    # One process writes metrics, and torch elastic's own log stays away.
    assert [record["step"] for record in metrics(tmp_path / "run") if "loss" in record] == list(range(1, 7))
    assert "torch.distributed" not in output and "elastic" not in output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_a_stopped_run_saves_and_ends_well_and_goes_on(tmp_path: Path, corpus: Path, number: signal.Signals) -> None:
    run_file = write(tmp_path, corpus, **ENDLESS)
    process = start(run_file)
    until(lambda: steps_done(run_file) > 2)
    ranks = workers(process)
    assert len(ranks) == 2
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as the terminal does: to the launcher and its workers alike
    else:
        process.send_signal(number)
    code, output = end(process)
    assert code == 0, output
    assert f"stopped by {'Ctrl-C' if number == signal.SIGINT else 'SIGTERM'}" in output
    done = steps_done(run_file)
    assert latest_good(tmp_path / "run").step == done
    assert gone(ranks)
    code, output = end(start(run_file, f"train.steps={done + 2}"))
    assert code == 0 and f"resumed  at step {done}" in output
    assert steps_done(run_file) >= done + 2


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_run_whose_terminal_is_closed_saves_and_ends(tmp_path: Path, corpus: Path, nproc: int) -> None:
    run_file = write(tmp_path, corpus, **ENDLESS, nproc=nproc)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", OWN_TERMINAL, sys.executable, "-m", "treadle", "train", str(run_file)]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=ENVIRONMENT, start_new_session=True
    )
    os.close(theirs)
    reader = threading.Thread(target=lambda: read_all(ours))
    reader.start()
    until(lambda: steps_done(run_file) > 2)
    ranks = workers(process)
    os.close(ours)
    assert process.wait(60) == 0
    until(lambda: gone(ranks), 10)
    assert latest_good(tmp_path / "run").step == steps_done(run_file)
    assert "SIGHUP" in json.loads((tmp_path / "run" / "outcome.json").read_text())["reason"]
    reader.join(10)


def test_a_signal_before_training_begins_ends_the_run_too(tmp_path: Path, corpus: Path) -> None:
    run_file = write(tmp_path, corpus, **ENDLESS)
    process = start(run_file)
    assert process.stdout is not None
    assert process.stdout.readline() == "starting 2 processes\n"
    process.send_signal(signal.SIGTERM)
    code, output = end(process, 60)
    assert code == 0, output
    assert "Traceback" not in output


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path, corpus: Path) -> None:
    run_file = write(tmp_path, corpus, **ENDLESS)
    process = start(run_file)
    until(lambda: steps_done(run_file) > 0)
    ranks = workers(process)
    # A rank that does not react keeps the first from having an effect.
    ranks[1].suspend()
    # A process that is not yet scheduled would take the lower-numbered SIGTERM before it stops.
    until(lambda: ranks[1].status() == psutil.STATUS_STOPPED)
    process.send_signal(signal.SIGINT)
    until(lambda: pending(ranks[1], signal.SIGTERM))
    process.send_signal(signal.SIGINT)
    assert end(process, 30)[0] == 130
    until(lambda: gone(ranks), 10)


@pytest.mark.parametrize("victim", ["launcher", "rank 0", "rank 1"])
def test_a_kill_leaves_no_process_and_loses_no_checkpoint(tmp_path: Path, corpus: Path, victim: str) -> None:
    run_file = write(tmp_path, corpus, **ENDLESS, checkpoint={"every": 2, "asynchronous": True})
    process = start(run_file)
    until(lambda: (tmp_path / "run" / "checkpoints" / "latest").exists() and steps_done(run_file) > 4)
    ranks = workers(process)
    if victim == "launcher":
        process.kill()
    else:
        next(one for one in ranks if one.environ()["RANK"] == victim[-1]).kill()
    code, output = end(process, 60)
    until(lambda: gone(ranks), 10)
    if victim != "launcher":
        assert code == 1
        assert f"treadle: {victim} was ended by SIGKILL" in output
        assert "Traceback" not in output
    saved, done = latest_good(tmp_path / "run").step, steps_done(run_file)
    # At most the steps since the last checkpoint, one that is being written, and the step in flight.
    assert saved > 0 and done - saved <= 4
    code, output = end(start(run_file, f"train.steps={saved + 1}"))
    assert code == 0 and f"resumed  at step {saved}" in output


def test_an_error_on_one_rank_is_the_one_sentence_that_is_seen(tmp_path: Path, corpus: Path) -> None:
    run_file = write(tmp_path, corpus, **ENDLESS)
    broken = tmp_path / "sitecustomize.py"
    broken.write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    import treadle.train.loop as loop\n"
        "    from treadle.config import UserError\n"
        "    def train_step(state, *rest):\n"
        "        raise UserError('the hen laid no egg')\n"
        "    loop.train_step = train_step\n"
    )
    environment = {**ENVIRONMENT, "PYTHONPATH": f"{tmp_path}:{ENVIRONMENT.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [sys.executable, "-m", "treadle", "train", str(run_file)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1] == "treadle: the hen laid no egg"
    assert "Traceback" not in done.stderr


def test_mistakes_are_said_before_workers_start_and_leave_nothing(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for word, says in (
        ("train.batch_tokens=100", "cannot be divided"),
        ("plan.dp_shard=3", "does not fit 2 ranks"),
        ("optimizer.name=adam", "did you mean 'adamw'"),
        ("data.train.0.path=nowhere", "nowhere"),
        ("train.stesp=3", "did you mean 'steps'"),
        ("schedule.warmup_steps=9", "leaves nothing"),
        ("model.config.num_attention_heads=5", "heads"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["train", str(write(tmp_path, corpus)), word])
        output = capsys.readouterr().err
        assert (stopped.value.code, len(output.strip().splitlines())) == (2, 1), output
        assert says in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.yaml"]


def test_torchrun_starts_the_ranks_as_well(tmp_path: Path, corpus: Path) -> None:
    run_file = write(tmp_path, corpus, nproc=1)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "treadle", "train")
    code, output = end(start(run_file, "--json", launcher=launcher))
    assert code == 0, output
    (told,) = [json.loads(line) for line in output.splitlines() if line.startswith("{")]  # by one rank
    assert told["step"] == 6
    assert "2 processes on cpu" in output
    assert latest_good(tmp_path / "run").step == 6


def test_a_folder_in_use_is_refused(tmp_path: Path, corpus: Path) -> None:
    run_file = write(tmp_path, corpus, **ENDLESS, nproc=1)
    process = start(run_file)
    until(lambda: steps_done(run_file) > 0)
    code, output = end(start(run_file))
    assert code == 2 and "is in use by process" in output
    process.terminate()
    assert end(process)[0] == 0
