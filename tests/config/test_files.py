"""Writing that is never seen half done."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

import pytest

from tests.kills import kills
from treadle.config import TreadleError, UserError, files
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


@pytest.mark.parametrize("exchanging", [True, False])
def test_killed_at_any_moment_a_replaced_folder_is_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanging: bool
) -> None:
    if exchanging and sys.platform != "linux":
        pytest.skip("only Linux exchanges two names")
    if not exchanging:
        monkeypatch.setattr(files, "_exchange", lambda *_: False)
    target = tmp_path / "out"

    def make(text: str) -> None:
        with atomic_folder(target, replace=True) as folder:
            (folder / "a").write_text(text)
            (folder / "b").write_text(text)

    def found() -> str:
        return "+".join((target / name).read_text() for name in ("a", "b")) if target.exists() else "nothing"

    make("old")
    seen = set()
    for _ in kills(lambda: make("new"), (files, "_exchange"), (files, "sync_folder"), (files, "sync_tree")):
        seen.add(found())
        remove_leftovers(tmp_path)
        assert found() in ("old+old", "new+new")
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
        make("old")
    # Only where two names cannot be exchanged is there a moment without a folder.
    assert seen == {"old+old", "new+new"} | (set() if exchanging else {"nothing"})


def test_what_made_way_is_put_back_by_the_next_writer(tmp_path: Path) -> None:
    (tmp_path / ".out.77.old").mkdir()
    (tmp_path / ".out.77.old" / "a").write_text("old")
    (tmp_path / ".out.more.78.old").mkdir()  # of another folder, out.more
    with pytest.raises(UserError, match="out already exists"), atomic_folder(tmp_path / "out"):
        pass
    assert (tmp_path / "out" / "a").read_text() == "old"
    assert remove_leftovers(tmp_path) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.more"]


def test_a_folder_takes_the_place_of_a_file_or_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("file")
    for name in ("link", "file"):
        with atomic_folder(tmp_path / name, replace=True) as folder:
            (folder / "a").touch()
    made = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert made == ["file", "file/a", "link", "link/a"]
