"""Learning-rate schedules by name, and those of other packages (entry-point group `treadle.schedules`).

A schedule is a pure function of the number of steps done, the total and the settings, and returns the factor by which
the peak rates are multiplied in the next step. It holds no state, so a run that resumes asks it and continues.
"""

from __future__ import annotations

import math
from typing import Any, Literal, Protocol

from pydantic import Field, model_validator

from treadle.config import Settings, UserError
from treadle.config.plugins import Parts


class ScheduleSettings(Settings):
    """How the learning rate moves: a linear warm-up over `warmup_steps`, then what `name` says, down to `final`.

    `warmup_steps` left out is a twentieth of the run, at most 100. `final` is the factor (of the peak) at the last
    step. `decay_steps` and `decay` belong to wsd: the length of its last part, by default a fifth of the run, and its
    form. `options` is for schedules of other packages.
    """

    name: str = "cosine"
    warmup_steps: int | None = Field(None, ge=0)
    final: float = Field(0.1, ge=0, le=1)
    decay_steps: int | None = Field(None, ge=1)
    decay: Literal["linear", "sqrt", "cosine"] = "sqrt"
    options: dict[str, Any] = {}

    @model_validator(mode="after")
    def _checked(self) -> ScheduleSettings:
        if self.decay_steps is not None and self.name != "wsd" and self.name in ("constant", "linear", "cosine"):
            raise ValueError(f"decay_steps belongs to the schedule 'wsd', '{self.name}' decays over the whole run")
        return self


class Schedule(Protocol):
    """Return the factor of the peak rate for the step after `step` finished ones, of `total_steps`."""

    def __call__(self, step: int, total_steps: int, settings: ScheduleSettings) -> float: ...


schedules: Parts[Schedule] = Parts("schedule")


def check_schedule(settings: ScheduleSettings, total_steps: int) -> None:
    """Raise UserError where the schedule does not exist or does not fit into the run."""
    schedules.get(settings.name)
    warmup_steps = settings.warmup_steps or 0
    if warmup_steps >= total_steps:
        raise UserError(
            f"schedule.warmup_steps={warmup_steps} leaves nothing of a run of {total_steps} steps; "
            "set it lower or train.steps higher"
        )
    decay_steps = settings.decay_steps or 0
    if warmup_steps + decay_steps > total_steps:
        raise UserError(
            f"schedule.warmup_steps={warmup_steps} and decay_steps={decay_steps} are more than the "
            f"{total_steps} steps of the run; set them lower or train.steps higher"
        )


def rate_factor(step: int, total_steps: int, settings: ScheduleSettings) -> float:
    """Return the factor of the peak rate for the step after `step` finished ones; the last one is total_steps - 1.

    Beyond the end (a run that is continued) it stays where it ended.
    """
    return schedules.get(settings.name)(min(step, total_steps - 1), total_steps, settings)


@schedules.add("constant")
def constant(step: int, total_steps: int, settings: ScheduleSettings) -> float:
    """The peak rate after the warm-up, to the end; `final` plays no part."""
    return warmed_up(step, total_steps, settings, 1.0)


@schedules.add("linear")
def linear(step: int, total_steps: int, settings: ScheduleSettings) -> float:
    """From the peak in a straight line down to `final`."""
    share = _share(step, warmup_length(total_steps, settings), total_steps)
    return warmed_up(step, total_steps, settings, _falling(1 - share, settings))


@schedules.add("cosine")
def cosine(step: int, total_steps: int, settings: ScheduleSettings) -> float:
    """From the peak along half a cosine down to `final` (Loshchilov & Hutter 2017, arXiv 1608.03983, no restarts)."""
    share = _share(step, warmup_length(total_steps, settings), total_steps)
    return warmed_up(step, total_steps, settings, _falling((1 + math.cos(math.pi * share)) / 2, settings))


@schedules.add("wsd")
def wsd(step: int, total_steps: int, settings: ScheduleSettings) -> float:
    """Warm-up, stable, decay (Hu et al. 2024, arXiv 2404.06395): the peak until the last `decay_steps`.

    These go down to `final` as 1 - sqrt(share) (Hägele et al. 2024, arXiv 2405.18392), linearly or along a cosine.
    """
    decay_steps = settings.decay_steps or max(1, total_steps // 5)
    share = _share(step, max(warmup_length(total_steps, settings), total_steps - 1 - decay_steps), total_steps)
    left = {"linear": 1 - share, "sqrt": 1 - math.sqrt(share), "cosine": (1 + math.cos(math.pi * share)) / 2}
    return warmed_up(step, total_steps, settings, _falling(left[settings.decay], settings))


def warmup_length(total_steps: int, settings: ScheduleSettings) -> int:
    """Return the steps of the warm-up, by default a twentieth of the run and at most 100."""
    return min(100, total_steps // 20) if settings.warmup_steps is None else settings.warmup_steps


def warmed_up(step: int, total_steps: int, settings: ScheduleSettings, factor: float) -> float:
    """Return `factor` after the warm-up; within it equal steps up from 0, the first of which already moves."""
    length = warmup_length(total_steps, settings)
    return (step + 1) / (length + 1) if step < length else factor


def _share(step: int, start: int, total_steps: int) -> float:
    """How much of the way from step `start` to the last one is done, 0 to 1."""
    return 0.0 if step <= start else (step - start) / (total_steps - 1 - start)


def _falling(factor: float, settings: ScheduleSettings) -> float:
    """Stretch 1 to 0 into 1 to `final`."""
    return settings.final + (1 - settings.final) * factor
