"""Whatever a client sends, the answer is a success or names a mistake of the client: the server never fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serve.api.scripted import ScriptedEngine
from tests.serve.api.test_chat import CALL, CLOCK, WEATHER
from tests.serve.serving import Served
from treadle.model.tokenizer import Tokenizer
from treadle.serve.api.chat import ChatBody
from treadle.serve.api.completions import CompletionBody
from treadle.serve.api.embeddings import EmbeddingBody
from treadle.serve.api.information import DetokenizeBody, TokenizeBody
from treadle.serve.api.messages import MessagesBody
from treadle.serve.api.responses import ResponsesBody
from treadle.serve.model import Model

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.sampled_from([-1, 2**31, 2**63, 10**30, 0.5, -0.0, 1e300]),
    st.sampled_from(
        ["", "x", "auto", "none", "required", "text", "user", "assistant", "tool", "function", "\x00", "é", "{}", "("]
    ),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "name", "content", "text", "role", "schema", "json", "function"]), inner
        )
    ),
    max_leaves=6,
)
HELLO = [{"role": "user", "content": "x"}]
CALLED = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
GOOD: dict[str, list[Any]] = {
    "messages": [
        HELLO,
        [*HELLO, {"role": "assistant", "content": None, "tool_calls": [CALLED]}, {"role": "tool", "content": "y"}],
        [{"role": "system", "content": ""}, {"role": "user", "content": [{"type": "text", "text": ""}]}],
        [*HELLO, {"role": "assistant", "content": "and"}],
        [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"x": [1]}}]}],
        [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "y"}]}],
    ],
    "tools": [[WEATHER], [CLOCK, WEATHER], [{"name": "f", "input_schema": {"type": "object"}}], []],
    "tool_choice": ["auto", "none", "required", {"type": "any"}, {"type": "tool", "name": "f"}],
    "response_format": [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
    ],
    "input": ["x", [1, 2], ["x", "y"], [{"role": "user", "content": "x"}], [{"type": "function_call", "name": "f"}]],
    "prompt": ["x", [1, 2], ["x"], [[1], [2]]],
    "structured_outputs": [{"regex": "a+"}, {"json": {}}, {"choice": ["a"]}],
    "stream": [True, False],
    "tokens": [[1, 2]],
    "max_tokens": [5],
}
BODIES = {
    "/v1/chat/completions": (ChatBody, "messages"),
    "/v1/completions": (CompletionBody, "prompt"),
    "/v1/responses": (ResponsesBody, "input"),
    "/v1/messages": (MessagesBody, "messages"),
    "/v1/messages/count_tokens": (MessagesBody, "messages"),
    "/v1/embeddings": (EmbeddingBody, "input"),
    "/tokenize": (TokenizeBody, "messages"),
    "/detokenize": (DetokenizeBody, "tokens"),
}


def bodies(path: str) -> st.SearchStrategy[dict[str, Any]]:
    kind, needed = BODIES[path]
    names = sorted(kind.model_fields.keys() - {needed, "model"})
    fields = st.sampled_from([*names, "functions", "nonsense"]).flatmap(
        lambda name: st.tuples(st.just(name), st.sampled_from(GOOD[name]) | VALUES if name in GOOD else VALUES)
    )
    first = st.sampled_from(GOOD[needed]) | VALUES
    extra = {"max_tokens": 5} if kind is MessagesBody else {}
    return st.tuples(first, st.lists(fields, max_size=3)).map(lambda pair: {**extra, needed: pair[0], **dict(pair[1])})


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer, model: Model) -> Generator[Served]:
    server = Served(ScriptedEngine(tokenizer, model.spec, ["<think>a</think>b ", CALL]))
    yield server
    server.close()


@pytest.mark.parametrize("path", list(BODIES))
def test_no_body_breaks_the_server(server: Served, path: str) -> None:
    @settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
    @given(body=bodies(path))
    def check(body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        answer = server.http.post(path, content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code in (200, 400), (answer.status_code, answer.text)
        if answer.status_code == 400:
            message = answer.json()["error"]["message"]
            assert message and "\n" not in message and len(message) < 2000, message
        elif "text/event-stream" in answer.headers["content-type"]:
            assert "server_error" not in answer.text and "api_error" not in answer.text
        else:
            answer.json()

    run: Callable[[], None] = check
    run()
