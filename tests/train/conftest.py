"""The corpus that the tests of runs share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.runs import write_run_corpus


@pytest.fixture(scope="session")
def run_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small corpus of real text with both splits."""
    return write_run_corpus(tmp_path_factory.mktemp("data") / "corpus")
