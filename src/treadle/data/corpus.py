"""Reading a prepared corpus: one stream of tokens over memory-mapped shards, with its document boundaries."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from treadle.config import UserError
from treadle.config.progress import progress
from treadle.data.shards import Manifest, ShardRecord, advise_random, file_digest, inside, map_file, read_manifest

if TYPE_CHECKING:
    from treadle.model.tokenizer import Tokenizer


class HasFingerprint(Protocol):
    """What a tokenizer is to a corpus."""

    @property
    def fingerprint(self) -> str: ...


class Corpus:
    """One split of a prepared corpus: tokens numbered from 0 through all its shards, and where documents begin.

    Holds file mappings and a few numbers a shard, whatever the size of the corpus. Safe to read from several threads.
    """

    def __init__(self, folder: Path, split: str, manifest: Manifest) -> None:
        """Use `Corpus.open`."""
        self.folder, self.split, self.manifest = folder, split, manifest
        record = manifest.splits[split]
        self.tokens, self.documents = record.tokens, record.documents
        self.text_bytes, self.words = record.bytes, record.words
        self.vocabulary_size = manifest.tokenizer.vocabulary_size
        self.has_mask = any("mask" in shard.files for shard in record.shards)
        self._shards = [_Shard(folder, shard, manifest.dtype) for shard in record.shards]
        self._token_ends = np.array(list(itertools.accumulate(s.length for s in self._shards)), np.int64)
        self._document_ends = np.array(list(itertools.accumulate(s.documents for s in self._shards)), np.int64)
        if (self.tokens, self.documents) != (_last(self._token_ends), _last(self._document_ends)):
            raise UserError(
                f"{folder}/manifest.json contradicts itself: the shards of '{split}' do not add up; "
                "remove the folder and prepare the corpus again"
            )

    @classmethod
    def open(cls, folder: str | Path, split: str = "train") -> Corpus:
        """Return a split of the corpus in `folder`.

        Sizes and headers are checked here, contents by `verify`. Raises UserError for a folder that is no corpus, a
        damaged file, or a split that is missing or empty.
        """
        folder = Path(folder)
        manifest = read_manifest(folder)
        record = manifest.splits.get(split)
        if record is None:
            raise UserError(f"the corpus {folder} has no split '{split}'; it has: {', '.join(manifest.splits)}")
        if record.tokens == 0:
            way_out = "prepare it again from more documents"
            if split == "validation":
                way_out += " (--document-bytes cuts one into many) or with a --validation above 0"
            raise UserError(f"the split '{split}' of the corpus {folder} is empty; {way_out}")
        return cls(folder, split, manifest)

    @property
    def fingerprint(self) -> str:
        """A SHA-256 that stands for the contents of the whole corpus and for the split."""
        return f"{self.manifest.fingerprint}/{self.split}"

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer that made the tokens, from the corpus's own folder."""
        from treadle.model.tokenizer import Tokenizer

        return Tokenizer.load(self.folder / "tokenizer")

    def check_tokenizer(self, tokenizer: HasFingerprint, whose: str = "the model") -> None:
        """Raise UserError unless the corpus was made with this very tokenizer."""
        if tokenizer.fingerprint != self.manifest.tokenizer.fingerprint:
            raise UserError(
                f"the corpus {self.folder} was made with another tokenizer than {whose} has (fingerprint "
                f"{self.manifest.tokenizer.fingerprint[:12]} against {tokenizer.fingerprint[:12]}); prepare it again "
                f"with --tokenizer pointing to {whose}"
            )

    def read(self, start: int, end: int) -> NDArray[np.int64]:
        """Return the tokens numbered [start, end)."""
        return self._gather(start, end, np.int64, lambda shard, a, b: shard.tokens[a:b])

    def mask(self, start: int, end: int) -> NDArray[np.bool_]:
        """Return for the tokens [start, end) whether each is learnt: all are, but for the questions in a chat."""
        if not self.has_mask:
            return np.ones(end - start, np.bool_)
        return self._gather(start, end, np.bool_, lambda shard, a, b: shard.mask_slice(a, b))

    def boundaries(self, start: int, end: int) -> NDArray[np.int64]:
        """Return the numbers of the tokens in [start, end] at which a document begins, or the corpus ends."""
        found = []
        for number in range(self._shard_of(start), len(self._shards)):
            shard, base = self._shards[number], self._token_ends[number] - self._shards[number].length
            if base > end:
                break
            first, last = np.searchsorted(shard.starts, (start - base, end - base + 1))
            found.append(shard.starts[first : min(last, shard.documents)].astype(np.int64) + base)
        if end >= self.tokens:
            found.append(np.array([self.tokens], np.int64))
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def document_spans(self, first: int, last: int) -> NDArray[np.int64]:
        """Return [last - first, 2]: the first token and the end of each of the documents numbered [first, last)."""
        parts = []
        shard_number = int(np.searchsorted(self._document_ends, first, side="right"))
        while first < last:
            shard = self._shards[shard_number]
            base = int(self._token_ends[shard_number]) - shard.length
            offset = first - (int(self._document_ends[shard_number]) - shard.documents)
            stop = min(shard.documents, offset + last - first)
            starts = shard.starts[offset : stop + 1].astype(np.int64) + base
            parts.append(np.stack([starts[:-1], starts[1:]], axis=1))
            first += stop - offset
            shard_number += 1
        return np.concatenate(parts) if parts else np.empty((0, 2), np.int64)

    def verify(self) -> None:
        """Read every file of the split, compare checksums and boundaries. Raises UserError naming the damaged file."""
        files = [file for shard in self.manifest.splits[self.split].shards for file in shard.files.values()]
        with progress(f"Verifying {self.folder}", total=sum(file.bytes for file in files), unit="B") as step:
            for file in files:
                path = inside(self.folder, file.name)
                if file_digest(path) != file.sha256:
                    raise UserError(
                        f"{path} is damaged: its SHA-256 differs from the manifest's; copy it again from where the "
                        "corpus was made, or prepare it again with --overwrite"
                    )
                step(file.bytes)
        for shard in self._shards:
            shard.verify()

    def _shard_of(self, token: int) -> int:
        return int(np.searchsorted(self._token_ends, token, side="right"))

    def _gather(self, start: int, end: int, dtype: type, piece: Callable[[_Shard, int, int], NDArray]) -> NDArray:
        if not 0 <= start <= end <= self.tokens:
            raise IndexError(f"tokens {start} to {end} are outside of 0 to {self.tokens}")
        out = np.empty(end - start, dtype)
        number, done = self._shard_of(start), 0
        while done < end - start:
            shard = self._shards[number]
            offset = start + done - (int(self._token_ends[number]) - shard.length)
            count = min(end - start - done, shard.length - offset)
            out[done : done + count] = piece(shard, offset, offset + count)
            done += count
            number += 1
        return out


class _Shard:
    """The mapped files of one shard."""

    def __init__(self, folder: Path, record: ShardRecord, dtype: str) -> None:
        self.length, self.documents = record.tokens, record.documents
        self.path = folder / record.files["tokens"].name
        self.tokens = map_file(folder, record.files["tokens"], dtype, record.tokens)
        self.starts = map_file(folder, record.files["documents"], "int64", record.documents + 1)
        mask = record.files.get("mask")
        self.mask = map_file(folder, mask, "uint8", record.tokens) if mask else None
        if self.starts[0] != 0 or self.starts[-1] != record.tokens:
            raise UserError(
                f"{folder / record.files['documents'].name} is damaged: it does not span the {record.tokens} tokens of "
                "its shard; prepare it again with --overwrite"
            )
        advise_random(self.tokens)

    def mask_slice(self, start: int, end: int) -> NDArray[np.bool_]:
        if self.mask is None:
            return np.ones(end - start, np.bool_)
        return self.mask[start:end].astype(np.bool_)

    def verify(self) -> None:
        for first in range(0, self.documents, 1 << 20):
            if (np.diff(self.starts[first : first + (1 << 20) + 1]) <= 0).any():
                raise UserError(
                    f"the document boundaries of {self.path} are out of order; prepare it again with --overwrite"
                )


def _last(ends: NDArray[np.int64]) -> int:
    return int(ends[-1]) if len(ends) else 0
