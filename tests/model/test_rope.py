"""Rotary tables against Transformers' own initializers, and each sequence against itself alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.tiny_models import ROPE
from treadle.config import UserError
from treadle.model.context import PackedContext
from treadle.model.families.reader import ConfigReader
from treadle.model.rope import rope_amplitude, rope_table
from treadle.model.spec import RopeSpec

KINDS = [kind for kind in ROPE if kind != "default"]


def spec_of(parameters: dict[str, Any], head_size: int, max_positions: int = 16) -> RopeSpec:
    config = {"max_position_embeddings": max_positions, "rope_parameters": parameters}
    return ConfigReader(config, {}).rope(head_size)


def reference(parameters: dict[str, Any], head_size: int, length: int) -> tuple[torch.Tensor, float]:
    config = LlamaConfig(
        hidden_size=head_size, num_attention_heads=1, max_position_embeddings=16, rope_parameters=dict(parameters)
    )
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"), seq_len=length)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 16, 17, 18, 19, 100])
@pytest.mark.parametrize("theta", [50.0, 1e6])
def test_tables_equal_the_reference(kind: str, length: int, theta: float) -> None:
    parameters = {"rope_theta": theta, **ROPE[kind]}
    frequencies, amplitude = reference(parameters, 12, length)
    positions = torch.arange(length)
    angles = positions[:, None].float() * frequencies
    cos, sin = rope_table(spec_of(parameters, 12), positions, torch.full((length,), length))
    # The same formulas in fp32, in an order that may differ by a rounding or two of the angle (below 1e-4 here).
    torch.testing.assert_close(cos, angles.cos() * amplitude, rtol=0, atol=2e-5)
    torch.testing.assert_close(sin, angles.sin() * amplitude, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "longrope"])
def test_a_part_of_the_head(kind: str) -> None:
    parameters = {"rope_theta": 1e4, "partial_rotary_factor": 0.5, **ROPE[kind]}
    spec = spec_of(parameters, 32)
    frequencies, amplitude = reference(parameters, 32, 40)
    cos, _ = rope_table(spec, torch.arange(40), torch.full((40,), 40))
    assert spec.rotary_size == 16 and cos.shape == (40, 8)
    torch.testing.assert_close(cos, (torch.arange(40)[:, None] * frequencies).cos() * amplitude, rtol=0, atol=2e-5)


@settings(deadline=None)
@given(
    factor=st.floats(1.0, 64.0),
    trained=st.integers(2, 8192),
    theta=st.floats(2.0, 1e7),
    fast=st.floats(1.0, 64.0),
    slow=st.floats(0.1, 1.0),
    truncate=st.sampled_from([True, False, None]),
    mscale=st.sampled_from([None, 0.0, 0.7, 2.0]),
    mscale_all_dim=st.sampled_from([None, 0.0, 1.0, 1.3]),
    head_size=st.sampled_from([4, 12, 64, 256]),
)
def test_yarn_equals_the_reference_everywhere(
    factor: float,
    trained: int,
    theta: float,
    fast: float,
    slow: float,
    truncate: bool | None,
    mscale: float | None,
    mscale_all_dim: float | None,
    head_size: int,
) -> None:
    parameters = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": trained,
        "beta_fast": fast,
        "beta_slow": slow,
        "mscale": mscale,
        "mscale_all_dim": mscale_all_dim,
    }
    if truncate is not None:
        parameters["truncate"] = truncate
    spec = spec_of(parameters, head_size)
    frequencies, amplitude = reference(parameters, head_size, 1)
    cos, sin = rope_table(spec, torch.tensor([1]))
    torch.testing.assert_close(torch.atan2(sin[0], cos[0]), frequencies, rtol=1e-4, atol=1e-6)
    assert rope_amplitude(spec) == pytest.approx(amplitude)


def test_llama3_numbers_of_the_release() -> None:
    """Llama 3.1's own parameters: the highest frequencies are kept, the lowest divided by 8."""
    spec = spec_of(
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        128,
        131072,
    )
    plain = RopeSpec(500000.0, 128, 131072)
    one = torch.tensor([1])
    scaled, unscaled = (torch.asin(rope_table(kind, one)[1][0, 1:]) for kind in (spec, plain))
    ratio = unscaled / scaled
    torch.testing.assert_close(ratio[:10], torch.ones(10))
    torch.testing.assert_close(ratio[-10:], torch.full((10,), 8.0))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_sequence_does_not_depend_on_its_neighbours(kind: str) -> None:
    spec = spec_of({"rope_theta": 100.0, **ROPE[kind]}, 12)
    lengths = [40, 3, 18, 19, 1]
    together = PackedContext.of_lengths(lengths).rope(spec)[0].split(lengths)
    for length, part in zip(lengths, together, strict=True):
        torch.testing.assert_close(part, PackedContext.of_lengths([length]).rope(spec)[0], rtol=0, atol=0)
    assert not torch.equal(together[0][:3], together[1])


def test_tables_made_in_inference_mode_serve_training_later() -> None:
    spec = RopeSpec(123.0, 8, 16)
    with torch.inference_mode():
        rope_table(spec, torch.arange(4))
    weight = torch.ones(4, 4, requires_grad=True)
    cos, _ = rope_table(spec, torch.arange(4))
    (weight * cos).sum().backward()
    assert weight.grad is not None


def test_specs_that_cannot_be_computed() -> None:
    with pytest.raises(UserError, match="must be even"):
        RopeSpec(100.0, 7, 16)
    with pytest.raises(UserError, match="known: default, linear"):
        RopeSpec(100.0, 8, 16, "spiral")
