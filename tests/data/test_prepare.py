"""Preparing: the same output for any number of processes and interruptions, and one sentence for what goes wrong."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data.corpora import document
from tests.kills import kills
from treadle.config import TreadleError, UserError, parse_settings
from treadle.data import journal, pool, reading, sources
from treadle.data import prepare as module
from treadle.data.corpus import Corpus
from treadle.data.documents import TokenizedBlock, tokenize
from treadle.data.prepare import PrepareSettings, prepare
from treadle.data.reading import Cursor
from treadle.data.writer import SplitWriter
from treadle.model.tokenizer import Tokenizer

WORDS = "the quick brown fox jumps over lazy dogs while seven wizards boil strange liquids in copper pots".split()


def some_text(seed: int, words: int) -> str:
    chosen = random.Random(seed)
    return " ".join(chosen.choice(WORDS) + ("\n" if chosen.random() < 0.1 else "") for _ in range(words))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    Tokenizer.train([some_text(0, 2000)], 400).save(folder)
    return folder


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Documents of several formats, about 1 MB, one of them large."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:03d}.txt").write_text(some_text(number, 400))
    (folder / "large.md").write_text(some_text(1000, 40_000))
    records = [{"text": some_text(2000 + number, 300)} for number in range(100)]
    (folder / "records.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, records)).encode()))
    (folder / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(1000))
    return folder


def settings(texts: Path, out: Path, tokenizer: Path | None, **options) -> PrepareSettings:
    chosen = {"validation": 0.1, "shard_tokens": 20_000, **options}
    return PrepareSettings(sources=[str(texts)], out=out, tokenizer=str(tokenizer) if tokenizer else None, **chosen)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_what_was_prepared_is_the_text(texts: Path, tmp_path: Path, tokenizer: Path) -> None:
    report = prepare(settings(texts, tmp_path / "out", tokenizer))
    expected = [path.read_text() for path in texts.iterdir() if path.suffix in (".txt", ".md")]
    records = gzip.decompress((texts / "records.jsonl.gz").read_bytes()).splitlines()
    expected += [json.loads(line)["text"] for line in records]
    found = []
    for split in ("train", "validation"):
        corpus = Corpus.open(tmp_path / "out", split)
        corpus.verify()
        found += [corpus.tokenizer().decode(document(corpus, n)) for n in range(corpus.documents)]
        counts = report.manifest.splits[split]
        texts_here = found[-corpus.documents :]
        assert counts.bytes == sum(len(text.encode()) for text in texts_here)
        assert counts.words == sum(len(text.split()) for text in texts_here)
    assert sorted(found) == sorted(expected)
    assert report.manifest.splits["validation"].documents > 4
    assert len(report.manifest.splits["train"].shards) > 1
    assert report.notes == [f"1 file skipped as binary or not in UTF-8, such as {texts}/picture.png"]
    assert not (tmp_path / "out" / ".preparing").exists()


def test_the_output_is_the_same_for_any_number_of_processes(
    texts: Path, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "BLOCK_BYTES", 1 << 15)
    made = []
    for workers in (0, 1, 3):
        prepare(settings(texts, tmp_path / f"out-{workers}", tokenizer, workers=workers))
        made.append(contents(tmp_path / f"out-{workers}"))
    assert made[0] == made[1] == made[2]


def test_a_trained_tokenizer_is_the_same_each_time_and_never_sees_validation(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    train = Tokenizer.train

    def watched(found: Iterator[str], size: int) -> Tokenizer:
        return train((seen.append(text) or text for text in found), size)

    monkeypatch.setattr(Tokenizer, "train", watched)
    for name in ("a", "b"):
        prepare(settings(texts, tmp_path / name, None, train_tokenizer=350, tokenizer_bytes=200_000))
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    held_out = Corpus.open(tmp_path / "a", "validation")
    texts_held_out = {held_out.tokenizer().decode(document(held_out, n)) for n in range(held_out.documents)}
    assert seen and not texts_held_out & set(seen)


DRIVER = """
import sys
from pathlib import Path
from treadle.data import prepare, reading
prepare.SYNC_SECONDS = 0.0
reading.BLOCK_BYTES = 1 << 14
texts, out, tokenizer = sys.argv[1:]
prepare.prepare(prepare.PrepareSettings(
    sources=[texts], out=Path(out), tokenizer=tokenizer, validation=0.1, shard_tokens=20_000, workers=2))
"""


def test_killed_at_any_moment_it_goes_on_and_ends_the_same(
    texts: Path, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "BLOCK_BYTES", 1 << 14)
    prepare(settings(texts, tmp_path / "whole", tokenizer))
    out, chosen = tmp_path / "killed", random.Random(5)
    journal = out / ".preparing" / "journal.json"
    kills, places = 0, []
    while True:
        command = [sys.executable, "-c", DRIVER, str(texts), str(out), str(tokenizer)]
        before = journal.read_bytes() if journal.exists() else b""
        with subprocess.Popen(command, start_new_session=True) as process:
            steps = chosen.randint(0, 5) if kills < 6 else 10_000
            while process.poll() is None and steps >= 0:
                now = journal.read_bytes() if journal.exists() else b""
                if now != before:
                    before, steps = now, steps - 1
                time.sleep(chosen.random() * 1e-3)  # polls; the place of the kill varies with it
            process.kill()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
        if (out / "manifest.json").exists():  # it was done and only cleaning up
            Corpus.open(out).verify()
        else:
            with pytest.raises(UserError, match=r"is not finished: .* run the same 'treadle data prepare' again"):
                Corpus.open(out)
        kills += 1
        places.append(Cursor.model_validate(json.loads(before)["cursor"]) if before else None)
    assert kills >= 4 and len({str(place) for place in places}) > 2
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.parametrize("place", ["between blocks", "within a block"])
def test_an_interrupt_keeps_what_was_done(
    texts: Path, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr(reading, "BLOCK_BYTES", 1 << 14)
    prepare(settings(texts, tmp_path / "whole", tokenizer))
    add, calls = SplitWriter.add, iter(range(10**6))

    def interrupted(self: SplitWriter, batch: object) -> None:
        add(self, batch)  # pyrefly: ignore
        if next(calls) == 15:
            raise KeyboardInterrupt

    def interrupted_before(*given) -> TokenizedBlock:
        if next(calls) == 15:
            raise KeyboardInterrupt
        return tokenize(*given)

    with monkeypatch.context() as patch:
        if place == "within a block":
            patch.setattr(module, "SYNC_SECONDS", 0.0)
            patch.setattr(SplitWriter, "add", interrupted)
        else:
            patch.setattr(pool, "tokenize", interrupted_before)
        with pytest.raises(KeyboardInterrupt):
            prepare(settings(texts, tmp_path / "out", tokenizer, workers=0))
    journal = json.loads((tmp_path / "out" / ".preparing" / "journal.json").read_bytes())
    assert journal["cursor"]["file"] > 5
    read = []
    monkeypatch.setattr(
        module, "read_blocks", lambda found, *rest: read.append(rest[1]) or reading.read_blocks(found, *rest)
    )
    prepare(settings(texts, tmp_path / "out", tokenizer))
    assert read == [Cursor.model_validate(journal["cursor"])]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_an_interrupt_keeps_a_trained_tokenizer(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given) -> TokenizedBlock:
        raise KeyboardInterrupt

    prepare(settings(texts, tmp_path / "whole", None, train_tokenizer=350))
    with monkeypatch.context() as patch:
        patch.setattr(pool, "tokenize", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(settings(texts, tmp_path / "out", None, train_tokenizer=350, workers=0))
    monkeypatch.setattr(Tokenizer, "train", lambda *_: pytest.fail("it trained the tokenizer again"))
    prepare(settings(texts, tmp_path / "out", None, train_tokenizer=350))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_second_run_reuses_what_is_there(
    texts: Path, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare(settings(texts, tmp_path / "out", tokenizer))
    monkeypatch.setattr(module, "read_blocks", lambda *_: pytest.fail("it read the sources again"))
    again = prepare(settings(texts, tmp_path / "out", tokenizer, workers=7))
    assert again.reused and not first.reused
    assert again.manifest == first.manifest and again.notes == first.notes


def test_changes_are_noticed(texts: Path, tmp_path: Path, tokenizer: Path) -> None:
    out = tmp_path / "out"
    prepare(settings(texts, out, tokenizer))
    with pytest.raises(UserError, match=r"validation was 0.1 and is now 0.2; add --overwrite"):
        prepare(settings(texts, out, tokenizer, validation=0.2))
    with pytest.raises(UserError, match=r"the tokenizer is another one; add --overwrite"):
        prepare(settings(texts, out, None, train_tokenizer=300))
    (texts / "000.txt").write_text("changed")
    with pytest.raises(UserError, match=r"000.txt has changed; add --overwrite"):
        prepare(settings(texts, out, tokenizer))
    report = prepare(settings(texts, out, tokenizer, validation=0.2, overwrite=True))
    assert not report.reused and report.manifest.settings["validation"] == 0.2
    assert prepare(settings(texts, out, tokenizer, validation=0.2, overwrite=True)).reused
    # A setting that can never work is refused at once.
    with pytest.raises(UserError, match="--train-tokenizer is 100, below 261"):
        prepare(settings(texts, out, None, train_tokenizer=100, overwrite=True))
    assert prepare(settings(texts, out, tokenizer, validation=0.2)).reused


def interrupting(*_: object, **__: object) -> TokenizedBlock:
    raise KeyboardInterrupt


@pytest.mark.parametrize("what", ["a bad file", "Ctrl-C", "a full disk"])
def test_a_corpus_stays_until_the_one_that_replaces_it_is_complete(
    texts: Path, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(reading, "BLOCK_BYTES", 1 << 14)
    monkeypatch.setattr(module, "SYNC_SECONDS", 0.0)
    out = tmp_path / "out"
    prepare(settings(texts, out, tokenizer))
    (out / "notes.md").write_text("mine")
    before = contents(out)
    changed = settings(texts, out, None, train_tokenizer=350, shard_tokens=10_000, overwrite=True, workers=0)
    with monkeypatch.context() as patch:
        if what == "a bad file":
            (texts / "x-damaged.txt.gz").write_bytes(gzip.compress(b"text" * 1000)[:-10])
        elif what == "Ctrl-C":
            patch.setattr(pool, "tokenize", interrupting)
        else:
            patch.setattr(FullDisk, "left", 150_000)
            patch.setattr(SplitWriter, "_opened", staticmethod(lambda path: FullDisk(io.FileIO(path, "r+b"))))
        with pytest.raises((TreadleError, KeyboardInterrupt)):
            prepare(changed)
    assert {name: data for name, data in contents(out).items() if not name.startswith(".preparing/")} == before
    Corpus.open(out).verify()
    if what == "a bad file":
        (texts / "x-damaged.txt.gz").unlink()
    # What is there is still found, and what was begun beside it is not forgotten.
    report = prepare(settings(texts, out, tokenizer))
    begun = (out / ".preparing").exists()
    assert report.reused and begun == any("another corpus was begun in" in note for note in report.notes)
    assert begun == (what != "a bad file")  # which is found while the tokenizer is trained, when nothing is done yet
    prepare(changed)
    prepare(settings(texts, tmp_path / "fresh", None, train_tokenizer=350, shard_tokens=10_000))
    assert contents(out) == contents(tmp_path / "fresh") | {"notes.md": b"mine"}


def test_killed_at_any_file_operation_the_new_corpus_takes_its_place_later(tmp_path: Path, tokenizer: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(30):
        (texts / f"{number}.txt").write_text(some_text(number, 40))
    old, new = (settings(texts, tmp_path / "out", tokenizer, shard_tokens=size, workers=0) for size in (500, 700))
    prepare(old)
    shutil.copytree(tmp_path / "out", tmp_path / "old")
    kept, whole = contents(tmp_path / "out"), tmp_path / "whole"
    prepare(new.model_copy(update={"out": whole}))
    states = set()
    for _ in kills(lambda: prepare(new.model_copy(update={"overwrite": True}))):
        out = {name: data for name, data in contents(tmp_path / "out").items() if not name.startswith(".preparing/")}
        if "manifest.json" in out:
            assert out in (kept, contents(whole))
            states.add("old" if out == kept else "new")
        else:
            # Only a complete corpus makes the old one go, and it takes its place whatever is asked for next.
            states.add("between")
            with pytest.raises(UserError, match="run the same 'treadle data prepare' again"):
                Corpus.open(tmp_path / "out")
            with pytest.raises(UserError, match=r"validation was 0.1 and is now 0.3; add --overwrite"):
                prepare(new.model_copy(update={"validation": 0.3}))
        prepare(new.model_copy(update={"overwrite": True}))
        assert contents(tmp_path / "out") == contents(whole)
        shutil.rmtree(tmp_path / "out")
        shutil.copytree(tmp_path / "old", tmp_path / "out")
    assert states == {"old", "between", "new"}
    assert contents(tmp_path / "out") == contents(whole)


def test_an_interrupt_while_the_new_corpus_takes_its_place_loses_neither(
    texts: Path, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(settings(texts, tmp_path / "out", tokenizer))
    changed = settings(texts, tmp_path / "out", tokenizer, shard_tokens=10_000, overwrite=True)
    with monkeypatch.context() as patch:
        patch.setattr(journal, "sync_folder", interrupting)
        with pytest.raises(KeyboardInterrupt):
            prepare(changed)
    monkeypatch.setattr(module, "read_blocks", lambda *_: pytest.fail("it read the sources again"))
    assert prepare(changed).reused
    Corpus.open(tmp_path / "out").verify()


def test_a_preparation_whose_files_are_lost_says_so(
    texts: Path, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "BLOCK_BYTES", 1 << 14)
    monkeypatch.setattr(module, "SYNC_SECONDS", 0.0)
    (texts / "x-damaged.txt.gz").write_bytes(gzip.compress(b"text" * 1000)[:-10])
    with pytest.raises(UserError, match="goes on from there"):
        prepare(settings(texts, tmp_path / "out", tokenizer))
    (texts / "x-damaged.txt.gz").unlink()
    last = sorted((tmp_path / "out" / ".preparing").glob("train-*.tokens"))[-1]
    os.truncate(last, 10)
    with pytest.raises(UserError, match=rf"cannot go on: {last} is missing or cut short; add --overwrite to start"):
        prepare(settings(texts, tmp_path / "out", tokenizer))
    prepare(settings(texts, tmp_path / "out", tokenizer, overwrite=True))
    Corpus.open(tmp_path / "out").verify()


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_corpus_is_made_again_when_asked(texts: Path, tmp_path: Path, tokenizer: Path, damage: str) -> None:
    out = tmp_path / "out"
    prepare(settings(texts, out, tokenizer))
    whole = contents(out)
    data = whole["train-00000.tokens"]
    (out / "train-00000.tokens").write_bytes(data[:-4] if damage == "cut" else data[:-4] + b"\0\1\0\1")
    if damage == "cut":
        with pytest.raises(UserError, match=r"train-00000.tokens is cut short: .*; add --overwrite"):
            prepare(settings(texts, out, tokenizer))
    assert not prepare(settings(texts, out, tokenizer, overwrite=True)).reused
    assert contents(out) == whole


def test_an_interrupted_preparation_notices_changes_to_what_it_read(
    texts: Path, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "BLOCK_BYTES", 1 << 14)
    monkeypatch.setattr(module, "SYNC_SECONDS", 0.0)
    out = tmp_path / "out"
    (texts / "x-damaged.txt.gz").write_bytes(gzip.compress(b"text" * 1000)[:-10])
    with pytest.raises(UserError, match=r"x-damaged.txt.gz is damaged .*the same command goes on from there"):
        prepare(settings(texts, out, tokenizer))
    with pytest.raises(UserError, match=r"interrupted and cannot go on: shard_tokens was 20000 and is now 9"):
        prepare(settings(texts, out, tokenizer, shard_tokens=9))
    before = (texts / "000.txt").stat().st_mtime_ns
    os.utime(texts / "000.txt", ns=(before, before + 1))
    with pytest.raises(UserError, match=r"cannot go on: .*000.txt has changed; add --overwrite"):
        prepare(settings(texts, out, tokenizer))
    os.utime(texts / "000.txt", ns=(before, before))
    # Starting again with larger shards leaves no file of the smaller ones.
    shutil.copytree(out, tmp_path / "again")
    (tmp_path / "again" / ".preparing" / "train-00077.tokens").write_bytes(b"left over")
    os.rename(texts / "x-damaged.txt.gz", tmp_path / "aside")
    prepare(settings(texts, tmp_path / "again", tokenizer, shard_tokens=10**6, overwrite=True))
    assert [path.name for path in sorted((tmp_path / "again").glob("train-*"))] == [
        "train-00000.documents",
        "train-00000.tokens",
    ]
    os.rename(tmp_path / "aside", texts / "x-damaged.txt.gz")
    # What it had not read yet may be mended.
    (texts / "x-damaged.txt.gz").write_bytes(gzip.compress(b"text " * 1000))
    prepare(settings(texts, out, tokenizer))
    prepare(settings(texts, tmp_path / "whole", tokenizer))
    assert contents(out) == contents(tmp_path / "whole")


def test_what_is_wrong_at_once_leaves_nothing(texts: Path, tmp_path: Path, tokenizer: Path) -> None:
    out = tmp_path / "deep" / "out"
    (texts / "records.jsonl").write_text('{"text": "good"}\n{"txt": 1}\n')
    with pytest.raises(UserError, match=r"records.jsonl line 2 has no field 'text'"):
        prepare(settings(texts, out, tokenizer))
    assert not out.exists()
    out.mkdir(parents=True)
    with pytest.raises(UserError, match=r"records.jsonl line 2"):
        prepare(settings(texts, out, tokenizer))
    assert list(out.iterdir()) == []


def test_a_corpus_without_text_is_an_error(tmp_path: Path, tokenizer: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "empty.txt").write_text(" \n")
    (folder / "binary").write_bytes(bytes(10))
    with pytest.raises(
        UserError, match=r"no text in the 2 files of .*1 binary file skipped, .*1 empty document\); check"
    ):
        prepare(settings(folder, tmp_path / "out", tokenizer))
    with pytest.raises(UserError, match=r"no text to train a tokenizer on"):
        prepare(settings(folder, tmp_path / "out", None, train_tokenizer=300))
    (folder / "one.txt").write_text("one document")
    with pytest.raises(UserError, match=r"every document fell to validation"):
        prepare(settings(folder, tmp_path / "out", tokenizer, validation=0.9999))
    assert not (tmp_path / "out").exists()
    report = prepare(settings(folder, tmp_path / "out", tokenizer, validation=1e-9))
    assert any(note.startswith("one document cannot be divided, so none is held out") for note in report.notes)
    with pytest.raises(UserError, match=r"split 'validation' .* is empty; prepare it again from more documents"):
        Corpus.open(tmp_path / "out", "validation")


def test_a_small_corpus_still_has_something_to_validate_on(texts: Path, tmp_path: Path, tokenizer: Path) -> None:
    report = prepare(settings(texts, tmp_path / "out", tokenizer, validation=1e-6))
    assert report.manifest.splits["validation"].documents == 1
    assert any("the one with the smallest hash was held out" in note for note in report.notes)
    assert Corpus.open(tmp_path / "out", "validation").documents == 1
    (texts / "000.txt").rename(texts / "zzz.txt")
    prepare(settings(texts, tmp_path / "again", tokenizer, validation=1e-6))
    one, other = (document(Corpus.open(tmp_path / name, "validation"), 0) for name in ("out", "again"))
    assert one == other


def test_names_may_be_any_bytes(tmp_path: Path, tokenizer: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in (b"not\xffutf8.txt", b"two\nlines.txt"):
        Path(os.fsdecode(bytes(folder) + b"/" + name)).write_bytes(b"some text and a wrong byte \xff")
    chosen = settings(folder, tmp_path / "out", tokenizer, validation=0)
    report = prepare(chosen)
    assert report.manifest.splits["train"].documents == 2
    named: dict = report.manifest.report["names"]  # pyrefly: ignore
    assert [Path(name).name for name in named["invalid_utf8"]] == ["not\\udcffutf8.txt", "two\\nlines.txt"]
    assert prepare(chosen).reused


def test_other_peoples_folders_are_left_alone(texts: Path, tmp_path: Path, tokenizer: Path) -> None:
    out = tmp_path / "thesis"
    out.mkdir()
    (out / "chapter-1.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(UserError, match=r"thesis is not empty and holds no corpus"):
            prepare(settings(texts, out, tokenizer, overwrite=overwrite))
    assert contents(out) == {"chapter-1.txt": b"years of work"}
    with pytest.raises(UserError, match=r"chapter-1.txt is a file"):
        prepare(settings(texts, out / "chapter-1.txt", tokenizer))
    with pytest.raises(UserError, match=r"chapter-1.txt/out is no place to write to: Not a directory"):
        prepare(settings(texts, out / "chapter-1.txt" / "out", tokenizer))


def test_two_at_once_do_not_mix(texts: Path, tmp_path: Path, tokenizer: Path) -> None:
    out = tmp_path / "out"
    with module.locked(out), pytest.raises(UserError, match=r"another process is preparing .*out right now"):
        prepare(settings(texts, out, tokenizer))
    prepare(settings(texts, out, tokenizer))


class FullDisk(io.BufferedRandom):
    """A file on a disk that takes so many bytes in all."""

    left = 0

    def write(self, data) -> int:
        FullDisk.left -= len(data)
        if FullDisk.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


@pytest.mark.parametrize(("room", "kept"), [(100, False), (150_000, True)])
def test_a_full_disk_is_said_and_the_rest_goes_on_later(
    texts: Path, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, room: int, kept: bool
) -> None:
    monkeypatch.setattr(reading, "BLOCK_BYTES", 1 << 14)
    monkeypatch.setattr(module, "SYNC_SECONDS", 0.0)
    prepare(settings(texts, tmp_path / "whole", tokenizer))
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(FullDisk, "left", room)
        patch.setattr(SplitWriter, "_opened", staticmethod(lambda path: FullDisk(io.FileIO(path, "r+b"))))
        with pytest.raises(TreadleError, match=r"the disk is full: could not write .*out/.preparing; free") as caught:
            prepare(settings(texts, out, tokenizer))
    assert not isinstance(caught.value, UserError)
    assert ("the same command goes on" in str(caught.value)) == kept == out.exists()
    prepare(settings(texts, out, tokenizer))
    assert contents(out) == contents(tmp_path / "whole")


def test_a_part_of_another_package_gives_documents_and_is_gone_on_from(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "BLOCK_BYTES", 1 << 12)
    monkeypatch.setattr(module, "SYNC_SECONDS", 0.0)
    broken = [True]

    def numbers(argument: str) -> Iterator[str | dict]:
        for number in range(int(argument)):
            if number == 400 and broken.pop():
                raise RuntimeError("the line is down")
            yield f"document number {number}" if number % 2 else {"text": f"record {number}"}

    monkeypatch.setitem(sources.sources._own, "numbers", numbers)
    chosen = PrepareSettings(sources=["numbers://500"], out=tmp_path / "out", tokenizer=str(tokenizer), validation=0)
    with pytest.raises(UserError, match=r"the source 'numbers' failed .*line is down.*goes on from there"):
        prepare(chosen)
    broken.append(False)
    prepare(chosen)
    corpus = Corpus.open(tmp_path / "out")
    found = [corpus.tokenizer().decode(document(corpus, n)) for n in range(corpus.documents)]
    assert found == [f"document number {n}" if n % 2 else f"record {n}" for n in range(500)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "choose one of --tokenizer"),
        ({"tokenizer": "x", "train_tokenizer": 300}, "choose one of --tokenizer"),
        (
            {"tokenizer": "x", "separator": "a", "document_bytes": 5000},
            "choose one of --separator and --document-bytes",
        ),
        ({"tokenizer": "x", "validation": 1.0}, "'validation' is 1.0: input should be less than 1"),
        ({"tokenizer": "x", "invalid_utf8": "drop"}, "'invalid_utf8' is 'drop': input should be 'replace', 'skip' or"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path: Path, options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_settings(PrepareSettings, {"sources": ["x"], "out": tmp_path, **options})


def test_ends_are_the_tokenizers_unless_chosen(texts: Path, tmp_path: Path, tokenizer: Path) -> None:
    whole = Tokenizer.load(tokenizer)
    found = {}
    for name, options in (("auto", {}), ("never", {"bos": "never", "eos": False})):
        prepare(settings(texts, tmp_path / name, tokenizer, **options))
        found[name] = document(Corpus.open(tmp_path / name), 0)
    assert found["auto"] == [whole.bos_id, *found["never"], whole.eos_ids[0]]
    bare = tmp_path / "bare"
    Tokenizer(whole.backend).save(bare)
    with pytest.raises(UserError, match="the tokenizer has no BOS token"):
        prepare(settings(texts, tmp_path / "x", bare, bos="always"))
