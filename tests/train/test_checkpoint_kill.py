"""A run that saves all the time is killed at random moments: what is visible is always whole, and never old."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from tests.train.tiny_run import TinyRun, save_without_end
from treadle.train.checkpoints import CheckpointSettings, CheckpointWriter, open_checkpoint
from treadle.train.checkpoints.format import folder_of, name_of, steps_in

KILLS = 20


def child(run: Path, pipe: Connection) -> None:
    torch.set_num_threads(1)
    save_without_end(run, pipe.send)


def test_twenty_kills_lose_no_completed_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moments = random.Random(7)
    # Each child is forked off a server that has imported everything; that server looks for modules here alone.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.train.tiny_run"])
    folder, completed, interrupted, expected = folder_of(tmp_path), -1, 0, TinyRun()
    for _ in range(KILLS):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=child, args=(tmp_path, theirs), daemon=True)
        process.start()
        theirs.close()
        assert ours.poll(60)
        resumed = int(ours.recv().removeprefix("resumed "))
        assert resumed >= completed  # it goes on from the last completed checkpoint
        for _ in range(moments.randrange(1, 6)):
            assert ours.poll(60)
            completed = int(ours.recv().removeprefix("completed "))
        # The kill is to fall into any part of the writing; nothing is waited for here.
        time.sleep(moments.uniform(0, 0.05))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        while ours.poll():
            try:
                completed = int(ours.recv().removeprefix("completed "))
            except EOFError:
                break

        interrupted += any(path.name.endswith((".tmp", ".gone")) for path in folder.iterdir())
        steps = steps_in(folder)
        assert max(steps) >= completed
        for step in steps:
            assert open_checkpoint(folder / name_of(step)).step == step
        # The link moves after its checkpoint is there, so a kill may leave it behind; the next start puts it right.
        CheckpointWriter(tmp_path, CheckpointSettings()).close()
        assert open_checkpoint(folder / "latest").step == max(steps)
        # What it holds is what a run that nobody killed has after as many steps, bit for bit.
        expected.train(max(steps))
        restored = TinyRun()
        restored.restore(open_checkpoint(folder / name_of(max(steps))))
        for name, tensor in expected.whole().items():
            assert torch.equal(restored.whole()[name], tensor), name
    assert max(steps_in(folder)) >= KILLS
    assert interrupted >= 5  # else the kills missed what they are for
