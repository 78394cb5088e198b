"""When a run ends: pure functions of how far it has come, each returning the decision and its reason."""

from __future__ import annotations

import math
from typing import NamedTuple

from pydantic import Field

from treadle.config import Settings
from treadle.train.state import Counters, PatienceState


class StopSettings(Settings):
    """Ends besides train.steps; whichever comes first. Left out, it is not asked for.

    `patience` counts evaluations in a row whose validation loss is not at least `patience_gain` below the best;
    `target_loss` is a validation loss, or the training loss where nothing is held out. Losses are nats per token.
    """

    tokens: int | None = Field(None, ge=1)
    minutes: float | None = Field(None, gt=0)
    patience: int | None = Field(None, ge=1)
    patience_gain: float = Field(0.0, ge=0)
    target_loss: float | None = Field(None, gt=0)


class Decision(NamedTuple):
    """Whether to stop, why, and whether someone outside asked for it."""

    stop: bool
    reason: str = ""
    interrupted: bool = False


GO_ON = Decision(False)


def should_stop(
    settings: StopSettings, total_steps: int, counters: Counters, patience: PatienceState, loss: float | None
) -> Decision:
    """Return whether the run ends after the steps that `counters` counts.

    `loss` is the newest validation loss where it is new at this step (the training loss where nothing is held out),
    else None.
    """
    if counters.step >= total_steps:
        return Decision(True, f"all {total_steps} steps are done")
    if settings.tokens is not None and counters.tokens >= settings.tokens:
        return Decision(True, f"{counters.tokens:,} tokens were trained on, stop.tokens asks for {settings.tokens:,}")
    if settings.minutes is not None and counters.seconds >= settings.minutes * 60:
        return Decision(
            True, f"{counters.seconds / 60:.1f} minutes have passed, stop.minutes allows {settings.minutes:g}"
        )
    if settings.target_loss is not None and loss is not None and loss <= settings.target_loss:
        return Decision(True, f"the loss {loss:.4f} reached stop.target_loss {settings.target_loss:g}")
    if settings.patience is not None and patience.waited >= settings.patience:
        did = "gave no finite validation loss"
        if patience.best is not None:
            did = f"did not improve on the validation loss {patience.best:.4f} of step {patience.best_step}"
        return Decision(True, f"{patience.waited} evaluations in a row {did} (stop.patience)")
    return GO_ON


def after_evaluation(patience: PatienceState, loss: float, step: int, gain: float = 0.0) -> PatienceState:
    """Return the patience state after a validation loss was measured at `step`."""
    if math.isfinite(loss) and (patience.best is None or loss < patience.best - gain):
        return PatienceState(best=loss, best_step=step, waited=0)
    return PatienceState(patience.best, patience.best_step, patience.waited + 1)
