"""Sampling against a brute-force sampler that follows the definitions one row and one token at a time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from treadle.ops import sample


def distribution(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """Return each token's probability after the filters, in float64."""
    scaled = [x / temperature for x in logits]
    top = max(scaled)
    odds = [math.exp(x - top) for x in scaled]
    odds = [x if x >= min_p else 0.0 for x in odds]
    if 0 < top_k < len(odds):
        least = sorted(odds, reverse=True)[top_k - 1]
        odds = [x if x >= least else 0.0 for x in odds]
    if top_p < 1:
        total, reached = sum(odds), 0.0
        kept = set()
        for token in sorted(range(len(odds)), key=lambda i: (-odds[i], i)):
            if kept and reached >= top_p * total:
                break
            kept.add(token)
            reached += odds[token]
        odds = [x if token in kept else 0.0 for token, x in enumerate(odds)]
    total = sum(odds)
    return [x / total for x in odds]


def draw(chances: list[float], uniform: float) -> int:
    reached = 0.0
    for token, chance in enumerate(chances):
        reached += chance
        if reached > uniform:
            return token
    return max(token for token, chance in enumerate(chances) if chance > 0)


def call(logits: list[list[float]], rows: list[tuple[float, int, float, float, float]]) -> list[int]:
    temperature, top_k, top_p, min_p, uniform = zip(*rows, strict=True)
    return sample(
        torch.tensor(logits),
        torch.tensor(temperature),
        torch.tensor(top_k, dtype=torch.int32),
        torch.tensor(top_p),
        torch.tensor(min_p),
        torch.tensor(uniform),
    ).tolist()


# Logits on a coarse grid, so that ties are common and no threshold is decided by float32 rounding.
grid = st.integers(-12, 12).map(lambda n: n / 4)
row = st.tuples(
    st.sampled_from([0.0, 1e-40, 1e-3, 0.5, 1.0, 2.0]),  # 1e-40 is not a normal float32
    st.integers(0, 9),
    st.sampled_from([1.0, 0.9, 0.513, 0.11, 1e-6]),
    st.sampled_from([0.0, 0.03, 0.21, 0.77]),
    st.integers(0, 9999).map(lambda n: (n + 0.5) / 10000),
)


# The fixture sets the kernels once for all of a test's examples, as it should.
with_fixture = [HealthCheck.function_scoped_fixture]


@settings(max_examples=150, deadline=None, suppress_health_check=with_fixture)
@given(
    st.integers(1, 9).flatmap(
        lambda v: st.lists(st.tuples(st.lists(grid, min_size=v, max_size=v), row), min_size=1, max_size=5)
    )
)
def test_any_row_against_brute_force(implementation: str, batch: list) -> None:
    got = call([logits for logits, _ in batch], [options for _, options in batch])
    for token, (logits, (temperature, top_k, top_p, min_p, uniform)) in zip(got, batch, strict=True):
        if temperature == 0:
            assert token == logits.index(max(logits))
            continue
        chances = distribution(logits, temperature, top_k, top_p, min_p)
        allowed = {draw(chances, uniform + shift) for shift in (-1e-6, 0.0, 1e-6)}
        assert token in allowed


@settings(max_examples=30, deadline=None, suppress_health_check=with_fixture)
@given(st.lists(row, min_size=2, max_size=6), st.integers(0, 2**31))
def test_a_row_does_not_depend_on_its_neighbours(implementation: str, rows: list, seed: int) -> None:
    logits = torch.randn(len(rows), 50, generator=torch.Generator().manual_seed(seed)).tolist()
    together = call(logits, rows)
    alone = [call([one], [options])[0] for one, options in zip(logits, rows, strict=True)]
    assert together == alone


def test_the_filters_keep_what_transformers_keeps(implementation: str) -> None:
    generator = torch.Generator().manual_seed(1)
    for top_k, top_p, min_p in ((5, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.2), (8, 0.8, 0.0)):
        logits = 2 * torch.randn(1, 40, generator=generator)
        kept = TemperatureLogitsWarper(0.8)(None, logits)
        if min_p:
            kept = MinPLogitsWarper(min_p)(None, kept)
        if top_k:
            kept = TopKLogitsWarper(top_k)(None, kept)
        if top_p < 1:
            kept = TopPLogitsWarper(top_p)(None, kept)
        uniforms = torch.linspace(0, 0.99999, 2000)
        rows = [(0.8, top_k, top_p, min_p, u) for u in uniforms.tolist()]
        drawn = torch.tensor(call(logits.expand(2000, -1).tolist(), rows))
        assert set(drawn.tolist()) == set(kept[0].isfinite().nonzero()[:, 0].tolist())
        shares = torch.bincount(drawn, minlength=40) / 2000
        assert torch.allclose(shares, kept[0].softmax(-1), atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_lowest_of_equals(implementation: str, dtype: torch.dtype) -> None:
    logits = torch.zeros(3, 1000, dtype=dtype)
    logits[0, 700] = logits[0, 300] = 5
    logits[1, 999] = 1
    zeros = torch.zeros(3)
    out = sample(logits, zeros, zeros.int(), zeros + 1, zeros, zeros + 0.5)
    assert out.dtype == torch.int64 and out.tolist() == [300, 999, 0]


def test_the_ends_of_the_unit_interval(implementation: str) -> None:
    logits = [[-math.inf, 0.0, 0.0, -math.inf]]
    assert call(logits, [(1.0, 0, 1.0, 0.0, 0.0)]) == [1]
    assert call(logits, [(1.0, 0, 1.0, 0.0, 1.0)]) == [2]
    assert call(logits, [(1.0, 9, 0.5, 0.0, 0.999)]) == [1]


def test_a_large_vocabulary_draws_its_tail(implementation: str) -> None:
    """With 150,000 equal tokens each has its own share of the unit interval, the last ones too."""
    vocabulary = 150_000
    tokens = torch.tensor([0, 1, 77_777, 149_998, 149_999])
    uniform = ((tokens.double() + 0.5) / vocabulary).float()
    ones = torch.ones(5)
    out = sample(torch.zeros(5, vocabulary), ones, ones.int() * 0, ones, ones * 0, uniform)
    assert out.tolist() == tokens.tolist()


def test_no_rows(implementation: str) -> None:
    empty = torch.zeros(0)
    assert sample(torch.zeros(0, 5), empty, empty.int(), empty, empty, empty).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_real_vocabulary_with_every_filter(implementation: str, dtype: torch.dtype) -> None:
    """The kept set on 50,000 tokens is the brute force's, seen through where the draws of a fine comb fall."""
    generator = torch.Generator().manual_seed(3)
    logits = (3 * torch.randn(1, 50_000, generator=generator)).to(dtype)
    for top_k, top_p, min_p in ((40, 0.9, 0.05), (0, 0.3, 0.0), (3, 1.0, 0.0)):
        chances = distribution(logits[0].tolist(), 0.9, top_k, top_p, min_p)
        uniforms = torch.linspace(0.001, 0.999, 50)
        rows = len(uniforms)
        drawn = sample(
            logits.expand(rows, -1),
            torch.full((rows,), 0.9),
            torch.full((rows,), top_k, dtype=torch.int32),
            torch.full((rows,), top_p),
            torch.full((rows,), min_p),
            uniforms,
        )
        kept = [(token, chance) for token, chance in enumerate(chances) if chance > 0]
        for token, uniform in zip(drawn.tolist(), uniforms.tolist(), strict=True):
            allowed = {draw([chance for _, chance in kept], uniform + shift) for shift in (-1e-5, 0.0, 1e-5)}
            assert token in {kept[index][0] for index in allowed}
