"""What a prepared corpus is on disk: plain little-endian arrays, and a manifest that is written last.

manifest.json                    counts, settings, the tokenizer's fingerprint, size and SHA-256 of every file
tokenizer/                       the tokenizer that made the tokens
sources.jsonl                    what was read: one line a file
train-00000.tokens               token ids, uint16 or uint32
train-00000.documents            int64: where each document begins in the shard, and at last the shard's length
train-00000.mask                 uint8: 1 where the token is learnt; only for chat data
validation-00000.tokens ...
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from treadle.config import Settings, UserError
from treadle.config.files import inside
from treadle.config.settings import parse_settings

FORMAT = "treadle-corpus"
VERSION = 1
MANIFEST = "manifest.json"
# There while a corpus is being made.
PREPARING = ".preparing"
SPLITS = ("train", "validation")
MAX_MANIFEST_BYTES = 1 << 30
FileKind = Literal["tokens", "documents", "mask"]


class FileRecord(Settings):
    """One file of a shard."""

    name: str
    bytes: int
    sha256: str


class ShardRecord(Settings):
    """One shard: a run of whole documents."""

    tokens: int
    documents: int
    files: dict[FileKind, FileRecord]


class SplitRecord(Settings):
    """The counts and shards of one split; `learnt` are the tokens that carry loss, `bytes` and `words` are of text."""

    documents: int
    tokens: int
    learnt: int
    bytes: int
    words: int
    shards: list[ShardRecord]


class TokenizerRecord(Settings):
    """Which tokenizer made the tokens, and what it put around each document."""

    fingerprint: str
    vocabulary_size: int
    bos_id: int | None
    eos_id: int | None


class Manifest(Settings):
    """The contents of manifest.json."""

    format: Literal["treadle-corpus"] = FORMAT
    version: Literal[1] = VERSION
    dtype: Literal["uint16", "uint32"]
    tokenizer: TokenizerRecord
    splits: dict[str, SplitRecord]
    settings: dict[str, object] = {}
    sources: dict[str, object] = {}
    report: dict[str, object] = {}

    @property
    def fingerprint(self) -> str:
        """A SHA-256 of what a reader sees: the tokenizer and every shard's bytes."""
        parts = [self.tokenizer.fingerprint, self.dtype]
        for name, split in sorted(self.splits.items()):
            parts.append(name)
            parts += [file.sha256 for shard in split.shards for _, file in sorted(shard.files.items())]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def token_dtype(vocabulary_size: int) -> Literal["uint16", "uint32"]:
    """Return the smallest dtype on disk that holds every id."""
    return "uint16" if vocabulary_size <= 1 << 16 else "uint32"


def read_manifest(folder: str | Path) -> Manifest:
    """Return the manifest of a prepared corpus. Raises UserError naming what `folder` is instead."""
    folder = Path(folder)
    path = folder / MANIFEST
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise UserError(f"the corpus {folder} {what}; make it with 'treadle data prepare SOURCES --out {folder}'")
    if not path.is_file():
        if (folder / PREPARING).is_dir():
            raise UserError(
                f"the corpus {folder} is not finished: its preparation was interrupted; run the same "
                "'treadle data prepare' again and it goes on where it stopped"
            )
        raise UserError(
            f"{folder} is not a prepared corpus (it has no {MANIFEST}); make one with "
            "'treadle data prepare SOURCES --out DIR'"
        )
    if path.stat().st_size > MAX_MANIFEST_BYTES:
        raise UserError(f"{path} is larger than {MAX_MANIFEST_BYTES >> 20} MiB, too large for a manifest")
    try:
        tree = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}; remove the folder and prepare the corpus again") from error
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        raise UserError(f"{path} is the manifest of something else than a corpus; give the folder of a prepared one")
    if tree.get("version") != VERSION:
        raise UserError(
            f"{path} has format version {tree.get('version')}, this Treadle reads {VERSION}; remove the folder and "
            "prepare the corpus again"
        )
    return parse_settings(Manifest, tree, source=str(path))


def check_file(folder: Path, file: FileRecord) -> Path:
    """Return the path of a shard's file once its size is as recorded. Raises UserError naming it."""
    path = inside(folder, file.name)
    if not path.is_file():
        raise UserError(
            f"{path} is missing; copy it from where the corpus was made, or prepare it again with --overwrite"
        )
    size = path.stat().st_size
    if size != file.bytes:
        state = "cut short" if size < file.bytes else "longer than it was made"
        raise UserError(
            f"{path} is {state}: {size} bytes instead of {file.bytes}; copy it again from where the corpus was made, "
            "or prepare it again with --overwrite"
        )
    return path


def map_file(folder: Path, file: FileRecord, dtype: str, items: int) -> NDArray:
    """Return the file mapped, read-only, as `items` little-endian numbers. Raises UserError if it is damaged."""
    path = check_file(folder, file)
    stored = np.dtype(dtype).newbyteorder("<")
    if file.bytes != items * stored.itemsize:
        raise UserError(
            f"{path} holds {file.bytes} bytes, which are not {items} numbers of {dtype} as {MANIFEST} says; "
            "prepare it again with --overwrite"
        )
    if items == 0:
        return np.empty(0, stored)
    return np.memmap(path, dtype=stored, mode="r", shape=(items,))


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal, read in bounded pieces and then dropped from the page cache."""
    with path.open("rb", buffering=0) as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return found


def advise_random(array: NDArray) -> None:
    """Tell the system that the array is read in pieces, in no order, so that it does not read ahead."""
    mapped = getattr(array, "_mmap", None)
    if mapped is not None and hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)
