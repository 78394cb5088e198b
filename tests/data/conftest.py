"""The fixture that makes corpora."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data.corpora import Documents, write_corpus
from treadle.data.corpus import Corpus


@pytest.fixture
def make_corpus(tmp_path: Path) -> Callable[..., Corpus]:
    """Return a function that writes a corpus into a new folder each time."""
    count = 0

    def make(documents: Documents, **options) -> Corpus:
        nonlocal count
        count += 1
        return write_corpus(tmp_path / f"corpus-{count}", documents, **options)

    return make
