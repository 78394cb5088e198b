"""A real model, asked a real question the way that people do."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import openai
import pytest

import treadle
from tests.serve.serving import Served
from tests.weights.gguf_files import smollm2
from treadle.serve.engine import Engine
from treadle.serve.model import Model

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def smollm() -> Model:
    return treadle.load(smollm2())


@pytest.fixture(scope="module")
def client(smollm: Model) -> Generator[openai.OpenAI]:
    server = Served(Engine(smollm, max_num_seqs=4, max_model_len=512), ["smollm2"])
    yield server.client
    server.close()


def test_it_knows_the_capital_of_france(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "smollm2", "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    answer = client.chat.completions.create(**ask)
    (choice,) = answer.choices
    assert "Paris" in choice.message.content
    assert choice.finish_reason == "stop", "the answer ends by itself"
    assert "<|" not in choice.message.content
    chunks = client.chat.completions.create(**ask, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content


def test_neighbours_do_not_change_what_it_says(smollm: Model) -> None:
    """In fp32: the tokens of a batch are those of each prompt alone, over the lengths that prompts really have."""
    prompts = [
        "The capital of France is",
        "def fibonacci(n):\n",
        "Once upon a time, in a forest far away, ",
    ]
    with Engine(smollm, max_num_seqs=3, max_model_len=128) as engine:
        together = engine.generate(prompts, temperature=0, max_tokens=8, ignore_eos=True)
        for prompt, completion in zip(prompts, together, strict=True):
            assert engine.generate([prompt], temperature=0, max_tokens=8, ignore_eos=True) == [completion]
