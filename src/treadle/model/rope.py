"""Rotary frequencies and their scaled variants: numbers only, the rotation itself is the operator `rope`.

Two kinds depend on how long a sequence is (dynamic, longrope): each token's angles then follow the length of its own
sequence, never that of its neighbours in the batch. Frequencies are computed in fp32 on the CPU, once for each spec,
so that they are the same numbers on every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from treadle.model.spec import ModelSpec, RopeSpec

_cache: dict[tuple[RopeSpec, torch.device], Tensor] = {}


def rope_table(
    spec: RopeSpec, positions: Int[Tensor, "T"], lengths: Int[Tensor, "T"] | None = None
) -> tuple[Float[Tensor, "T R"], Float[Tensor, "T R"]]:
    """Return cos and sin in fp32 for tokens at `positions`.

    `lengths` gives for each token the length of its sequence so far; only kinds whose frequencies depend on it
    (dynamic, longrope) read it, and without it take every sequence for one no longer than the model was trained on.
    """
    frequencies = _frequencies(spec, positions.device)
    if spec.kind == "longrope":
        short, long = frequencies
        frequencies = short
        if lengths is not None:
            trained = spec.parameter("original_max_position_embeddings", spec.max_positions)
            frequencies = torch.where(lengths[:, None] > trained, long, short)
    elif spec.kind == "dynamic" and lengths is not None:
        frequencies = _dynamic(spec, lengths)
    angles = positions.to(torch.float32)[:, None] * frequencies
    amplitude = rope_amplitude(spec)
    return angles.cos() * amplitude, angles.sin() * amplitude


def _frequencies(spec: RopeSpec, device: torch.device) -> Float[Tensor, "*2 R"]:
    """Return the angle by which each pair turns from one token to the next; longrope has a row for short sequences and
    one for long ones."""
    key = spec, device
    if key not in _cache:
        with torch.device("cpu"):
            value = _KINDS[spec.kind](spec).to(device)
        if type(value) is not Tensor:  # under a fake-tensor mode
            return value
        _cache[key] = value
    return _cache[key]


def _exponents(spec: RopeSpec, device: torch.device | str = "cpu") -> Float[Tensor, "R"]:
    return torch.arange(0, spec.rotary_size, 2, dtype=torch.float32, device=device) / spec.rotary_size


def _default(spec: RopeSpec) -> Float[Tensor, "R"]:
    return 1.0 / spec.theta ** _exponents(spec)


def _linear(spec: RopeSpec) -> Float[Tensor, "R"]:
    """Position interpolation (Chen et al. 2023, arXiv 2306.15595): every position divided by `factor`."""
    return _default(spec) / spec.parameter("factor")


def _dynamic(spec: RopeSpec, lengths: Int[Tensor, "T"]) -> Float[Tensor, "T R"]:
    """NTK-aware scaling of the base, growing with the sequence's length beyond what the model was trained on."""
    factor, trained, size = spec.parameter("factor"), spec.max_positions, spec.rotary_size
    growth = factor * lengths.clamp(min=trained).to(torch.float32) / trained - (factor - 1)
    theta = spec.theta * growth ** (size / (size - 2))
    return 1.0 / theta[:, None] ** _exponents(spec, lengths.device)


def _llama3(spec: RopeSpec) -> Float[Tensor, "R"]:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a linear blend (in turns) between the two."""
    plain, factor = _default(spec), spec.parameter("factor")
    trained = spec.parameter("original_max_position_embeddings", spec.max_positions)
    low, high = spec.parameter("low_freq_factor"), spec.parameter("high_freq_factor")
    turns = trained / (2 * math.pi / plain)  # within the context that the model was trained on
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * plain / factor + kept * plain


def _yarn(spec: RopeSpec) -> Float[Tensor, "R"]:
    """YaRN (Peng et al. 2023, arXiv 2309.00071, section 3.2): as llama3, but blended linearly in the pair's number."""
    trained = spec.parameter("original_max_position_embeddings", spec.max_positions)
    size, powers = spec.rotary_size, spec.theta ** _exponents(spec)

    def pair_of(turns: float) -> float:
        """The number of the pair (times two) that makes `turns` turns within the trained context."""
        return size * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    first = pair_of(spec.parameter("beta_fast", 0) or 32)
    last = pair_of(spec.parameter("beta_slow", 0) or 1)
    if spec.parameter("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    width = last - first if last != first else 0.001
    kept = 1 - ((torch.arange(size // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    return 1.0 / (_stretch(spec) * powers) * (1 - kept) + 1.0 / powers * kept


def _longrope(spec: RopeSpec) -> Float[Tensor, "2 R"]:
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753): a searched factor for each pair, one set for short sequences and
    one for those longer than the trained context."""
    factors = torch.tensor([spec.parameter("short_factor"), spec.parameter("long_factor")], dtype=torch.float32)
    return 1.0 / (factors * spec.theta ** _exponents(spec))


# Each kind's frequencies; "dynamic" starts as the default and is scaled by the length in `rope_table`.
_KINDS: dict[str, Callable[[RopeSpec], Tensor]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _default,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


@lru_cache(maxsize=256)
def rope_amplitude(spec: RopeSpec) -> float:
    """Return what cos and sin are multiplied by, which sharpens attention over stretched contexts (yarn, longrope)."""
    if spec.kind not in ("yarn", "longrope"):
        return 1.0
    given, stretch = spec.parameter("attention_factor", None), _stretch(spec)
    if given is not None:
        return float(given)
    if spec.kind == "longrope":
        trained = spec.parameter("original_max_position_embeddings", spec.max_positions)
        return math.sqrt(1 + math.log(stretch) / math.log(trained)) if stretch > 1 else 1.0
    above, below = spec.parameter("mscale", 0), spec.parameter("mscale_all_dim", 0)
    if above and below:
        return _yarn_scale(stretch, above) / _yarn_scale(stretch, below)
    return _yarn_scale(stretch, 1.0)


def _yarn_scale(stretch: float, weight: float) -> float:
    return 0.1 * weight * math.log(stretch) + 1.0 if stretch > 1 else 1.0


def _stretch(spec: RopeSpec) -> float:
    """How many times longer the context is than the one that the model was trained on."""
    trained = spec.parameter("original_max_position_embeddings", spec.max_positions)
    return spec.parameter("factor", None) or spec.max_positions / trained


def length_dependent_ropes(spec: ModelSpec) -> tuple[RopeSpec, ...]:
    """Return the rotary embeddings of a model whose angles depend on how long the sequence is."""
    ropes = (layer.attention.rope for layer in spec.layers)
    return tuple(dict.fromkeys(rope for rope in ropes if rope is not None and rope.kind in ("dynamic", "longrope")))


def rope_regime(ropes: Sequence[RopeSpec], length: int) -> tuple[int, ...]:
    """Return a value that changes with `length` wherever the angles of tokens already seen do."""
    regime = []
    for rope in ropes:
        if rope.kind == "dynamic":
            regime.append(max(length, rope.max_positions))
        else:
            trained = rope.parameter("original_max_position_embeddings", rope.max_positions)
            regime.append(int(length > trained))
    return tuple(regime)
