"""Samples of a fixed token budget: which tokens each one holds, and how it looks to the model.

Two ways to fill a sample:

- `concat` cuts the stream of documents into windows of exactly the budget; nothing is computed beforehand.
- `whole` keeps every document that fits in one piece: best-fit decreasing bin packing ("Fewer truncations improve
  language modeling", Ding et al. 2024), computed once and kept in a file; longer documents are split.

Either way every token except the first of each document is a target exactly once in an epoch.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from treadle.config import UserError
from treadle.config.files import atomic_file, cache_home
from treadle.config.progress import progress
from treadle.data.corpus import Corpus

Mode = Literal["concat", "whole"]
# So many documents are packed at a time: it bounds the memory, and costs next to nothing in how well bins are filled.
DOCUMENTS_AT_A_TIME = 1 << 20
PIECE = np.dtype([("start", "<i8"), ("length", "<i8")])
HEADER = np.dtype([("magic", "S8"), ("digest", "V32"), ("pieces", "<i8"), ("bins", "<i8")])
MAGIC = b"TDLBINS1"


@dataclass(frozen=True)
class Sample:
    """One sample of L tokens; the last `padding` of them are a sequence of their own that carries no weight.

    tokens, targets int64 [L]; positions int32 [L], from 0 in every sequence; starts int32 [S + 1], where sequences
    begin, and L; token_weights float32 [L], 0 where a token has no target that counts.
    """

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    positions: NDArray[np.int32]
    starts: NDArray[np.int32]
    token_weights: NDArray[np.float32]
    padding: int


class Packing(Protocol):
    """Cuts a corpus into samples."""

    corpus: Corpus
    samples: int

    def sample(self, number: int) -> Sample:
        """Return sample `number`, in the corpus's own order."""
        ...


def pack(corpus: Corpus, sequence_length: int, mode: Mode = "concat") -> Packing:
    """Return `corpus` cut into samples of `sequence_length` tokens. Raises UserError for a length below 2."""
    if sequence_length < 2:
        raise UserError(
            f"sequence_length is {sequence_length}; a sample needs at least 2 tokens, one to see and one to learn"
        )
    if mode == "concat":
        return ConcatPacking(corpus, sequence_length)
    if mode == "whole":
        return WholePacking(corpus, sequence_length)
    raise UserError(f"unknown packing '{mode}'; it is concat (cut the stream) or whole (keep documents whole)")


class ConcatPacking:
    """Window i holds the tokens [i L, (i + 1) L) of the corpus; the last one is padded."""

    def __init__(self, corpus: Corpus, sequence_length: int) -> None:
        self.corpus, self.length = corpus, sequence_length
        self.samples = -(-corpus.tokens // sequence_length)

    def sample(self, number: int) -> Sample:
        """Return window `number`."""
        start = number * self.length
        return assemble(self.corpus, [(start, min(start + self.length, self.corpus.tokens))], self.length)


class WholePacking:
    """Bins of whole documents (and of the pieces of those that are longer than a sample)."""

    def __init__(self, corpus: Corpus, sequence_length: int) -> None:
        self.corpus, self.length = corpus, sequence_length
        self._ends, self._pieces = _stored_bins(corpus, sequence_length)
        self.samples = len(self._ends)

    def sample(self, number: int) -> Sample:
        """Return bin `number`."""
        if not 0 <= number < self.samples:
            raise IndexError(f"sample {number} is outside of 0 to {self.samples - 1}")
        pieces = self._pieces[self._ends[number - 1] if number else 0 : self._ends[number]]
        spans = [(int(piece["start"]), int(piece["start"] + piece["length"])) for piece in pieces]
        return assemble(self.corpus, spans, self.length)


def assemble(corpus: Corpus, spans: list[tuple[int, int]], length: int) -> Sample:
    """Return the sample that holds the token spans [start, end) one after another, padded to `length`."""
    tokens, targets = np.zeros(length, np.int64), np.zeros(length, np.int64)
    weights = np.zeros(length, np.float32)
    starts, filled = [], 0
    for start, end in spans:
        count = end - start
        rows = slice(filled, filled + count)
        following = min(end + 1, corpus.tokens)
        read = corpus.read(start, following)
        tokens[rows] = read[:count]
        targets[filled : filled + following - start - 1] = read[1:]
        bounds = corpus.boundaries(start + 1, end) - start
        row_weights = weights[rows]
        row_weights[: following - start - 1] = corpus.mask(start + 1, following)
        row_weights[bounds - 1] = 0.0
        starts.append(np.array([filled], np.int64))
        starts.append(bounds[bounds < count] + filled)
        filled += count
    if filled < length:
        starts.append(np.array([filled], np.int64))
    starts.append(np.array([length], np.int64))
    targets[weights == 0] = 0
    edges = np.concatenate(starts).astype(np.int32)
    positions = np.arange(length, dtype=np.int32) - np.repeat(edges[:-1], np.diff(edges))
    return Sample(tokens, targets, positions, edges, weights, length - filled)


def best_fit(lengths: NDArray[np.int64], capacity: int) -> tuple[NDArray[np.int64], int]:
    """Return (for each item the number of its bin, how many bins) by best-fit decreasing; lengths are 1 to `capacity`.

    All items of one length are placed at once, so the work grows with the number of different lengths and spaces, not
    with the number of items. Each bin is filled before the next one, as placing them one by one would do.
    """
    bin_of = np.empty(len(lengths), np.int64)
    order = np.argsort(-lengths, kind="stable")
    edges = np.flatnonzero(np.diff(lengths[order], prepend=-1, append=-1))
    by_space: list[list[NDArray[np.int64]]] = [[] for _ in range(capacity + 1)]
    spaces = 0  # bit s is set where a bin with exactly s free tokens exists
    bins = 0
    for first, last in itertools.pairwise(edges):
        waiting, length = order[first:last], int(lengths[order[first]])
        while len(waiting):
            fitting = spaces >> length
            if fitting:
                space = length + (fitting & -fitting).bit_length() - 1
                group = by_space[space].pop()
                if not by_space[space]:
                    spaces ^= 1 << space
            else:
                space = capacity
                group = np.arange(bins, bins - (-len(waiting) // (capacity // length)))
                bins += len(group)
            each = min(space // length, len(waiting))
            used = min(len(group), len(waiting) // each)
            bin_of[waiting[: used * each]] = np.repeat(group[:used], each)
            waiting = waiting[used * each :]
            for rest, left in ((group[:used], space - each * length), (group[used:], space)):
                if len(rest) and left:
                    by_space[left].append(rest)
                    spaces |= 1 << left
    return bin_of, bins


def _stored_bins(corpus: Corpus, length: int) -> tuple[NDArray[np.int64], NDArray]:
    """Return (where the pieces of each bin end, the pieces), memory-mapped from a file that is made on first use."""
    name = f"{corpus.split}-{length}.bins"
    digest = hashlib.sha256(corpus.fingerprint.encode()).digest()
    places = [corpus.folder / "packing" / name, cache_home() / "packing" / digest.hex()[:16] / name]
    for path in places:
        if path.is_file() and (found := _read_bins(path, digest)) is not None:
            return found
    for path in places:
        try:
            _write_bins(path, corpus, length, digest)
        except (OSError, UserError):
            # A corpus may lie where one cannot write; the cache folder then holds its bins.
            if path == places[-1]:
                raise
            continue
        found = _read_bins(path, digest)
        assert found is not None
        return found
    raise AssertionError("unreachable")


def _write_bins(path: Path, corpus: Corpus, length: int, digest: bytes) -> None:
    """Write the file: a header, the pieces, where each bin ends. Only the ends are held in memory."""
    title = f"Packing whole documents into {length} tokens"
    with atomic_file(path) as file, progress(title, total=corpus.documents, unit="documents") as step:
        file.write(bytes(HEADER.itemsize))
        ends, count = [np.zeros(1, np.int64)], 0
        for first in range(0, corpus.documents, DOCUMENTS_AT_A_TIME):
            last = min(first + DOCUMENTS_AT_A_TIME, corpus.documents)
            pieces = _pieces(corpus.document_spans(first, last), length)
            bin_of, _ = best_fit(pieces["length"], length)
            order, in_bin = _by_bin(bin_of)
            file.write(pieces[order].tobytes())
            ends.append(np.cumsum(in_bin) + count)
            count += len(pieces)
            step(last - first)
        written = np.concatenate(ends)[1:].astype("<i8")
        file.write(written.tobytes())
        file.seek(0)
        file.write(np.array([(MAGIC, digest, count, len(written))], HEADER).tobytes())


def _read_bins(path: Path, digest: bytes) -> tuple[NDArray[np.int64], NDArray] | None:
    """Return what `_write_bins` wrote, or None where the file was made for another corpus or is not whole."""
    with path.open("rb") as file:
        start = file.read(HEADER.itemsize)
    if len(start) < HEADER.itemsize:
        return None
    header = np.frombuffer(start, HEADER)[0]
    pieces, bins = int(header["pieces"]), int(header["bins"])
    size = HEADER.itemsize + pieces * PIECE.itemsize + bins * 8
    if header["magic"] != MAGIC or bytes(header["digest"]) != digest or path.stat().st_size != size:
        return None
    ends_at = HEADER.itemsize + pieces * PIECE.itemsize
    return (
        np.memmap(path, "<i8", "r", offset=ends_at, shape=(bins,)),
        np.memmap(path, PIECE, "r", offset=HEADER.itemsize, shape=(pieces,)),
    )


def _pieces(spans: NDArray[np.int64], length: int) -> NDArray:
    """Return the documents as pieces of at most `length` tokens, in order."""
    starts, sizes = spans[:, 0], spans[:, 1] - spans[:, 0]
    per_document = -(-sizes // length)
    number = np.arange(per_document.sum()) - np.repeat(np.cumsum(per_document) - per_document, per_document)
    pieces = np.empty(len(number), PIECE)
    pieces["start"] = np.repeat(starts, per_document) + number * length
    pieces["length"] = np.minimum(np.repeat(spans[:, 1], per_document) - pieces["start"], length)
    return pieces


def _by_bin(bin_of: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (the items bin by bin, how many each bin holds), bins in the order of their first item."""
    _, first, inverse, counts = np.unique(bin_of, return_index=True, return_inverse=True, return_counts=True)
    ranks = np.empty(len(first), np.int64)
    by_first = np.argsort(first)
    ranks[by_first] = np.arange(len(first))
    return np.argsort(ranks[inverse], kind="stable"), counts[by_first]
