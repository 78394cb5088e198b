"""The HTTP API, by OpenAI's own client and by hand, against a real server on a free port."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.serve.serving import Served
from treadle.model.chat import encode_chat
from treadle.model.tokenizer import Tokenizer
from treadle.serve.api.protocol import MAX_BODY_BYTES
from treadle.serve.engine import Engine
from treadle.serve.model import Model

SLOTS = 4
HELLO = [{"role": "user", "content": "def read"}]


@pytest.fixture(scope="module")
def served(model: Model) -> Generator[Served]:
    server = Served(Engine(model, max_num_seqs=SLOTS))
    yield server
    server.close()


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return served.client


def greedy(served: Served, prompt: str | list[int], count: int) -> Any:
    return served.engine.generate([prompt], temperature=0, max_tokens=count, ignore_eos=True)[0]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "also-tiny"]
    assert client.models.retrieve("tiny").owned_by == "treadle"
    with pytest.raises(openai.NotFoundError, match="'huge' is not served here, only tiny, also-tiny"):
        client.models.retrieve("huge")


def test_a_chat_completion(served: Served, client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    prompt = encode_chat(tokenizer, HELLO, add_generation_prompt=True)
    expected = greedy(served, prompt, 12)
    extra = {"ignore_eos": True}
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=12, temperature=0, extra_body=extra
    )
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", expected.text, "length")
    assert answer.usage.prompt_tokens == len(prompt) and answer.usage.completion_tokens == 12
    assert (
        answer.usage.total_tokens == len(prompt) + 12 and answer.model == "tiny" and answer.object == "chat.completion"
    )

    chunks = list(
        client.chat.completions.create(
            model="also-tiny", messages=HELLO, max_completion_tokens=12, temperature=0, extra_body=extra,
            stream=True, stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == expected.text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage == answer.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_content_parts_and_roles(served: Served, client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "def "}, {"type": "text", "text": "read"}]},
    ]
    answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
    plain = [{"role": "system", "content": "be brief"}, *HELLO]
    assert answer.usage.prompt_tokens == len(encode_chat(tokenizer, plain, add_generation_prompt=True))
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    assert (
        "messages" in served.error("/v1/chat/completions", 400, messages=[{"role": "user", "content": image}])["param"]
    )


def test_completions_of_texts_and_tokens(served: Served, client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    texts = ["def read", "the quick"]
    expected = [greedy(served, text, 10).text for text in texts]
    extra = {"ignore_eos": True}

    def ask(prompt: Any, **more: Any) -> Any:
        return client.completions.create(
            model="tiny", prompt=prompt, max_tokens=10, temperature=0, extra_body=extra, **more
        )

    assert [choice.text for choice in ask(texts).choices] == expected
    assert [choice.text for choice in ask([tokenizer.encode(text) for text in texts]).choices] == expected
    assert ask(tokenizer.encode(texts[0])).choices[0].text == expected[0]
    shown = ["", ""]
    for chunk in ask(texts, stream=True):
        shown[chunk.choices[0].index] += chunk.choices[0].text
    assert shown == expected
    answer = ask(texts, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [expected[0]] * 2 + [expected[1]] * 2
    assert answer.usage.completion_tokens == 40
    short = client.completions.create(model="tiny", prompt="x", extra_body=extra)
    assert short.usage.completion_tokens == 16, "as OpenAI's"


def test_seeds_choices_and_stops(client: openai.OpenAI) -> None:
    def ask(**more: Any) -> list[str]:
        answer = client.completions.create(
            model="tiny", prompt="fox", max_tokens=20, n=3, extra_body={"ignore_eos": True}, **more
        )
        return [choice.text for choice in answer.choices]

    assert ask(seed=5) == ask(seed=5) != ask(seed=6)
    assert len(set(ask(seed=5))) == 3
    text = ask(seed=5)[0]
    stop = text[5:8]
    answer = client.completions.create(
        model="tiny", prompt="fox", max_tokens=20, seed=5, stop=["never there", stop], extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].text == text[: text.index(stop)] and answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_extra == {"stop_reason": stop}


def test_logprobs(served: Served, client: openai.OpenAI, model: Model, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("def")
    expected = model.logits(tokens)[-1].log_softmax(-1)
    best = int(expected.argmax())
    answer = client.completions.create(model="tiny", prompt="def", max_tokens=3, temperature=0, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs.token_logprobs[0] == pytest.approx(float(expected[best]), abs=1e-4)
    assert len(logprobs.tokens) == len(logprobs.top_logprobs) == len(logprobs.text_offset)

    prompt = encode_chat(tokenizer, HELLO, add_generation_prompt=True)
    expected = model.logits(prompt)[-1].log_softmax(-1)
    ask: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 2, "temperature": 0, "logprobs": True}
    whole = client.chat.completions.create(**ask, top_logprobs=3).choices[0].logprobs.content
    assert whole[0].logprob == pytest.approx(float(expected.max()), abs=1e-4)
    top = [one.logprob for one in whole[0].top_logprobs]
    assert top == pytest.approx(expected.topk(3).values.tolist(), abs=1e-4)
    assert bytes(whole[0].bytes).decode() == whole[0].token
    streamed = [
        one
        for chunk in client.chat.completions.create(**ask, top_logprobs=3, stream=True)
        for one in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
    ]
    assert streamed == whole
    assert client.chat.completions.create(**ask).choices[0].logprobs.content[0].top_logprobs == []


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "messages", ["messages", "required"]),
        ({"messages": []}, "messages", ["messages"]),
        ({"messages": HELLO, "max_tokens": 0}, "max_tokens", ["max_tokens"]),
        ({"messages": HELLO, "max_tokens": -3}, "max_tokens", ["max_tokens", "-3"]),
        ({"messages": HELLO, "max_tokens": 10**9}, None, ["max_tokens=1000000000", "128"]),
        ({"messages": HELLO, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", ["differ"]),
        ({"messages": [{"role": "user", "content": "x " * 500}]}, None, ["128", "shorten"]),
        ({"messages": [{"role": "user", "content": "x" * 100000}]}, None, ["100000 characters", "128"]),
        ({"messages": HELLO, "temperature": 1e9}, "temperature", ["temperature"]),
        ({"messages": HELLO, "temperature": "hot"}, "temperature", ["temperature", "hot"]),
        ({"messages": HELLO, "top_p": 0}, "top_p", ["top_p"]),
        ({"messages": HELLO, "n": 0}, "n", ["n"]),
        ({"messages": HELLO, "temprature": 0}, "temprature", ["did you mean 'temperature'"]),
        ({"messages": HELLO, "functions": [{"name": "f"}]}, "functions", ["functions", "not supported"]),
        ({"messages": HELLO, "top_logprobs": 2}, "top_logprobs", ["logprobs=true"]),
        ({"messages": HELLO, "stream_options": {"include_usage": True}}, None, ["stream=true"]),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages", ["role"]),
        ({"messages": [{"role": "user"}]}, "messages", ["content"]),
        ({"messages": HELLO, "stop": [""]}, "stop", ["stop"]),
        ({"messages": HELLO, "logit_bias": {"999": 1}}, None, ["logit_bias", "999"]),
        ({"messages": HELLO, "chat_template_kwargs": {"tokenizer": 1}}, "chat_template_kwargs", ["tokenizer"]),
    ],
)
def test_what_is_wrong_is_named(served: Served, body: dict[str, Any], param: str | None, words: list[str]) -> None:
    for stream in ({}, {"stream": True}):
        error = served.error("/v1/chat/completions", 400, **body, **(stream if "stream_options" not in body else {}))
        assert error["type"] == "invalid_request_error" and error["param"] == param
        assert all(word in error["message"] for word in words), error["message"]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", ["empty"]),
        ([], ["empty"]),
        ([[]], ["empty"]),
        ([300], ["300"]),
        (["a"] * 257, ["257"]),
        ("x" * 100000, ["100000 characters"]),
        (None, ["required"]),
    ],
)
def test_wrong_prompts_are_named(served: Served, prompt: Any, words: list[str]) -> None:
    message = served.error("/v1/completions", 400, prompt=prompt)["message"]
    assert all(word in message for word in words), message


def test_fields_that_ask_for_nothing_are_taken(served: Served) -> None:
    body = {"prompt": "x", "max_tokens": 1, "user": "me", "echo": False, "best_of": 1, "suffix": None, "stop": None}
    assert served.http.post("/v1/completions", json=body).status_code == 200
    body = {"messages": HELLO, "max_tokens": 1, "tools": [], "response_format": {"type": "text"}, "store": True}
    assert served.http.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"{", 400),
        (b"", 400),
        (b"[]", 400),
        (b'{"prompt": "\xff"}', 400),
        (b'{"prompt": "\\ud800"}', 400),
        (b'{"prompt": "x", "temperature": NaN}', 400),
        (b'{"prompt": ' + b"[" * 100000, 400),
        (b" " * (MAX_BODY_BYTES + 1), 413),
    ],
    ids=["cut", "empty", "list", "not UTF-8", "lone surrogate", "NaN", "deep", "huge"],
)
def test_bodies_that_are_no_requests(served: Served, content: bytes, status: int) -> None:
    answer = served.http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == status and answer.json()["error"]["type"] == "invalid_request_error"


def test_other_paths_methods_and_types(served: Served) -> None:
    for answer, status in (
        (served.http.get("/v1/nothing"), 404),
        (served.http.get("/v1/completions"), 405),
        (served.http.post("/v1/completions", content=b"{}"), 415),
        (served.http.post("/v1/completions", json={"model": "huge", "prompt": "x"}), 404),
    ):
        assert answer.status_code == status and answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == "model_not_found"


def test_tokenize_and_back(served: Served, tokenizer: Tokenizer) -> None:
    text = "def caf\u00e9 \U0001f600"
    answer = served.http.post("/tokenize", json={"prompt": text}).json()
    assert answer == {"tokens": tokenizer.encode(text), "count": len(tokenizer.encode(text)), "max_model_len": 128}
    bare = served.http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert served.http.post("/detokenize", json={"tokens": bare}).json() == {"prompt": text}
    chat = served.http.post("/tokenize", json={"messages": HELLO}).json()["tokens"]
    assert chat == encode_chat(tokenizer, HELLO, add_generation_prompt=True)
    assert "300" in served.error("/detokenize", 400, tokens=[300])["message"]
    assert "either" in served.error("/tokenize", 400)["message"]


def test_fifty_clients_share_four_slots(served: Served) -> None:
    before = served.engine.stats.generated_tokens

    def ask(number: int) -> str:
        client = openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0, timeout=120)
        body: dict[str, Any] = {"model": "tiny", "max_tokens": 20, "seed": number % 5}
        body["extra_body"] = {"ignore_eos": True}
        if number % 2:
            chunks = client.completions.create(prompt="fox", stream=True, **body)
            return "".join(chunk.choices[0].text for chunk in chunks)
        return client.completions.create(prompt="fox", **body).choices[0].text

    with ThreadPoolExecutor(50) as pool:
        texts = list(pool.map(ask, range(50)))
    assert all(texts[number] == texts[number % 5] for number in range(50)), "each its own answer, whoever was beside it"
    assert len(set(texts)) == 5
    assert served.engine.stats.generated_tokens - before == 50 * 20


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(served: Served, stream: bool) -> None:
    """More endless requests than slots, all abandoned; the next one is answered."""
    cancelled, seen = served.engine.stats.finished.get("cancelled", 0), served.engine.stats.requests
    host, port = served.socket.getsockname()
    body = json.dumps({"prompt": "x", "max_tokens": 120, "n": 100, "ignore_eos": True, "stream": stream}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    left = []
    for _ in range(2):
        connection = socket.create_connection((host, port), timeout=30)
        connection.sendall(head.encode() + body)
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        left.append(connection)
    # A client that leaves before its request was read has nothing to free.
    assert any(served.engine.stats.requests > seen or not served.http.get("/health") for _ in range(5000))
    for connection in left:
        connection.close()
    assert served.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
    ends = served.engine.stats.finished
    assert any(ends.get("cancelled", 0) > cancelled or not served.http.get("/health") for _ in range(5000))


def test_a_failed_request_is_an_error_in_openais_shape(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("treadle.serve.core.choose", broken)
    message = "the model could not compute this request: RuntimeError: out of memory"
    assert served.error("/v1/completions", 500, prompt="x") == {
        "message": message, "type": "server_error", "param": None, "code": None,
    }  # fmt: skip
    with pytest.raises(openai.APIError, match="out of memory"):
        list(served.client.completions.create(model="tiny", prompt="x", stream=True))
    monkeypatch.undo()
    assert served.http.get("/health").json() == {"status": "ok"}
    assert served.client.completions.create(model="tiny", prompt="x").choices


def test_a_key_guards_all_but_health(model: Model) -> None:
    server = Served(Engine(model, max_num_seqs=1), api_key="s3cret")
    try:
        assert server.http.get("/health").status_code == 200
        for path in ("/v1/models", "/metrics", "/nothing"):
            answer = server.http.get(path)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        for wrong in ("s3cre", "s3cret2", "x", "\u00e9"):
            headers = [(b"Authorization", b"Bearer " + wrong.encode())]
            assert server.http.get("/v1/models", headers=headers).status_code == 401
        with_key = openai.OpenAI(base_url=server.url + "/v1", api_key="s3cret", max_retries=0)
        assert next(one.id for one in with_key.models.list()) == "tiny"
    finally:
        server.close()


def test_an_engine_that_failed_is_not_healthy(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Served(Engine(model, max_num_seqs=1))
    try:

        def broken(*_: Any) -> Any:
            raise ZeroDivisionError("defect")

        monkeypatch.setattr("treadle.serve.core.decide", broken)
        assert "defect" in server.error("/v1/completions", 500, prompt="x")["message"]
        assert server.http.get("/health").status_code == 503
        assert "must be started again" in server.error("/v1/completions", 503, prompt="x")["message"]
    finally:
        server.close()


def test_too_many_waiting_are_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.serve.api.service.MAX_WAITING", 3)
    assert "4 answers in one request; at most 3" in served.error("/v1/completions", 400, prompt="x", n=4)["message"]
    monkeypatch.setattr(served.engine.stats, "waiting", 2)
    answer = served.http.post("/v1/completions", json={"prompt": "x", "n": 2})
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert "2 requests wait already" in answer.json()["error"]["message"]


def test_the_engine_serves_python_beside_http(served: Served) -> None:
    async def both() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
            remote = client.completions.create(model="tiny", prompt="fox", max_tokens=9, seed=3)
            local = [delta.text async for delta in served.engine.stream("fox", max_tokens=9, seed=3)]
            return (await remote).choices[0].text, "".join(local)

    remote, local = asyncio.run(both())
    assert remote == local
