"""Writing that is never seen half done."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from treadle.config import TreadleError, UserError
from treadle.config.files import atomic_folder, disk_errors, inside, write_atomically


def test_folder_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with atomic_folder(target) as folder:
        (folder / "a").write_text("1")
        assert not target.exists()
    assert (target / "a").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("error", [RuntimeError("x"), KeyboardInterrupt()])
def test_nothing_is_left_of_a_folder_that_failed(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), atomic_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("1")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_content_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep")
    with pytest.raises(UserError, match="already exists"), atomic_folder(tmp_path / "out"):
        pass
    assert (tmp_path / "out" / "mine").read_text() == "keep"


def test_file_is_replaced_whole_and_leaves_no_trace_when_it_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "f"
    write_atomically(file, b"one")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(TreadleError, match=r"disk is full.*f; free some space"):
        write_atomically(file, b"two")
    assert file.read_bytes() == b"one"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_denied_writing_is_the_users_to_solve(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="may not write"), disk_errors(tmp_path):
        raise PermissionError(errno.EACCES, "Permission denied")


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "link/x"])
def test_names_that_lead_out_are_refused(tmp_path: Path, name: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(tmp_path)
    with pytest.raises(UserError, match="leads out of"):
        inside(root, name)
    assert inside(root, "a/b") == root / "a" / "b"
