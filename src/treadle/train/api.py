"""The Python face of training: `treadle.train(config)`."""

from __future__ import annotations

from typing import Any


def train(config: Any) -> None:
    """Train as `treadle train` does."""
    raise NotImplementedError
