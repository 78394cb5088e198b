"""Rotary frequencies and their scaled variants: numbers only, the rotation itself is the operator `rope`."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from treadle.model.spec import RopeSpec


def rope_table(
    spec: RopeSpec, positions: Int[Tensor, "T"], lengths: Int[Tensor, "T"] | None = None
) -> tuple[Float[Tensor, "T R"], Float[Tensor, "T R"]]:
    """Return cos and sin in fp32 for tokens at `positions`.

    `lengths` gives for each token the length of its sequence so far; only kinds whose frequencies depend on it
    (dynamic, longrope) read it.
    """
    frequencies, amplitude = _frequencies(spec, positions.device)
    angles = positions.to(torch.float32)[:, None] * frequencies[None, :]
    return angles.cos() * amplitude, angles.sin() * amplitude


def _frequencies(spec: RopeSpec, device: torch.device) -> tuple[Float[Tensor, "R"], float]:
    exponents = (
        torch.arange(0, spec.rotary_size, 2, dtype=torch.int64, device=device).to(torch.float32) / spec.rotary_size
    )
    return 1.0 / (spec.theta**exponents), 1.0
