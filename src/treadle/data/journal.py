"""The folder of a corpus while it is being made: whose it is, how far it got, whether what it is made from changed.

Everything is written into `.preparing/` within the folder of the corpus: a corpus that is there stays whole until the
new one is complete, and only then makes way for it (`install`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Collection, Generator, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from treadle.config import Settings, UserError
from treadle.config.files import disk_errors, inside, read_json, remove_leftovers, sync_folder, write_atomically
from treadle.data.documents import Counts
from treadle.data.reading import Cursor
from treadle.data.shards import (
    MANIFEST,
    PREPARING,
    SPLITS,
    FileKind,
    Manifest,
    check_file,
    file_digest,
    read_manifest,
)
from treadle.data.sources import Source, difference, to_lines
from treadle.data.writer import SplitState, SplitWriter

JOURNAL = f"{PREPARING}/journal.json"
SOURCES = "sources.jsonl"
_SHARD_FILE = re.compile(rf"({'|'.join(SPLITS)})-\d{{5,}}\.({'|'.join(get_args(FileKind))})")


class Journal(Settings):
    """What is durable on disk. `validation` is the share held out, once that is known."""

    validation: float | None = None
    cursor: Cursor = Cursor()
    position: int = 0
    splits: dict[str, SplitState] = {}
    counts: Counts = Counts()
    skipped: int = 0
    skipped_names: list[str] = []
    seconds: float = 0.0


def discard(out: Path, folder_too: bool = False) -> None:
    """Remove what was prepared so far; a finished corpus in the folder stays."""
    shutil.rmtree(out / PREPARING, ignore_errors=True)
    if folder_too:
        with contextlib.suppress(OSError):
            out.rmdir()


def install(out: Path) -> None:
    """Put the complete corpus in `.preparing/` in place of the one that is there, if any. Needs the lock.

    Each step may be the last of a killed process; called again, it goes on. The manifest goes first and comes last, so
    that what lies in between is never taken for a corpus.
    """
    work = out / PREPARING
    manifest = read_manifest(work)
    written = {
        file.name for split in manifest.splits.values() for shard in split.shards for file in shard.files.values()
    }
    with disk_errors(out):
        (out / MANIFEST).unlink(missing_ok=True)
        sync_folder(out)
        for name in sorted({*written, SOURCES}):
            if (work / name).exists():
                os.replace(work / name, out / name)
        if (work / "tokenizer").is_dir():
            shutil.rmtree(out / "tokenizer", ignore_errors=True)
            os.rename(work / "tokenizer", out / "tokenizer")
        shutil.rmtree(out / "packing", ignore_errors=True)
        remove_shards(out, but=written)
        sync_folder(out)
        os.replace(work / MANIFEST, out / MANIFEST)
        sync_folder(out)
    shutil.rmtree(work, ignore_errors=True)
    remove_leftovers(out)


def tidy(out: Path, decisive: dict[str, Any]) -> str:
    """Remove what a killed process left beside the finished corpus, made with the settings `decisive`.

    A corpus that was to replace it and is not finished stays; then it says so, else it returns "".
    """
    work = out / PREPARING
    if not work.is_dir():
        return ""
    try:
        with locked(out):
            if read_json(work / "settings.json") in (None, decisive):
                discard(out)
                remove_leftovers(out)
                return ""
    except UserError:
        pass  # another process is at work there, or it may not be removed
    return f"another corpus was begun in {work}: the command that began it goes on, removing the folder gives it up"


def remove_shards(folder: Path, but: Collection[str] = ()) -> None:
    """Remove the files of shards, `but` those named."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if _SHARD_FILE.fullmatch(path.name) and path.name not in but:
            path.unlink()


def refuse_foreign(out: Path) -> None:
    """Raise UserError where the folder holds something else than a corpus."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; choose another folder with --out")
    if out.is_dir() and any(out.iterdir()) and not (out / MANIFEST).is_file() and not (out / PREPARING).is_dir():
        raise UserError(f"{out} is not empty and holds no corpus; choose another folder with --out")


def changed_since(
    out: Path,
    before: dict[str, Any],
    after: dict[str, Any],
    found: list[Source],
    whole: bool,
    cursor: Cursor = Cursor(),
) -> str | None:
    """Return in words what differs from what the corpus was made from (if not `whole`: up to `cursor`), or None."""
    for key in after:
        # What was refused has not been met yet, so another way with it changes nothing that was written.
        lenient = not whole and key in ("invalid_utf8", "bad_records") and before.get(key) == "error"
        if before.get(key) != after[key] and not lenient:
            if key in ("tokenizer", "train_tokenizer"):
                return "the tokenizer is another one"
            return f"{key} was {before.get(key)} and is now {after[key]}"
    place = out / (SOURCES if whole else f"{PREPARING}/{SOURCES}")
    old, new = place.read_bytes() if place.is_file() else b"", to_lines(found)
    if not whole and after["tokenizer"] is not None:
        # A given tokenizer: what was not read yet may have changed, a damaged file may have been replaced.
        read = cursor.file + (cursor.offset > 0 or cursor.record > 0)
        old, new = (b"".join(lines.splitlines(keepends=True)[:read]) for lines in (old, new))
    return difference(old, new)


def damaged(out: Path, manifest: Manifest, thoroughly: bool) -> str | None:
    """Return in words which file of a finished corpus is not as it was made (`thoroughly`: by checksum), or None."""
    for split in manifest.splits.values():
        for shard in split.shards:
            for file in shard.files.values():
                try:
                    path = check_file(out, file)
                    if thoroughly and file_digest(path) != file.sha256:
                        return f"{path} is damaged"
                except UserError as error:
                    return str(error).split(";")[0]
    return None if (out / "tokenizer").is_dir() else "its tokenizer is missing"


@contextlib.contextmanager
def locked(out: Path) -> Generator[None]:
    """Hold the folder for this process; the system lets go of it however the process ends."""
    with disk_errors(out):
        (out / PREPARING).mkdir(parents=True, exist_ok=True)
        lock = (out / PREPARING / "lock").open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another process is preparing {out} right now; wait for it, or choose another folder"
            ) from None
        yield


def begin(out: Path, decisive: dict[str, Any], found: list[Source], overwrite: bool) -> Journal:
    """Return where to go on from: an interrupted preparation of the same, or the start."""
    preparing = out / PREPARING
    journal = changed = None
    before = read_json(preparing / "settings.json")
    if before is not None:
        try:
            content = (out / JOURNAL).read_bytes() if (out / JOURNAL).is_file() else b"{}"
            journal = Journal.model_validate_json(content)
            changed = changed_since(out, before, decisive, found, whole=False, cursor=journal.cursor)
            changed = changed or lost(preparing, journal)
        except ValidationError:
            changed = "it was begun by another version of Treadle"
        if changed is not None and not overwrite:
            raise UserError(
                f"the preparation of {out} was interrupted and cannot go on: {changed}; add --overwrite to start again"
            )
    if journal is None or changed is not None:
        journal = Journal()
        (out / JOURNAL).unlink(missing_ok=True)
        shutil.rmtree(preparing / "tokenizer", ignore_errors=True)
        remove_shards(preparing)
    write_atomically(preparing / SOURCES, to_lines(found))
    write_atomically(preparing / "settings.json", json.dumps(decisive).encode())
    return journal


def lost(preparing: Path, journal: Journal) -> str | None:
    """Return in words which file of an interrupted preparation is not as long as its journal says, or None."""
    least: dict[str, int] = {}
    for split, state in journal.splits.items():
        least |= {file.name: file.bytes for shard in state.closed for file in shard.files.values()}
        if state.tokens:
            stem = f"{split}-{len(state.closed):05d}"
            # Tokens take 2 bytes or 4; here it is enough that they are there.
            least |= {f"{stem}.tokens": 2 * state.tokens, f"{stem}.documents": 8 * state.documents}
            least |= {f"{stem}.mask": state.tokens} if state.has_mask else {}
    for name, size in least.items():
        path = inside(preparing, name)
        if not path.is_file() or path.stat().st_size < size:
            return f"{path} is missing or cut short"
    return None


def sync(out: Path, journal: Journal, writers: Mapping[str, SplitWriter]) -> None:
    """Make everything up to here durable, then say so in the journal."""
    states = {split: writer.sync() for split, writer in writers.items()}
    state = journal.model_copy(update={"splits": states})
    write_atomically(out / JOURNAL, state.model_dump_json().encode())
