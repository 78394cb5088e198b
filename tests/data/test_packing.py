"""Packing against a brute-force reading of the documents."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.corpora import random_documents
from treadle.config import UserError
from treadle.data.corpus import Corpus
from treadle.data.packing import best_fit, pack


def sequences(sample) -> list[tuple[list[int], list[int], list[float]]]:
    """Return each sequence of a sample as (tokens, targets, weights), the padding left out."""
    edges = sample.starts.tolist()
    assert edges[0] == 0 and edges[-1] == len(sample.tokens) and sorted(set(edges)) == edges
    parts = []
    for start, end in itertools.pairwise(edges):
        assert sample.positions[start:end].tolist() == list(range(end - start))
        if start < len(sample.tokens) - sample.padding:
            rows = slice(start, end)
            parts.append(
                (sample.tokens[rows].tolist(), sample.targets[rows].tolist(), sample.token_weights[rows].tolist())
            )
        else:
            assert not sample.token_weights[start:end].any()
    return parts


@pytest.mark.parametrize("mode", ["concat", "whole"])
@pytest.mark.parametrize("length", [2, 7, 16, 33, 500])
def test_every_pair_of_a_token_and_the_next_in_its_document_is_learnt_once(
    make_corpus: Callable[..., Corpus], mode: str, length: int
) -> None:
    # Every token is unique, so that a pair names its place.
    numbers = iter(range(100_000))
    documents = [[next(numbers) for _ in document] for document in random_documents(1, 60)]
    corpus = make_corpus(documents, vocabulary_size=100_000)
    packing = pack(corpus, length, mode)
    expected = Counter(pair for d in documents for pair in itertools.pairwise(d))
    learnt: Counter = Counter()
    tokens: Counter = Counter()
    for number in range(packing.samples):
        sample = packing.sample(number)
        assert len(sample.tokens) == length
        for sequence, targets, weights in sequences(sample):
            tokens.update(sequence)
            learnt.update((a, b) for a, b, w in zip(sequence, targets, weights, strict=True) if w)
            assert all(b == a + 1 for a, b in itertools.pairwise(sequence)), "a sequence crosses documents"
    assert learnt == expected
    assert tokens == Counter(token for d in documents for token in d)


def test_whole_keeps_documents_that_fit_in_one_piece(make_corpus: Callable[..., Corpus]) -> None:
    documents = random_documents(2, 80, longest=60, vocabulary_size=1000)
    packing = pack(make_corpus(documents), 32, "whole")
    found = Counter(tuple(seq) for n in range(packing.samples) for seq, _, _ in sequences(packing.sample(n)))
    pieces = Counter(tuple(d[i : i + 32]) for d in documents for i in range(0, len(d), 32))
    assert found == pieces


def test_only_the_answers_of_a_chat_are_learnt(make_corpus: Callable[..., Corpus]) -> None:
    documents = [[1, 2, 3, 4, 5], [6, 7, 8], [9, 10, 11]]
    corpus = make_corpus(documents, masks=[[0, 0, 1, 1, 0], None, [0, 0, 0]], at_once=1)
    packing = pack(corpus, 20, "concat")
    ((a, b, c),) = [sequences(packing.sample(0))]
    # The weight is at the token from which the learnt one is predicted.
    assert a[2] == [0, 1, 1, 0, 0]
    assert b[2] == [1, 1, 0]
    assert c[2] == [0, 0, 0]
    assert corpus.manifest.splits["train"].learnt == 4


def test_a_corpus_smaller_than_a_sample_is_one_padded_sample(make_corpus: Callable[..., Corpus]) -> None:
    sample = pack(make_corpus([[5, 6, 7]]), 8).sample(0)
    assert sample.tokens.tolist() == [5, 6, 7, 0, 0, 0, 0, 0]
    assert sample.targets.tolist() == [6, 7, 0, 0, 0, 0, 0, 0]
    assert sample.token_weights.tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
    assert sample.starts.tolist() == [0, 3, 8]
    assert sample.padding == 5


@given(st.lists(st.integers(1, 50), max_size=200), st.integers(50, 70))
@settings(max_examples=200, deadline=None)
def test_best_fit_packs_as_the_textbook_does(lengths: list[int], capacity: int) -> None:
    bin_of, bins = best_fit(np.array(lengths, np.int64), capacity)
    loads = [0] * bins
    for number, length in zip(bin_of, lengths, strict=True):
        loads[number] += length
    textbook: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [n for n, load in enumerate(textbook) if load + length <= capacity]
        if fitting:
            textbook[max(fitting, key=lambda n: textbook[n])] += length
        else:
            textbook.append(length)
    assert sorted(loads) == sorted(textbook)


def test_bins_are_made_once_and_found_again(make_corpus: Callable[..., Corpus]) -> None:
    corpus = make_corpus(random_documents(3, 50))
    first = pack(corpus, 32, "whole")
    (path,) = (corpus.folder / "packing").iterdir()
    made = path.stat().st_mtime_ns
    again = pack(Corpus.open(corpus.folder), 32, "whole")
    assert path.stat().st_mtime_ns == made
    assert [first.sample(n).tokens.tolist() for n in range(first.samples)] == [
        again.sample(n).tokens.tolist() for n in range(again.samples)
    ]


def test_damaged_bins_and_those_of_another_corpus_are_made_again(make_corpus: Callable[..., Corpus]) -> None:
    corpus, other = make_corpus(random_documents(3, 50)), make_corpus(random_documents(4, 50))
    expected = [pack(corpus, 32, "whole").sample(n).tokens.tolist() for n in range(3)]
    path = corpus.folder / "packing" / "train-32.bins"
    pack(other, 32, "whole")
    for damage in (path.read_bytes()[:-8], b"", (other.folder / "packing" / "train-32.bins").read_bytes()):
        path.write_bytes(damage)
        assert [pack(corpus, 32, "whole").sample(n).tokens.tolist() for n in range(3)] == expected


def test_a_corpus_that_may_not_be_written_keeps_its_bins_in_the_cache(
    make_corpus: Callable[..., Corpus], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    corpus = make_corpus(random_documents(3, 50))
    # A file where the folder would be: it cannot be made, not even by root.
    (corpus.folder / "packing").write_text("")
    assert pack(corpus, 32, "whole").samples > 0
    assert list((tmp_path / "cache" / "packing").rglob("train-32.bins"))


def test_settings_that_make_no_sense_are_refused(make_corpus: Callable[..., Corpus]) -> None:
    corpus = make_corpus([[1, 2, 3]])
    with pytest.raises(UserError, match="sequence_length is 1"):
        pack(corpus, 1)
    with pytest.raises(UserError, match="unknown packing 'best'"):
        pack(corpus, 8, "best")  # pyrefly: ignore
