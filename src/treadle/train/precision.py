"""Precision: what layers compute in, and the loss scale that fp16 needs. Masters, gradient sums and state are fp32."""

from __future__ import annotations

from typing import Literal

import torch

from treadle.train.state import ScalerState

Precision = Literal["fp32", "bf16", "fp16"]

DTYPES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

# fp16 gradients below 6e-8 vanish, so the loss is scaled up before the backward pass (Micikevicius et al. 2018,
# arXiv 1710.03740, section 3.2); the scale is raised until gradients overflow, then halved.
FIRST_SCALE = 2.0**16
LARGEST_SCALE = 2.0**24
GOOD_STEPS_TO_RAISE = 2000


def first_scaler(precision: Precision) -> ScalerState:
    """Return the loss scale that a run begins with."""
    return ScalerState(scale=FIRST_SCALE if precision == "fp16" else 1.0)


def next_scaler(scaler: ScalerState, precision: Precision, overflowed: bool) -> ScalerState:
    """Return the loss scale after a step, given whether its gradients overflowed.

    Every rank asks with the same numbers, so that all keep the same scale.
    """
    if precision != "fp16":
        return scaler
    if overflowed:
        return ScalerState(max(1.0, scaler.scale / 2), 0)
    if scaler.good_steps + 1 >= GOOD_STEPS_TO_RAISE:
        return ScalerState(min(LARGEST_SCALE, scaler.scale * 2), 0)
    return ScalerState(scaler.scale, scaler.good_steps + 1)
