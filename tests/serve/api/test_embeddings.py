"""Embeddings by OpenAI's client."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
from typing import Any

import pytest

from tests.serve.serving import Served
from tests.serve.tiny import CONFIG
from treadle.model.tokenizer import Tokenizer

WIDTH = CONFIG["hidden_size"]


def embed(server: Served, given: Any, **more: Any) -> Any:
    return server.client.embeddings.create(model="tiny", input=given, **more)


def test_forms_and_shapes(served: Served, tokenizer: Tokenizer) -> None:
    texts = ["def read(path)", "the quick brown fox"]
    both = embed(served, texts, encoding_format="float")
    assert [one.index for one in both.data] == [0, 1] and both.object == "list" and both.model == "tiny"
    assert all(len(one.embedding) == WIDTH for one in both.data)
    assert all(math.hypot(*one.embedding) == pytest.approx(1, abs=1e-5) for one in both.data)
    tokens = [tokenizer.encode(text) for text in texts]
    assert both.usage.prompt_tokens == both.usage.total_tokens == sum(map(len, tokens))
    packed = embed(served, texts)  # the client asks for base64
    for one, other in zip(both.data, packed.data, strict=True):
        assert list(one.embedding) == pytest.approx(list(other.embedding), abs=1e-6)
    assert embed(served, tokens, encoding_format="float").data[1].embedding == pytest.approx(
        both.data[1].embedding, abs=1e-5
    )
    (alone,) = embed(served, tokens[0], encoding_format="float").data
    assert alone.embedding == pytest.approx(both.data[0].embedding, abs=1e-5)
    (short,) = embed(served, texts[0], dimensions=5, encoding_format="float").data
    scale = math.hypot(*both.data[0].embedding[:5])
    assert short.embedding == pytest.approx([value / scale for value in both.data[0].embedding[:5]], abs=1e-5)


def test_a_client_that_leaves_ends_its_work(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), threading.Event()

    async def endless(prompt: Any) -> Any:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    monkeypatch.setattr(served.engine, "embed", endless)
    body = b'{"input": "x"}'
    head = "POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection(served.socket.getsockname(), timeout=30) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert begun.wait(30)
    assert ended.wait(30)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": ""}, "input", "empty"),
        ({"input": []}, "input", "empty"),
        ({"input": ["x", ""]}, "input", "empty"),
        ({"input": [[]]}, "input", "empty"),
        ({"input": [99999]}, "input", "99999"),
        ({"input": ["x"] * 257}, "input", "257"),
        ({"input": "x " * 5000}, "input", "4096"),
        ({"input": "x", "dimensions": 33}, "dimensions", "33"),
        ({"input": "x", "dimensions": 0}, "dimensions", "0"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format", "int8"),
        ({}, "input", "required"),
    ],
)
def test_what_is_wrong_is_named(served: Served, body: dict[str, Any], param: str, words: str) -> None:
    error = served.error("/v1/embeddings", 400, **body)
    assert words in error["message"] and error["param"] == param, error
