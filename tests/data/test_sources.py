"""What addresses stand for."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from treadle.config import UserError
from treadle.data import sources
from treadle.data.sources import difference, expand, to_lines
from treadle.data.streams import open_stream


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("b.txt", "a.py", "sub/c.py", "sub/deep/d.txt", ".git/config", "sub/.hidden", "site-packages/x.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(*addresses: str, **options) -> list[str]:
    return [source.name for source in expand(addresses, **options)]


def test_a_folder_is_read_whole_but_for_what_is_hidden(tree: Path) -> None:
    assert names(".") == ["./a.py", "./b.txt", "./site-packages/x.py", "./sub/c.py", "./sub/deep/d.txt"]


def test_globs_span_folders_and_exclusions_match_whole_paths(tree: Path) -> None:
    assert names("**/*.py") == ["a.py", "site-packages/x.py", "sub/c.py"]
    assert names("**/*.py", exclude=["*site-packages/*"]) == ["a.py", "sub/c.py"]
    assert names("sub/**") == ["sub/c.py", "sub/deep/d.txt"]
    assert names("s*") == ["site-packages/x.py", "sub/c.py", "sub/deep/d.txt"]


def test_a_file_named_twice_is_read_once_and_the_order_of_addresses_stays(tree: Path) -> None:
    assert names("sub/c.py", ".", "sub")[0] == "sub/c.py"
    assert names("b.txt", "a.py", "b.txt") == ["b.txt", "a.py"]
    assert [source.named for source in expand(["b.txt", "sub"])] == [True, False, False]


def test_the_folder_that_is_written_is_not_read(tree: Path) -> None:
    assert "./sub/c.py" not in names(".", output=tree / "sub")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("nothing.txt", "nothing.txt does not exist"),
        ("no/**/match", "nothing matches no/"),
        ("no-such-scheme://x", "no-such-scheme://x cannot be read"),
        ("memory://not/there", "memory://not/there does not exist"),
    ],
)
def test_what_cannot_be_read_is_named(tree: Path, address: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        expand([address])


def test_nothing_left_is_an_error(tree: Path) -> None:
    (tree / "empty").mkdir()
    with pytest.raises(UserError, match="there is no file to read in empty"):
        expand(["empty"])
    with pytest.raises(UserError, match="match --exclude"):
        expand(["."], exclude=["*"])


def test_addresses_of_fsspec_are_expanded_like_paths() -> None:
    system = fsspec.filesystem("memory")
    for name in ("/corpus/a.txt", "/corpus/sub/b.jsonl"):
        system.pipe(name, b"x")
    assert names("memory://corpus") == ["memory:///corpus/a.txt", "memory:///corpus/sub/b.jsonl"]
    assert names("memory://corpus/*.txt") == ["memory:///corpus/a.txt"]
    (only,) = expand(["memory://corpus/a.txt"])
    assert (only.name, only.bytes, only.named) == ("memory://corpus/a.txt", 1, True)


def test_files_within_an_archive_keep_its_name(tree: Path) -> None:
    with zipfile.ZipFile("z.zip", "w") as archive:
        archive.writestr("a.txt", "one")
        archive.writestr("sub/b.txt", "two")
    found = expand(["zip://**/*.txt::z.zip"])
    assert [source.name for source in found] == ["zip://a.txt::z.zip", "zip://sub/b.txt::z.zip"]
    for source, content in zip(found, (b"one", b"two"), strict=True):
        with open_stream(source) as stream:
            assert stream.read(10) == content


def test_a_part_of_another_package_is_found_by_its_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    def counting(argument: str) -> Iterator[str]:
        for number in range(int(argument)):
            if number == 3:
                raise ValueError("out of numbers")
            yield f"number {number}"

    monkeypatch.setitem(sources.sources._own, "counting", counting)
    (source,) = expand(["counting://2"])
    assert list(sources.documents_of(source)) == ["number 0", "number 1"]
    (source,) = expand(["counting://9"])
    with pytest.raises(UserError, match=r"the source 'counting' failed at counting://9: .*out of numbers"):
        list(sources.documents_of(source))


def test_a_difference_names_the_file(tree: Path) -> None:
    before = to_lines(expand(["."]))
    assert difference(before, before) is None
    (tree / "b.txt").write_text("changed")
    assert difference(before, to_lines(expand(["."]))) == "./b.txt has changed"
    (tree / "e.txt").write_text("new")
    (tree / "b.txt").unlink()
    assert difference(before, to_lines(expand(["."]))) == "./e.txt is new"
    (tree / "e.txt").unlink()
    assert difference(before, to_lines(expand(["."]))) == "./b.txt is gone"
