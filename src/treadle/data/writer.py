"""Writing shards: appended to, made durable now and then, and continued after an interruption."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from treadle.config import Settings
from treadle.config.files import disk_errors
from treadle.data.shards import FileKind, FileRecord, ShardRecord, SplitRecord, file_digest


@dataclass(frozen=True)
class TokenizedDocuments:
    """Some documents of one split, as tokens laid side by side.

    lengths int64 [documents]; mask uint8 [T], 1 where the token is learnt, or None where all are. `continues` says that
    the first document goes on with the one that was written last. `text_bytes` and `words` count the text.
    """

    tokens: NDArray[np.unsignedinteger]
    lengths: NDArray[np.int64]
    mask: NDArray[np.uint8] | None
    continues: bool
    text_bytes: int
    words: int


class SplitState(Settings):
    """How far a split was written: what an interrupted preparation goes on from."""

    closed: list[ShardRecord] = []
    tokens: int = 0
    documents: int = 0
    has_mask: bool = False
    learnt: int = 0
    text_bytes: int = 0
    words: int = 0


class SplitWriter:
    """Appends documents to the shards of one split; a shard ends with the document that fills it."""

    def __init__(
        self, folder: Path, split: str, dtype: str, shard_tokens: int, state: SplitState | None = None
    ) -> None:
        """Start, or go on from `state`: whatever the files hold beyond it is cut off."""
        self.folder, self.split, self.shard_tokens = folder, split, shard_tokens
        self.dtype = np.dtype(dtype).newbyteorder("<")
        state = state or SplitState()
        self.closed = list(state.closed)
        self.tokens, self.documents, self.has_mask = state.tokens, state.documents, state.has_mask
        self.learnt, self.text_bytes, self.words = state.learnt, state.text_bytes, state.words
        self._files: dict[FileKind, BinaryIO] = {}
        if self.tokens:
            self._open("tokens", self.tokens * self.dtype.itemsize)
            self._open("documents", self.documents * 8)
            if self.has_mask:
                self._open("mask", self.tokens)

    def add(self, batch: TokenizedDocuments) -> None:
        """Append documents. Raises TreadleError when the disk is full."""
        with disk_errors(self.folder):
            self._add(batch)

    def _add(self, batch: TokenizedDocuments) -> None:
        self.text_bytes += batch.text_bytes
        self.words += batch.words
        ends = np.cumsum(batch.lengths)
        first, done = 0, 0
        while first < len(ends):
            goes_on = batch.continues and first == 0
            if self.tokens >= self.shard_tokens and not goes_on:
                self._close_shard()
            # The shard takes documents until one has filled it.
            room = self.shard_tokens - self.tokens
            last = min(int(np.searchsorted(ends - done, room)) + 1, len(ends)) if room > 0 else first + 1
            last = max(last, first + 1)
            rows = slice(done, int(ends[last - 1]))
            starts = np.concatenate([[done], ends[first : last - 1]]) - done + self.tokens
            self._append(
                batch.tokens[rows], starts[1:] if goes_on else starts, None if batch.mask is None else batch.mask[rows]
            )
            first, done = last, rows.stop

    def _append(
        self, tokens: NDArray[np.unsignedinteger], starts: NDArray[np.int64], mask: NDArray[np.uint8] | None
    ) -> None:
        if not self._files:
            self._open("tokens", 0)
            self._open("documents", 0)
        if mask is not None and not self.has_mask:
            self.has_mask = True
            file = self._open("mask", 0)
            for first in range(0, self.tokens, 1 << 20):
                file.write(b"\1" * min(1 << 20, self.tokens - first))
        self._files["tokens"].write(tokens.astype(self.dtype, copy=False).tobytes())
        self._files["documents"].write(starts.astype("<i8").tobytes())
        if self.has_mask:
            self._files["mask"].write(b"\1" * len(tokens) if mask is None else mask.tobytes())
        # The first token of a document is no target.
        learnt = len(tokens) if mask is None else int(mask.sum())
        at_start = starts - self.tokens
        self.learnt += learnt - (len(starts) if mask is None else int(mask[at_start].sum()))
        self.tokens += len(tokens)
        self.documents += len(starts)

    def sync(self) -> SplitState:
        """Make what was added durable and return the state to go on from. Raises TreadleError when the disk is full."""
        with disk_errors(self.folder):
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
        return SplitState(
            closed=self.closed,
            tokens=self.tokens,
            documents=self.documents,
            has_mask=self.has_mask,
            learnt=self.learnt,
            text_bytes=self.text_bytes,
            words=self.words,
        )

    def finish(self) -> SplitRecord:
        """Close the last shard and return the record of the split."""
        with disk_errors(self.folder):
            if self.tokens:
                self._close_shard()
        return SplitRecord(
            documents=sum(shard.documents for shard in self.closed),
            tokens=sum(shard.tokens for shard in self.closed),
            learnt=self.learnt,
            bytes=self.text_bytes,
            words=self.words,
            shards=self.closed,
        )

    def abandon(self) -> None:
        """Close the files without completing them."""
        for file in self._files.values():
            try:
                file.close()
            except OSError:
                # A full disk also fails the flush in close; the error that matters was raised before.
                continue
        self._files = {}

    def _close_shard(self) -> None:
        self._files["documents"].write(np.array([self.tokens], "<i8").tobytes())
        records: dict[FileKind, FileRecord] = {}
        for kind, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            path = self._path(kind)
            file.close()
            records[kind] = FileRecord(name=path.name, bytes=path.stat().st_size, sha256=file_digest(path))
        self.closed.append(ShardRecord(tokens=self.tokens, documents=self.documents, files=records))
        self._files = {}
        self.tokens = self.documents = 0
        self.has_mask = False

    def _path(self, kind: FileKind) -> Path:
        return self.folder / f"{self.split}-{len(self.closed):05d}.{kind}"

    def _open(self, kind: FileKind, size: int) -> BinaryIO:
        path = self._path(kind)
        path.touch()
        file = self._opened(path)
        file.truncate(size)
        file.seek(size)
        self._files[kind] = file
        return file

    @staticmethod
    def _opened(path: Path) -> BinaryIO:
        return path.open("r+b")
