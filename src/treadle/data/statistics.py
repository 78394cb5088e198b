"""What a prepared corpus holds: counts, how long documents are, which tokens occur, and a few samples."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.config.progress import progress
from treadle.data.corpus import Corpus
from treadle.data.order import Permutation

MEASURED_TOKENS = 64 << 20
MEASURED_DOCUMENTS = 8 << 20
STRETCHES = 64
FREQUENT = 20


@dataclass(frozen=True)
class Stretch:
    """A stretch of the corpus that starts with document `document`: its tokens, whether each is learnt, boundaries."""

    document: int
    tokens: list[int]
    learnt: list[bool]
    starts: list[int]
    text: str


@dataclass(frozen=True)
class Statistics:
    """Counts are of the whole split; `measured_tokens` and `measured_documents` say how much the rest was taken from.

    `lengths` maps quantiles to tokens a document, `histogram` holds (from, below, documents) with `below` a power of 2.
    """

    documents: int
    tokens: int
    learnt: int
    text_bytes: int
    words: int
    disk_bytes: int
    shards: int
    vocabulary_size: int
    measured_tokens: int
    measured_documents: int
    tokens_seen: int
    lengths: dict[str, int]
    histogram: list[tuple[int, int, int]]
    frequent: list[tuple[int, str, float]]
    samples: list[Stretch]

    @property
    def bytes_per_token(self) -> float:
        return self.text_bytes / max(self.tokens, 1)

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return dataclasses.asdict(self) | {"bytes_per_token": self.bytes_per_token}


def measure(corpus: Corpus, samples: int = 3, sample_tokens: int = 160, seed: int = 0) -> Statistics:
    """Return the statistics of a split, with `samples` stretches of `sample_tokens` tokens that the seed chooses.

    A large corpus is measured on evenly spread parts of it, so that this takes seconds whatever its size.
    """
    tokenizer = corpus.tokenizer()
    record = corpus.manifest.splits[corpus.split]
    counts, measured = _token_counts(corpus)
    lengths = _lengths(corpus)
    top = np.argsort(-counts, kind="stable")[:FREQUENT]
    frequent = [
        (int(token), tokenizer.decode([int(token)], skip_special_tokens=False), float(counts[token]) / measured)
        for token in top
        if counts[token]
    ]
    order = Permutation(corpus.documents, seed, "inspect")
    chosen = [order(number) for number in range(min(samples, corpus.documents))]
    return Statistics(
        documents=corpus.documents,
        tokens=corpus.tokens,
        learnt=record.learnt,
        text_bytes=record.bytes,
        words=record.words,
        disk_bytes=sum(file.bytes for shard in record.shards for file in shard.files.values()),
        shards=len(record.shards),
        vocabulary_size=corpus.vocabulary_size,
        measured_tokens=measured,
        measured_documents=len(lengths),
        tokens_seen=int((counts > 0).sum()),
        lengths={
            name: int(np.quantile(lengths, share))
            for name, share in (("shortest", 0), ("p10", 0.1), ("median", 0.5), ("p90", 0.9), ("longest", 1))
        },
        histogram=_histogram(lengths),
        frequent=frequent,
        samples=[_stretch(corpus, document, sample_tokens, tokenizer) for document in chosen],
    )


def _token_counts(corpus: Corpus) -> tuple[NDArray[np.int64], int]:
    """Return (how often each token occurs, among how many), over evenly spread stretches of a large corpus."""
    counts = np.zeros(corpus.vocabulary_size, np.int64)
    if corpus.tokens <= MEASURED_TOKENS:
        step = size = 1 << 20
    else:
        size, step = MEASURED_TOKENS // STRETCHES, corpus.tokens // STRETCHES
    measured = 0
    with progress(
        f"Counting tokens of {corpus.folder}", total=min(corpus.tokens, MEASURED_TOKENS), unit="tokens"
    ) as done:
        for start in range(0, corpus.tokens, step):
            end = min(start + size, corpus.tokens)
            counts += np.bincount(corpus.read(start, end), minlength=len(counts))[: len(counts)]
            measured += end - start
            done(end - start)
    return counts, measured


def _lengths(corpus: Corpus) -> NDArray[np.int64]:
    if corpus.documents <= MEASURED_DOCUMENTS:
        size = step = 1 << 20
    else:
        size, step = MEASURED_DOCUMENTS // STRETCHES, corpus.documents // STRETCHES
    spans = [
        corpus.document_spans(first, min(first + size, corpus.documents)) for first in range(0, corpus.documents, step)
    ]
    return np.concatenate([part[:, 1] - part[:, 0] for part in spans])


def _histogram(lengths: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Return how many documents have lengths from each power of two to below the next."""
    powers = np.bincount(np.floor(np.log2(lengths)).astype(np.int64))
    return [(1 << power, 1 << power + 1, int(count)) for power, count in enumerate(powers)]


def _stretch(corpus: Corpus, document: int, length: int, tokenizer: Any) -> Stretch:
    ((start, _),) = corpus.document_spans(document, document + 1)
    start, end = int(start), min(int(start) + length, corpus.tokens)
    tokens = corpus.read(start, end).tolist()
    starts = corpus.boundaries(start, end - 1) - start
    return Stretch(
        document=document,
        tokens=tokens,
        learnt=corpus.mask(start, end).tolist(),
        starts=starts[starts < len(tokens)].tolist(),
        text=tokenizer.decode(tokens, skip_special_tokens=False),
    )
