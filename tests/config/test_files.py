"""Writing that is never seen half done."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from treadle.config import TreadleError, UserError
from treadle.config.files import (
    atomic_folder,
    disk_errors,
    inside,
    remove_folder,
    remove_leftovers,
    write_atomically,
)


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


def test_a_folder_is_replaced_whole_when_asked(tmp_path: Path) -> None:
    for text in ("1", "2"):
        with atomic_folder(tmp_path / "out", replace=True) as folder:
            (folder / text).write_text(text)
            if text == "2":
                assert (tmp_path / "out" / "1").exists()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["2"]
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "out", replace=True):
        raise RuntimeError("x")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "2").exists()
    remove_folder(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_only_what_we_left_aside_is_a_leftover(tmp_path: Path) -> None:
    for name in (".out.12.tmp", ".out.7.gone", ".hidden", "out.12.tmp", ".out.x.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text("1")
    (tmp_path / ".f.3-0123abcd.tmp").write_text("1")
    assert remove_leftovers(tmp_path) == [".f.3-0123abcd.tmp", ".out.12.tmp", ".out.7.gone"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hidden", ".out.x.tmp", "out.12.tmp"]


def test_a_full_disk_is_known_from_the_words_of_safetensors(tmp_path: Path) -> None:
    from safetensors import SafetensorError

    with pytest.raises(TreadleError, match="disk is full"), disk_errors(tmp_path):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


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


def test_places_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "sub", tmp_path / "file" / "sub" / "deep", tmp_path / ("n" * 300)):
        with pytest.raises(UserError, match="is no place to write to"):
            write_atomically(place, b"x")
        with pytest.raises(UserError, match="is no place to write to"), atomic_folder(place):
            pass
