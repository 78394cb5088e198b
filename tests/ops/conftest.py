"""Every operator's test runs on the reference and on each compiled variant of the native kernels that this CPU has."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch

from treadle.ops import native
from treadle.ops.registry import rechoose

IMPLEMENTATIONS = ["reference", *native.runnable()]


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Generator[str]:
    """Make the operators run on the reference alone, or on the kernels with one native variant."""
    before = native.variant()
    if request.param == "reference":
        monkeypatch.setenv("TREADLE_KERNELS", "reference")
    else:
        monkeypatch.delenv("TREADLE_KERNELS", raising=False)
        native.select(request.param)
    rechoose()
    yield request.param
    monkeypatch.undo()
    if before:
        native.select(before)
    rechoose()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
