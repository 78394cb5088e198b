"""A tiny random model, a tokenizer trained on the spot, engines that are closed after the test."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serve.tiny import CONFIG, TEXT, TOKENS, build
from treadle.model.families import read_spec
from treadle.model.tokenizer import Tokenizer
from treadle.serve.engine import Engine
from treadle.serve.model import Model


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([TEXT] * 4, TOKENS)


@pytest.fixture(scope="session")
def model(tokenizer: Tokenizer) -> Model:
    return Model(build(read_spec(CONFIG)), tokenizer)


@pytest.fixture(scope="session")
def tiny_folder(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a folder."""
    path = tmp_path_factory.mktemp("served") / "tiny"
    model.save(path)
    return path


@pytest.fixture
def engine_of(model: Model) -> Generator[Callable[..., Engine]]:
    """Return a function that starts an engine, which is closed after the test."""
    engines: list[Engine] = []

    def start(which: Model = model, **settings: Any) -> Engine:
        engines.append(Engine(which, **settings))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
