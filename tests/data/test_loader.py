"""Batches: the same global samples for any number of ranks and from any cursor, evaluation once over everything."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.data.corpora import document, random_documents
from treadle.config import UserError
from treadle.data.corpus import Corpus
from treadle.data.loader import batches, evaluation_batches, made_ahead
from treadle.data.mixture import Mixture


@pytest.fixture
def mixture(make_corpus: Callable[..., Corpus]) -> Mixture:
    return Mixture([(make_corpus(random_documents(0, 90)), 2), (make_corpus(random_documents(1, 30)), 1)], 16, seed=9)


def step_tokens(mixture: Mixture, cursor: int, world_size: int, microbatch: int, steps: int) -> list[torch.Tensor]:
    """Return the tokens of each global step, the ranks' shares joined."""
    ranks = [batches(mixture, cursor, 24, rank, world_size, microbatch) for rank in range(world_size)]
    found = [
        torch.cat([batch.tokens for rank in ranks for batch in next(rank)]).view(24, mixture.sequence_length)
        for _ in range(steps)
    ]
    for rank in ranks:
        rank.close()
    return found


@pytest.mark.parametrize(("world_size", "microbatch"), [(1, 1), (1, 24), (2, 3), (3, 8), (4, 2), (12, 2), (24, 1)])
def test_a_step_holds_the_same_samples_in_the_same_order_for_any_layout(
    mixture: Mixture, world_size: int, microbatch: int
) -> None:
    found = step_tokens(mixture, 0, world_size, microbatch, steps=4)
    for step, tokens in enumerate(found):
        for row in range(24):
            assert tokens[row].tolist() == mixture.sample(step * 24 + row).tokens.tolist()


@pytest.mark.parametrize("cursor", [24, 31, 1000])
def test_a_run_resumes_from_the_cursor_alone_on_another_number_of_ranks(mixture: Mixture, cursor: int) -> None:
    for a, b in zip(step_tokens(mixture, cursor, 2, 4, 3), step_tokens(mixture, cursor, 3, 2, 3), strict=True):
        assert torch.equal(a, b)
    fresh = Mixture(list(zip(mixture.corpora, mixture.weights, strict=True)), 16, seed=9)
    assert torch.equal(step_tokens(fresh, cursor, 1, 24, 1)[0], step_tokens(mixture, cursor, 1, 1, 1)[0])


def test_a_batch_is_what_its_samples_are(mixture: Mixture) -> None:
    stream = batches(mixture, 5, 4, microbatch_samples=4)
    (batch,) = next(stream)
    stream.close()
    samples = [mixture.sample(index) for index in range(5, 9)]
    assert batch.tokens.dtype == batch.targets.dtype == batch.positions.dtype == torch.int64
    assert (batch.starts.dtype, batch.token_weights.dtype) == (torch.int32, torch.float32)
    for name in ("tokens", "targets", "positions", "token_weights"):
        assert getattr(batch, name).tolist() == [x for sample in samples for x in getattr(sample, name).tolist()]
    lengths = [b - a for s in samples for a, b in itertools.pairwise(s.starts.tolist())]
    assert torch.diff(batch.starts).tolist() == lengths
    assert batch.max_length == max(lengths)
    assert (batch.samples, batch.padding) == (4, sum(sample.padding for sample in samples))


def test_a_batch_that_cannot_be_divided_names_the_numbers(mixture: Mixture) -> None:
    with pytest.raises(UserError, match=r"10 samples .* 4 ranks in microbatches of 1; .* multiple of 4, such as 8"):
        batches(mixture, 0, 10, world_size=4)
    with pytest.raises(UserError, match=r"12 samples .* 2 ranks in microbatches of 4; .* multiple of 8"):
        batches(mixture, 0, 12, world_size=2, microbatch_samples=4)
    with pytest.raises(UserError, match="at least 1"):
        batches(mixture, 0, 0)


@pytest.mark.parametrize(("world_size", "batch_samples"), [(1, 1), (1, 7), (2, 3), (5, 2)])
def test_evaluation_learns_every_pair_once_and_keeps_the_ranks_together(
    make_corpus: Callable[..., Corpus], world_size: int, batch_samples: int
) -> None:
    corpus = make_corpus(random_documents(0, 40))
    ranks = [list(evaluation_batches(corpus, 16, batch_samples, rank, world_size)) for rank in range(world_size)]
    assert len({tuple(len(batch.tokens) for batch in rank) for rank in ranks}) == 1
    total = sum(float(batch.token_weights.sum()) for rank in ranks for batch in rank)
    assert total == corpus.manifest.splits["train"].learnt == corpus.tokens - corpus.documents
    pairs = sorted(
        (int(a), int(b))
        for rank in ranks
        for batch in rank
        for a, b, w in zip(batch.tokens, batch.targets, batch.token_weights, strict=True)
        if w
    )
    documents = [document(corpus, number) for number in range(corpus.documents)]
    assert pairs == sorted(pair for d in documents for pair in itertools.pairwise(d))


def test_a_part_of_an_evaluation_is_spread_over_the_corpus(make_corpus: Callable[..., Corpus]) -> None:
    corpus = make_corpus([[n] * 16 for n in range(100)])
    taken = [int(batch.tokens[0]) for batch in evaluation_batches(corpus, 16, max_samples=10)]
    assert taken == list(range(0, 100, 10))


def test_an_error_in_the_thread_arrives_after_what_came_before_it() -> None:
    def broken() -> Iterator[int]:
        yield 1
        yield 2
        raise UserError("the shard is gone")

    stream = made_ahead(broken, 2)
    assert [next(stream), next(stream)] == [1, 2]
    with pytest.raises(UserError, match="the shard is gone"):
        next(stream)


def test_closing_ends_the_thread() -> None:
    stream = made_ahead(itertools.count, 2)
    assert next(stream) == 0
    stream.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "treadle-loader"]
