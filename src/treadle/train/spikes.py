"""Loss spikes: telling one from noise, and what to do about it. Pure functions of the run's recent past.

A step is a spike where its loss or gradient norm is not finite, or lies more than `threshold` robust deviations above
the median of the last `window` good steps. The deviation is the median absolute deviation times 1.4826 (that of a
normal distribution), which a few outliers do not move; it is not taken below a small share of the median, lest a very
smooth run see spikes everywhere.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from pydantic import Field

from treadle.config import Settings
from treadle.train.state import SpikeState

Action = Literal["none", "skip", "rewind", "stop"]


class SpikeSettings(Settings):
    """What to do about a spike: `skip` its update; `rewind` to the last checkpoint and go on behind the data that led
    to it; `stop`. After `skips_before_rewind` spikes in a row skipping turns into rewinding, and after `rewinds`
    rewinds without a checkpoint in between the run stops. `off` looks only for losses that are not finite, and stops.
    """

    policy: Literal["skip", "rewind", "stop", "off"] = "skip"
    threshold: float = Field(10.0, gt=0)
    window: int = Field(128, ge=8)
    warmup_steps: int = Field(32, ge=0)
    skips_before_rewind: int = Field(8, ge=1)
    rewinds: int = Field(3, ge=0)


class Verdict(NamedTuple):
    """What to do with a step, and why."""

    action: Action
    reason: str = ""


# The least deviation, as a share of the median: gradient norms scatter more than losses, and with long tails.
LEAST_DEVIATION = {"loss": 0.02, "gradient norm": 0.2}


def judge(settings: SpikeSettings, state: SpikeState, loss: float, gradient_norm: float) -> Verdict:
    """Return what to do with a step of this loss and gradient norm, given the good steps before it."""
    reason = _spike(settings, state, loss, gradient_norm)
    if not reason:
        return Verdict("none")
    if settings.policy in ("stop", "off"):
        return Verdict("stop", reason)
    if settings.policy == "skip" and state.in_a_row + 1 < settings.skips_before_rewind:
        return Verdict("skip", reason)
    if state.in_a_row and settings.policy == "skip":
        reason += f", the {_ordinal(state.in_a_row + 1)} spike in a row"
    if state.rewinds >= settings.rewinds:
        return Verdict("stop", f"{reason}, after {state.rewinds} rewinds without getting past it")
    return Verdict("rewind", reason)


def after_step(
    settings: SpikeSettings, state: SpikeState, loss: float, gradient_norm: float, action: Action
) -> SpikeState:
    """Return the statistics after a step: only good ones enter them."""
    if action != "none":
        return replace(state, in_a_row=state.in_a_row + 1)
    return SpikeState(
        losses=[*state.losses, loss][-settings.window :],
        gradient_norms=[*state.gradient_norms, gradient_norm][-settings.window :],
        in_a_row=0,
        rewinds=state.rewinds,
    )


def _spike(settings: SpikeSettings, state: SpikeState, loss: float, gradient_norm: float) -> str:
    """Return why a step is a spike, or ""."""
    for name, value in (("loss", loss), ("gradient norm", gradient_norm)):
        if not math.isfinite(value):
            return f"the {name} is {value}"
    if settings.policy == "off" or len(state.losses) < max(8, min(settings.warmup_steps, settings.window)):
        return ""
    for name, value, past in (("loss", loss, state.losses), ("gradient norm", gradient_norm, state.gradient_norms)):
        middle = statistics.median(past)
        deviation = robust_deviation(past, middle, LEAST_DEVIATION[name])
        if value > middle + settings.threshold * deviation:
            return (
                f"the {name} {value:.4g} lies {(value - middle) / deviation:.0f} deviations above the median "
                f"{middle:.4g} of the last {len(past)} steps"
            )
    return ""


def robust_deviation(values: Sequence[float], middle: float, least: float = 0.0) -> float:
    """Return the median absolute deviation as an estimate of the standard deviation, at least `least` x the median."""
    spread = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return max(spread, least * abs(middle), 1e-12)


def _ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
