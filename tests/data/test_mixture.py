"""Mixtures: pure functions of the index, exact proportions, epochs of each corpus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tests.data.corpora import random_documents
from treadle.config import UserError
from treadle.data.corpus import Corpus
from treadle.data.mixture import Mixture


def test_an_epoch_shows_every_sample_once_and_the_next_in_another_order(make_corpus: Callable[..., Corpus]) -> None:
    mixture = Mixture([(make_corpus(random_documents(0, 50)), 1.0)], 16, seed=5)
    n = mixture.samples_per_epoch
    epochs = [[mixture.locate(e * n + i)[2] for i in range(n)] for e in range(3)]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != list(range(n))
    assert [mixture.locate(e * n)[1] for e in range(3)] == [0, 1, 2]


def test_unshuffled_is_the_order_of_the_corpus(make_corpus: Callable[..., Corpus]) -> None:
    mixture = Mixture([(make_corpus(random_documents(0, 50)), 1.0)], 16, shuffle=False)
    assert [mixture.locate(i)[2] for i in range(5)] == [0, 1, 2, 3, 4]


def test_corpora_are_mixed_by_weight_each_in_epochs_of_its_own(make_corpus: Callable[..., Corpus]) -> None:
    small, large = make_corpus(random_documents(0, 5)), make_corpus(random_documents(1, 100))
    mixture = Mixture([(small, 3), (large, 1)], 16, seed=1)
    located = [mixture.locate(index) for index in range(400)]
    assert Counter(corpus for corpus, _, _ in located) == {0: 300, 1: 100}
    samples = mixture.packings[0].samples
    taken = [(epoch, sample) for corpus, epoch, sample in located if corpus == 0]
    whole = [key for key in taken if key[0] < 300 // samples - 1]
    assert Counter(whole) == Counter({(e, s): 1 for e in range(300 // samples - 1) for s in range(samples)})


def test_another_corpus_leaves_the_order_of_the_first_alone(make_corpus: Callable[..., Corpus]) -> None:
    first, second = make_corpus(random_documents(0, 50)), make_corpus(random_documents(1, 50))
    alone, mixed = Mixture([(first, 1)], 16, seed=2), Mixture([(second, 1), (first, 1)], 16, seed=2)
    order = [sample for corpus, _, sample in map(mixed.locate, range(40)) if corpus == 1]
    places = [number for number in (mixed._interleaving(i) for i in range(40)) if number[0] == 1]
    assert dict(zip((k for _, k in places), order, strict=True)) == {k: alone.locate(k)[2] for _, k in places}


def test_the_fingerprint_tells_what_was_mixed(make_corpus: Callable[..., Corpus]) -> None:
    a, b = make_corpus(random_documents(0, 5)), make_corpus(random_documents(1, 5))
    made = [
        Mixture([(a, 1)], 16),
        Mixture([(a, 1)], 17),
        Mixture([(a, 1)], 16, seed=1),
        Mixture([(a, 1)], 16, mode="whole"),
        Mixture([(b, 1)], 16),
        Mixture([(a, 1), (b, 1)], 16),
        Mixture([(a, 1), (b, 2)], 16),
    ]
    assert len({mixture.fingerprint for mixture in made}) == len(made)
    assert Mixture([(a, 2)], 16).fingerprint == made[0].fingerprint


def test_corpora_of_two_tokenizers_do_not_mix(make_corpus: Callable[..., Corpus]) -> None:
    a, b = make_corpus([[1, 2]]), make_corpus([[1, 2]], fingerprint="0" * 64)
    with pytest.raises(UserError, match="made with another tokenizer than the corpus"):
        Mixture([(a, 1), (b, 1)], 16)
    with pytest.raises(UserError, match="at least one corpus"):
        Mixture([], 16)
