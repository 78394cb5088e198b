"""The order: bijections, uniformity, exact proportions."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.config import UserError
from treadle.data.order import MAX_WINDOW, Interleaving, Permutation


@given(size=st.integers(1, 3000), seed=st.integers(), epoch=st.integers(0, 1 << 40))
@settings(max_examples=60, deadline=None)
def test_every_index_goes_to_a_place_of_its_own(size: int, seed: int, epoch: int) -> None:
    permutation = Permutation(size, seed, epoch)
    assert sorted(map(permutation, range(size))) == list(range(size))


@given(st.integers(1, 1 << 62), st.data())
@settings(deadline=None)
def test_huge_ranges_stay_in_range_and_do_not_collide(size: int, data: st.DataObject) -> None:
    permutation = Permutation(size, 7)
    chosen = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=50))
    images = {permutation(index) for index in chosen}
    assert len(images) == len(chosen)
    assert all(0 <= image < size for image in images)


def test_an_index_outside_is_refused() -> None:
    for index in (-1, 5):
        with pytest.raises(IndexError):
            Permutation(5, 0)(index)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_small_permutations_are_all_about_equally_likely(size: int) -> None:
    orders = 1
    for factor in range(2, size + 1):
        orders *= factor
    trials = 40 * orders if size < 6 else 20 * orders
    seen = Counter(tuple(map(Permutation(size, seed), range(size))) for seed in range(trials))
    expected = trials / orders
    chi = sum((seen.get(key, 0) - expected) ** 2 / expected for key in seen)
    chi += (orders - len(seen)) * expected
    # A chi-square of k degrees has mean k and deviation sqrt(2 k): five deviations above are one in a million.
    assert chi < (orders - 1) + 5 * (2 * (orders - 1)) ** 0.5


def test_neighbours_do_not_stay_neighbours() -> None:
    size = 10_000
    order = [Permutation(size, 3)(index) for index in range(size)]
    near = sum(abs(a - b) <= 10 for a, b in itertools.pairwise(order))
    # Of 9,999 pairs about 20 are within 10 of each other by chance.
    assert near < 45
    assert abs(sum(i * v for i, v in enumerate(order)) / size**3 - 0.25) < 0.01


def test_epochs_and_seeds_give_different_orders() -> None:
    def order(*key: int) -> list[int]:
        return list(map(Permutation(500, *key), range(500)))

    assert order(1, 0) == order(1, 0)
    assert len({tuple(order(*key)) for key in ((1, 0), (1, 1), (0, 1), (2, 0), (10, 1), (1, 10))}) == 6


weights = st.lists(st.sampled_from([0.1, 0.25, 0.5, 1, 2, 3, 7.5, 1 / 3]), min_size=1, max_size=6)


@given(weights, st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_every_window_holds_the_exact_proportions_and_every_sample_is_taken_once(ws: list[float], seed: int) -> None:
    interleaving = Interleaving(ws, seed)
    if interleaving.window > 2000:
        return
    taken = [interleaving(index) for index in range(3 * interleaving.window)]
    for start in range(0, len(taken), interleaving.window):
        counts = Counter(corpus for corpus, _ in taken[start : start + interleaving.window])
        assert [counts[c] for c in range(len(ws))] == interleaving.counts
    for corpus in range(len(ws)):
        numbers = sorted(number for c, number in taken if c == corpus)
        assert numbers == list(range(3 * interleaving.counts[corpus]))


def test_weights_written_by_hand_become_small_whole_numbers() -> None:
    assert Interleaving([0.7, 0.3], 0).counts == [7, 3]
    assert Interleaving([1, 2], 0).counts == [1, 2]
    assert Interleaving([30, 50, 20], 0).counts == [3, 5, 2]
    assert Interleaving([0.1], 0).counts == [1]


def test_awkward_weights_are_rounded_to_a_millionth() -> None:
    ws = [0.1234567891, 0.5, 0.3765432109]
    counts = Interleaving(ws, 0).counts
    assert sum(counts) == MAX_WINDOW
    assert all(abs(count / MAX_WINDOW - weight) <= 1e-6 for count, weight in zip(counts, ws, strict=True))


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf"), 1e-9])
def test_a_weight_that_means_nothing_is_refused(weight: float) -> None:
    with pytest.raises(UserError, match="weight"):
        Interleaving([1.0, weight], 0)
