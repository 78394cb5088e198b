"""Quantiles of lengths against NumPy's, in bounded memory; the sizes that steps may have."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.serve.lengths import CLASSES, MOST, QUANTILES, STEPS_PER_OCTAVE, LengthHistogram, candidate_sizes


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 1 << 20), min_size=1, max_size=300), st.sampled_from(QUANTILES))
def test_quantiles_are_numpys_to_a_quarter_octave(lengths: list[int], share: float) -> None:
    histogram = LengthHistogram()
    for length in lengths:
        histogram.add(length)
    exact = int(np.quantile(lengths, share, method="inverted_cdf"))
    # It names the upper end of the class that the exact one lies in.
    assert exact <= histogram.quantile(share) <= np.ceil(exact * 2 ** (1 / STEPS_PER_OCTAVE))


def test_old_lengths_fade_and_memory_stays() -> None:
    histogram = LengthHistogram()
    assert histogram.quantile(0.5) == 0 and histogram.typical() == ()
    for _ in range(MOST):
        histogram.add(1000)
    for _ in range(2 * MOST):
        histogram.add(20)
    assert histogram.quantile(0.75) < 30 and histogram.total <= MOST + 1
    histogram.add(1 << 40)
    assert len(histogram.counts) == CLASSES
    again = LengthHistogram(histogram.counts)
    assert again.typical() == histogram.typical()


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 1 << 16), st.integers(1, 256), st.integers(0, 300), st.lists(st.integers(1, 1 << 20), max_size=5))
def test_candidates_are_few_ascending_and_close_together(most: int, unit: int, beside: int, typical: list[int]) -> None:
    sizes = candidate_sizes(most, unit, beside, tuple(typical))
    assert sizes[-1] == most and list(sizes) == sorted(set(sizes))
    assert all(size % unit == 0 for size in sizes[:-1])
    assert len(sizes) <= 4 * np.log2(max(2, most)) + 7
    for smaller, larger in itertools.pairwise(sizes):
        assert larger <= smaller * 2 ** (1 / STEPS_PER_OCTAVE) + unit


@pytest.mark.parametrize(("length", "size"), [(100, 112), (300, 320)])
def test_a_typical_prompt_fits_a_step_whole(length: int, size: int) -> None:
    assert size in candidate_sizes(2048, 16, 8, (length,))
