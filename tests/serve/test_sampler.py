"""Choosing tokens: distribution, seeds, penalties, biases, log probabilities."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle import ops
from treadle.ops import OPERATORS, native
from treadle.serve.request import Request, SamplingSettings
from treadle.serve.sampler import Row, adjust, choose, derive_seed, uniform


def request(tokens: list[int] | None = None, made: int = 0, seed: int = 0, **sampling: Any) -> Request:
    found = Request([0], SamplingSettings.of(**sampling), 100, seed, frozenset({3}), lambda delta: None)
    found.tokens = list(tokens or [0])
    found.prompt_tokens = len(found.tokens) - made
    return found


def draw(logits: torch.Tensor, *requests: Request) -> list[int]:
    return [choice.token for choice in choose(logits.clone(), [Row(one) for one in requests])]


def test_uniform_numbers_are_uniform_and_unrelated() -> None:
    numbers = np.array([[uniform(seed, place) for place in range(200)] for seed in range(200)])
    assert numbers.min() >= 0 and numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    expected = numbers.size / 20
    # Chi-squared with 19 degrees of freedom: 43.8 is exceeded once in a thousand; the numbers are fixed.
    assert ((counts - expected) ** 2 / expected).sum() < 43.8
    for a, b in ((numbers[:, :-1], numbers[:, 1:]), (numbers[:-1], numbers[1:])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.02


def test_seeds_that_differ_in_any_bit_draw_differently() -> None:
    base = uniform(12345, 7)
    assert len({uniform(12345 ^ (1 << bit), 7) for bit in range(64)} | {base}) == 65
    assert len({derive_seed(5, index) for index in range(100)}) == 100
    assert derive_seed(5, 0) == 5


@pytest.mark.skipif(bool(native.missing()), reason="there is no native library here")
def test_sampling_gives_its_kernel_what_that_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    sample = ops.sample
    monkeypatch.setattr(
        ops, "sample", lambda *given: (seen.append(OPERATORS.get("sample").kernel_for(*given).name), sample(*given))[1]
    )
    draw(torch.zeros(1, 8), request(temperature=0.5, top_k=3, top_p=0.9))
    assert seen == ["native"]


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    draws = draw(logits.expand(4000, 4), *(request(seed=seed, temperature=0.8) for seed in range(4000)))
    share = np.bincount(draws, minlength=4) / 4000
    expected = (logits / 0.8).softmax(0).numpy()
    # Four standard deviations of a share of 4000 draws.
    assert np.all(np.abs(share - expected) < 4 * np.sqrt(expected * (1 - expected) / 4000))


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_neighbours_change_nothing(data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    rows = [
        request(
            tokens=data.draw(st.lists(st.integers(0, 19), min_size=3, max_size=8)),
            made=data.draw(st.integers(0, 2)),
            seed=data.draw(st.integers(0, 1 << 63)),
            temperature=data.draw(st.sampled_from([0.0, 0.7, 1.5])),
            top_p=data.draw(st.sampled_from([1.0, 0.6])),
            top_k=data.draw(st.sampled_from([0, 3])),
            min_p=data.draw(st.sampled_from([0.0, 0.2])),
            presence_penalty=data.draw(st.sampled_from([0.0, 1.0])),
            repetition_penalty=data.draw(st.sampled_from([1.0, 1.4])),
            logprobs=data.draw(st.sampled_from([None, 2])),
        )
        for _ in range(data.draw(st.integers(1, 5)))
    ]
    logits = torch.randn(len(rows), 20, generator=generator)
    together = choose(logits.clone(), [Row(one) for one in rows])
    alone = [choose(logits[row : row + 1].clone(), [Row(rows[row])])[0] for row in range(len(rows))]
    assert together == alone


def test_filters_keep_what_they_say() -> None:
    logits = torch.tensor([[math.log(0.5), math.log(0.3), math.log(0.15), math.log(0.05)]]).expand(200, 4)

    def seen(**sampling: Any) -> set[int]:
        return set(draw(logits, *(request(seed=seed, **sampling) for seed in range(200))))

    assert seen() == {0, 1, 2, 3}
    assert seen(top_k=2) == {0, 1}
    assert seen(top_p=0.75) == {0, 1}
    assert seen(top_p=0.85) == {0, 1, 2}
    assert seen(min_p=0.25) == {0, 1, 2}
    assert seen(temperature=0) == {0}


def test_penalties_equal_their_definitions() -> None:
    logits = torch.tensor([1.0, -2.0, 3.0, 0.5, 4.0], dtype=torch.float64)
    one = request(tokens=[1, 2, 4, 4, 0], made=3, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    changed = logits.clone()
    adjust(changed, Row(one))
    # Prompt 1 2, output 4 4 0. Repetition: all of them, positive ones halved, negative ones doubled.
    expected = [1.0 / 2 - 0.5 - 0.25, -2.0 * 2, 3.0 / 2, 0.5, 4.0 / 2 - 0.5 - 0.25 * 2]
    assert changed.tolist() == pytest.approx(expected)


def test_biases_and_the_minimum_length() -> None:
    logits = torch.zeros(6)
    adjust(logits, Row(request(made=0, logit_bias={2: 5.0, 4: -100.0}, min_tokens=1)))
    assert logits.tolist() == [0, 0, 5, -math.inf, -100, 0]
    logits = torch.zeros(6)
    adjust(logits, Row(request(tokens=[0, 1], made=1, min_tokens=1)))
    assert logits[3] == 0, "the minimum is reached"


def test_logprobs_are_the_models_own() -> None:
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(1))
    one = request(logprobs=3, temperature=0.3, logit_bias={5: 100.0})
    (choice,) = choose(logits.clone(), [Row(one)])
    expected = logits[0].double().log_softmax(0)
    assert choice.token == 5 and choice.logprob is not None
    assert choice.logprob.logprob == pytest.approx(float(expected[5]), abs=1e-5)
    assert [token for token, _ in choice.logprob.top] == expected.topk(3).indices.tolist()


def test_logits_that_are_not_finite_fail_their_request_only() -> None:
    logits = torch.zeros(3, 8)
    logits[1, 4] = torch.nan
    choices = choose(logits, [Row(request(temperature=0)) for _ in range(3)])
    assert [bool(choice.error) for choice in choices] == [False, True, False]
    assert "not finite" in choices[1].error
