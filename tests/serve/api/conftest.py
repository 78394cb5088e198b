"""A model of random weights with a template that takes tools, behind a real engine and behind a scripted one."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest

from tests.model.chat_templates import QWEN3
from tests.serve.api.scripted import ScriptedEngine
from tests.serve.serving import Served
from tests.serve.tiny import CONFIG, TEXT, TOKENS, build
from treadle.model.families import read_spec
from treadle.model.tokenizer import Tokenizer
from treadle.serve.engine import Engine
from treadle.serve.model import Model


@pytest.fixture(scope="package")
def tokenizer() -> Tokenizer:
    trained = Tokenizer.train([TEXT] * 4, TOKENS)
    ends = {"eos_token": trained.eos_token, "extra_eos_ids": trained.eos_ids}
    return Tokenizer(trained.backend, **ends, chat_templates={"default": QWEN3})  # pyrefly: ignore


@pytest.fixture(scope="package")
def model(tokenizer: Tokenizer) -> Model:
    return Model(build(read_spec({**CONFIG, "max_position_embeddings": 4096})), tokenizer)


@pytest.fixture(scope="package")
def served(model: Model) -> Generator[Served]:
    """A server of a model that says anything at all."""
    server = Served(Engine(model, max_num_seqs=4))
    yield server
    server.close()


@pytest.fixture
def scripted(tokenizer: Tokenizer, model: Model) -> Generator[Callable[..., Served]]:
    """Return a function that starts a server whose model answers as it is told."""
    servers: list[Served] = []

    def start(*pieces: str, engine: dict[str, Any] | None = None, **options: Any) -> Served:
        servers.append(Served(ScriptedEngine(tokenizer, model.spec, pieces, **(engine or {})), **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
