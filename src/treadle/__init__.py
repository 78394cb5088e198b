"""Treadle: train, fine-tune, evaluate and serve language models from one model definition.

    import treadle
    model = treadle.load("path/to/model")
    model.generate("Once upon a time", max_tokens=32)

Nothing heavy is imported until a name below is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treadle.serve.engine import Engine
    from treadle.serve.model import Model, load
    from treadle.train.api import train

__version__ = "0.1.0"
__all__ = ["Engine", "Model", "__version__", "load", "train"]

_HOME = {
    "Engine": "treadle.serve.engine",
    "Model": "treadle.serve.model",
    "load": "treadle.serve.model",
    "train": "treadle.train.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'treadle' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
