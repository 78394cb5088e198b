"""Statistics against counting by hand, on all of a small corpus and on parts of a large one."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from tests.data.corpora import document, random_documents
from treadle.data import statistics
from treadle.data.corpus import Corpus
from treadle.data.statistics import measure
from treadle.model.tokenizer import Tokenizer


@pytest.fixture
def corpus(make_corpus: Callable[..., Corpus]) -> Corpus:
    tokenizer = Tokenizer.train(["some words to learn"] * 3, 300)
    documents = random_documents(0, 90, vocabulary_size=tokenizer.vocabulary_size)
    found = make_corpus(documents, vocabulary_size=tokenizer.vocabulary_size)
    tokenizer.save(found.folder / "tokenizer")
    return found


def test_counts_and_lengths_are_those_of_the_documents(corpus: Corpus) -> None:
    documents = [document(corpus, n) for n in range(corpus.documents)]
    found = measure(corpus, samples=2, sample_tokens=30)
    counts = Counter(token for document in documents for token in document)
    assert found.measured_tokens == corpus.tokens and found.measured_documents == corpus.documents
    assert found.tokens_seen == len(counts)
    assert [round(share * corpus.tokens) for _, _, share in found.frequent] == [n for _, n in counts.most_common(20)]
    lengths = [len(document) for document in documents]
    assert (found.lengths["shortest"], found.lengths["longest"]) == (min(lengths), max(lengths))
    assert found.lengths["median"] == int(np.median(lengths))
    assert sum(count for _, _, count in found.histogram) == len(documents)
    for low, below, count in found.histogram:
        assert count == sum(low <= length < below for length in lengths)


def test_samples_begin_with_a_document_and_mark_where_others_do(corpus: Corpus) -> None:
    found = measure(corpus, samples=5, sample_tokens=60, seed=3)
    assert len({sample.document for sample in found.samples}) == 5
    for sample in found.samples:
        edges = [*sample.starts, len(sample.tokens)]
        parts = [sample.tokens[a:b] for a, b in itertools.pairwise(edges)]
        assert sample.starts[0] == 0
        for offset, part in enumerate(parts):
            assert part == document(corpus, sample.document + offset)[: len(part)]
    assert measure(corpus, samples=5, seed=3).samples[0].document == found.samples[0].document
    assert len(measure(corpus, samples=1000).samples) == corpus.documents


def test_a_large_corpus_is_measured_on_parts_of_it(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = measure(corpus, samples=0)
    monkeypatch.setattr(statistics, "STRETCHES", 8)
    monkeypatch.setattr(statistics, "MEASURED_TOKENS", 800)
    monkeypatch.setattr(statistics, "MEASURED_DOCUMENTS", 40)
    part = measure(corpus, samples=0)
    assert 700 <= part.measured_tokens <= 900 and 35 <= part.measured_documents <= 48
    assert (part.tokens, part.documents) == (whole.tokens, whole.documents)
    assert whole.tokens_seen * 0.8 < part.tokens_seen <= whole.tokens_seen
