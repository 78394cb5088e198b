"""Training: the step, optimizers, precision, checkpoints, evaluation, stopping, spikes, launching.

The package is also the function: `treadle.train(config)` trains, whichever of both was imported first.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        from treadle.train.api import train

        return train(*arguments, **options)


sys.modules[__name__].__class__ = _Callable
