"""Training itself, killed at random moments and started again: the curve and the model of a run that nobody killed."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.train.runs import run_settings
from treadle.train.api import train
from treadle.train.checkpoints import open_checkpoint
from treadle.train.checkpoints.format import folder_of, steps_in
from treadle.train.sinks import read_metrics

EVERY = 2


def settings(run: Path, corpus: Path, steps: int, **changes: Any) -> dict[str, Any]:
    return run_settings(
        run,
        corpus,
        train={"steps": steps, "threads": 1},
        optimizer={"name": "muon"},
        evaluation={"every": 7},
        checkpoint={"every": EVERY, "asynchronous": True},
        **changes,
    )


def curve(run: Path) -> list[tuple[Any, ...]]:
    """Return what the run measured, in order, without what depends on the clock."""
    names = ("step", "loss", "gradient_norm", "learning_rate", "tokens", "validation_loss")
    return [tuple(record.get(name) for name in names) for record in read_metrics(run / "metrics.jsonl")]


def steps_logged(run: Path) -> int:
    """Return the last step in metrics.jsonl, which another process is writing."""
    path = run / "metrics.jsonl"
    return max((record["step"] for record in read_metrics(path)), default=0) if path.exists() else 0


def same_model(one: Path, other: Path) -> None:
    first, second = open_checkpoint(one), open_checkpoint(other)
    assert first.step == second.step
    for left, right in ((first.weights(), second.weights()), (first.tensors(), second.tensors())):
        assert set(left) == set(right)
        for name, tensor in left.items():
            assert torch.equal(tensor, right[name]), name


def quietly(tree: dict[str, Any]) -> None:
    descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.setsid()
    train(tree)


def kill_group(group: int, deadline: float) -> None:
    """Kill a process group, which a process that has just started may not have made yet."""
    while True:
        try:
            return os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            assert time.monotonic() < deadline
            time.sleep(0.001)


def killed_at_random(
    run: Path, kills: int, moments: random.Random, start: Callable[[], int], wait: Callable[[int], None]
) -> None:
    """Start the run and kill it, again and again; after each kill, look at what is left.

    `start` returns the id of the process group that it started, `wait` returns when that is gone.
    """
    for _ in range(kills):
        before, group = steps_logged(run), start()
        # A kill may come before the first step of this life, or somewhere in the steps, saving or not.
        target, deadline = before + moments.randrange(0, 7), time.monotonic() + 120
        while steps_logged(run) < target:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(moments.uniform(0, 0.03))
        kill_group(group, deadline)
        wait(group)

        reached = steps_logged(run)
        saved = steps_in(folder_of(run))
        for step in saved:
            assert open_checkpoint(folder_of(run) / f"step-{step:08d}").step == step
        # What may be lost is the checkpoint that is being written, and the steps after it. A step is logged before its
        # own checkpoint has waited for the one before.
        assert max(saved, default=0) >= (reached - 1) // EVERY * EVERY - EVERY


def test_twenty_kills_change_no_bit_of_the_curve_or_the_model(
    tmp_path: Path, run_corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = multiprocessing.get_context("forkserver")
    # Each life is forked off a server that has imported everything; that server looks for modules here alone.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    context.set_forkserver_preload(["tests.train.test_train_kill"])
    lives: dict[int, Any] = {}

    def start() -> int:
        process = context.Process(target=quietly, args=(settings(tmp_path / "killed", run_corpus, 120),), daemon=True)
        process.start()
        assert process.pid is not None
        lives[process.pid] = process
        return process.pid

    train(settings(tmp_path / "whole", run_corpus, 120))
    killed_at_random(tmp_path / "killed", 20, random.Random(11), start, lambda group: lives[group].join())
    assert steps_logged(tmp_path / "killed") < 120
    train(settings(tmp_path / "killed", run_corpus, 120))
    assert curve(tmp_path / "killed") == curve(tmp_path / "whole")
    same_model(tmp_path / "killed/checkpoints/latest", tmp_path / "whole/checkpoints/latest")


def test_killing_the_command_and_its_ranks(tmp_path: Path, run_corpus: Path) -> None:
    """The same from the command line with two ranks, the launcher included in what is killed."""
    lives: dict[int, subprocess.Popen[bytes]] = {}

    def start(name: str = "killed") -> int:
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(settings(tmp_path / name, run_corpus, 24, nproc=2)))
        command = [sys.executable, "-m", "treadle", "train", str(file)]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, start_new_session=True, **quiet)
        lives[process.pid] = process
        return process.pid

    whole = start("whole")
    assert lives[whole].wait(200) == 0
    killed_at_random(tmp_path / "killed", 2, random.Random(3), start, lambda group: bool(lives[group].wait(60)))
    assert lives[start()].wait(200) == 0
    assert curve(tmp_path / "killed") == curve(tmp_path / "whole")
    same_model(tmp_path / "killed/checkpoints/latest", tmp_path / "whole/checkpoints/latest")
