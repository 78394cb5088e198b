"""Which checkpoints are kept: stated as properties, and tried on folders."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.train.tiny_run import TinyRun
from treadle.config import UserError
from treadle.train.checkpoints import CheckpointSettings, CheckpointWriter, lock, lock_run
from treadle.train.checkpoints.format import steps_in
from treadle.train.checkpoints.retention import removable


@given(
    steps=st.sets(st.integers(0, 60), max_size=25),
    newest=st.integers(0, 60),
    keep_last=st.integers(1, 6),
    keep_every=st.integers(0, 12),
)
def test_properties(steps: set[int], newest: int, keep_last: int, keep_every: int) -> None:
    gone = set(removable(steps, newest, keep_last, keep_every))
    assert gone <= steps
    assert newest not in gone
    assert all(step < newest for step in gone)
    before = sorted(step for step in steps | {newest} if step <= newest)
    assert gone.isdisjoint(before[-keep_last:])
    if keep_every:
        assert all(step % keep_every for step in gone)
    kept = set(before) - gone
    wanted = set(before[-keep_last:]) | {step for step in before if keep_every and step % keep_every == 0}
    assert kept == wanted
    assert removable(set(steps) - gone, newest, keep_last, keep_every) == []  # a second look removes no more


def test_a_run_keeps_the_last_and_the_milestones(tmp_path: Path) -> None:
    tiny = TinyRun()
    with CheckpointWriter(tmp_path, CheckpointSettings(keep_last=2, keep_every=3)) as writer:
        for step in range(8):
            tiny.train(step)
            writer.save(tiny.content())
    folder = tmp_path / "checkpoints"
    assert steps_in(folder) == [0, 3, 6, 7]
    assert (folder / "latest").resolve().name == "step-00000007"
    assert len(list(folder.iterdir())) == 5


def test_damaged_ones_do_not_count_as_kept(tmp_path: Path) -> None:
    tiny = TinyRun()
    folder = tmp_path / "checkpoints"
    with CheckpointWriter(tmp_path, CheckpointSettings(keep_last=2, asynchronous=False)) as writer:
        for step in range(3):
            tiny.train(step)
            writer.save(tiny.content())
        (folder / "step-00000002" / "model.safetensors").unlink()
        (folder / "step-00000099").mkdir()
        tiny.train(3)
        writer.save(tiny.content())
    assert steps_in(folder) == [1, 2, 3, 99]


def test_two_runs_in_one_folder_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "PATIENCE_SECONDS", 0.0)
    hold = (
        "import sys; from treadle.train.checkpoints import lock_run\n"
        "with lock_run(sys.argv[1]): print(1, flush=True); input()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "1\n"
    with pytest.raises(UserError, match=rf"is in use by process {other.pid} on "), lock_run(tmp_path):
        pass
    other.kill()
    other.communicate()
    leftover = tmp_path / "checkpoints" / ".step-00000001.1.tmp"
    leftover.mkdir(parents=True)
    with lock_run(tmp_path):
        assert not leftover.exists()
    with lock_run(tmp_path):
        pass


def test_a_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(descriptor: int, how: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", none)
    with lock_run(tmp_path):
        assert "has no locks (Operation not supported)" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "why"), [("file", "is a file"), ("file/run", "lies below a file")])
def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=rf"{name} cannot be a run's folder: .* {why}"), lock_run(tmp_path / name):
        pass
