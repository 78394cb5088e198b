"""Corpora made directly from token lists, so that the reading side is tested without the preparing side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from treadle.config.files import write_atomically
from treadle.data.corpus import Corpus
from treadle.data.shards import Manifest, TokenizerRecord, token_dtype
from treadle.data.writer import SplitWriter, TokenizedDocuments

Documents = Sequence[Sequence[int]]


def write_corpus(
    folder: Path,
    documents: Documents,
    masks: Sequence[Sequence[int] | None] | None = None,
    shard_tokens: int = 50,
    vocabulary_size: int = 1000,
    fingerprint: str = "f" * 64,
    at_once: int = 3,
) -> Corpus:
    """Write `documents` as the train split of a corpus in `folder` and open it."""
    folder.mkdir(parents=True, exist_ok=True)
    dtype = token_dtype(vocabulary_size)
    writer = SplitWriter(folder, "train", dtype, shard_tokens)
    for first in range(0, len(documents), at_once):
        some = documents[first : first + at_once]
        mask = None
        if masks is not None and any(m is not None for m in masks[first : first + at_once]):
            parts = [
                m if m is not None else [1] * len(d) for d, m in zip(some, masks[first : first + at_once], strict=True)
            ]
            mask = np.array([bit for part in parts for bit in part], np.uint8)
        tokens = np.array([token for document in some for token in document], dtype)
        writer.add(TokenizedDocuments(tokens, np.array([len(d) for d in some], np.int64), mask, False, len(tokens), 1))
    manifest = Manifest(
        dtype=dtype,
        tokenizer=TokenizerRecord(fingerprint=fingerprint, vocabulary_size=vocabulary_size, bos_id=None, eos_id=None),
        splits={"train": writer.finish()},
    )
    write_atomically(folder / "manifest.json", manifest.model_dump_json().encode())
    return Corpus.open(folder)


def document(corpus: Corpus, number: int) -> list[int]:
    """Return the tokens of one document."""
    ((start, end),) = corpus.document_spans(number, number + 1)
    return corpus.read(int(start), int(end)).tolist()


def random_documents(seed: int, count: int, longest: int = 40, vocabulary_size: int = 1000) -> list[list[int]]:
    """Return documents of 1 to `longest` random tokens."""
    random = np.random.default_rng(seed)
    return [random.integers(0, vocabulary_size, random.integers(1, longest + 1)).tolist() for _ in range(count)]
