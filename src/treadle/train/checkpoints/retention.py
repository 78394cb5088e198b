"""Which checkpoints are kept: a pure decision, and the removal of the others."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from treadle.config.files import remove_folder
from treadle.train.checkpoints.format import DamagedCheckpoint, name_of, steps_in, verify


def removable(steps: Iterable[int], newest: int, keep_last: int, keep_every: int) -> list[int]:
    """Return the steps whose checkpoints may go, now that the one of step `newest` is safely written.

    `steps` are those of whole checkpoints. Kept are the last `keep_last` up to `newest`, that one always, and every
    multiple of `keep_every` (0: none for that reason). Those after `newest` are left alone: they are not
    this run's.
    """
    candidates = sorted({*steps, newest})
    candidates = candidates[: candidates.index(newest) + 1]
    kept = set(candidates[-max(1, keep_last) :])
    return [step for step in candidates if step not in kept and not (keep_every and step % keep_every == 0)]


def remove_old(folder: Path, newest: int, keep_last: int, keep_every: int) -> list[int]:
    """Remove the checkpoints that are no longer kept and return their steps.

    Damaged ones are neither counted nor removed. What cannot be removed (a foreign file permission) stays; it is tried
    again after the next checkpoint.
    """
    steps = [step for step in steps_in(folder) if _whole(folder / name_of(step))]
    removed = []
    for step in removable(steps, newest, keep_last, keep_every):
        try:
            remove_folder(folder / name_of(step))
        except OSError:
            continue
        removed.append(step)
    return removed


def _whole(path: Path) -> bool:
    try:
        verify(path, checksums=False)
    except (DamagedCheckpoint, OSError):
        return False
    return True
