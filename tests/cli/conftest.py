"""A tiny model on disk for the verbs that load one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serve.tiny import CONFIG, TEXT, TOKENS, build
from treadle.model.families import read_spec
from treadle.model.tokenizer import Tokenizer
from treadle.serve.model import Model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a random model of 300 tokens and a context of 128, with a chat template."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    Model(build(read_spec(CONFIG)), Tokenizer.train([TEXT] * 4, TOKENS)).save(folder)
    return folder


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of one without a chat template."""
    folder = tmp_path_factory.mktemp("models") / "base"
    tokenizer = Tokenizer.train([TEXT] * 4, TOKENS, extra_special_tokens=())
    Model(build(read_spec(CONFIG)), tokenizer).save(folder)
    return folder
