"""Messages by Anthropic's client: blocks, events, tools, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anthropic
import jsonschema
import pytest

from tests.serve.api.scripted import ScriptedEngine
from tests.serve.api.test_chat import CALL
from tests.serve.serving import Served
from treadle.serve.request import FinishReason

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
WEATHER: Any = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Bonn"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def client_of(server: Served, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0, timeout=60)


def ask(server: Served, **more: Any) -> Any:
    return client_of(server).messages.create(model="tiny", **{"messages": HELLO, "max_tokens": 900, **more})


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_events_build_the_message(scripted: Callable[..., Served], size: int) -> None:
    answer = f"<think>Rome?</think>Let me see.\n{CALL}\n{CALL.replace('Rome', 'Bonn')}"
    server = scripted(*(answer[start : start + size] for start in range(0, len(answer), size)))
    whole = ask(server, tools=[WEATHER], system="Be brief.")
    thought, text, first, second = whole.content
    assert (whole.type, whole.role, whole.stop_reason, whole.stop_sequence) == (
        "message",
        "assistant",
        "tool_use",
        None,
    )
    assert (thought.thinking, text.text) == ("Rome?", "Let me see.")
    assert [(one.type, one.name, one.input) for one in (first, second)] == [
        ("tool_use", "weather", {"city": "Rome"}),
        ("tool_use", "weather", {"city": "Bonn"}),
    ]
    assert first.id.startswith("toolu_") and first.id != second.id
    assert whole.usage.output_tokens == len(range(0, len(answer), size)) and whole.usage.input_tokens > 0

    client = client_of(server)
    with client.messages.stream(model="tiny", messages=HELLO, max_tokens=99, tools=[WEATHER]) as stream:
        names = [event.type for event in stream]
        final = stream.get_final_message()
    assert names[0] == "message_start" and names[-1] == "message_stop"
    shown = [block.model_dump(exclude={"id"}) for block in whole.content]
    assert [block.model_dump(exclude={"id"}) for block in final.content] == shown
    assert (final.stop_reason, final.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)


def test_a_whole_round_of_tools(scripted: Callable[..., Served]) -> None:
    server = scripted("It is sunny.")
    assert isinstance(server.engine, ScriptedEngine)
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sunny"}]}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Rome.", "signature": ""}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    system = [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]
    answer = ask(server, messages=messages, tools=[WEATHER], system=system)
    assert answer.content[0].text == "It is sunny." and answer.stop_reason == "end_turn"
    prompt = server.engine.prompt()
    assert CALL in prompt and "Be kind." in prompt and "Tells the weather." in prompt
    assert prompt.index("Weather?") < prompt.index("sunny") < prompt.index("And?")
    failed = {**result, "is_error": True, "content": "no such city"}
    ask(server, messages=[*messages[:2], {"role": "user", "content": [failed]}], tools=[WEATHER])
    assert "Error: no such city" in server.engine.prompt()
    counted = client_of(server).messages.count_tokens(model="tiny", messages=messages, tools=[WEATHER], system=system)
    assert counted.input_tokens == answer.usage.input_tokens


def test_why_it_ended(scripted: Callable[..., Served]) -> None:
    server = scripted("Once", engine={"reason": FinishReason.LENGTH})
    assert ask(server).stop_reason == "max_tokens"
    server = scripted("Once", engine={"stop_reason": "END"})
    answer = ask(server, stop_sequences=["END"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "END")
    assert isinstance(server.engine, ScriptedEngine) and server.engine.asked[-1].settings.stop == ("END",)


def test_an_answer_that_was_begun_is_continued(scripted: Callable[..., Served]) -> None:
    server = scripted(" four.")
    answer = ask(server, messages=[*HELLO, {"role": "assistant", "content": "Two and two is"}])
    assert answer.content[0].text == " four."
    assert isinstance(server.engine, ScriptedEngine) and server.engine.prompt().endswith("Two and two is")


def test_a_random_model_calls_tools_where_it_must(served: Served) -> None:
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}):
        answer = ask(served, tools=[WEATHER], tool_choice=choice, thinking={"type": "disabled"})
        (call,) = answer.content
        assert call.name == "weather" and answer.stop_reason == "tool_use"
        jsonschema.validate(call.input, WEATHER["input_schema"])


def test_keys_and_errors_have_anthropics_shape(scripted: Callable[..., Served]) -> None:
    server = scripted("x", api_key="s3cret")
    with pytest.raises(anthropic.AuthenticationError, match="API key"):
        ask(server)
    client = client_of(server, "s3cret")
    assert client.messages.create(model="tiny", messages=HELLO, max_tokens=5).content
    with pytest.raises(anthropic.NotFoundError, match="'huge' is not served") as missing:
        client.messages.create(model="huge", messages=HELLO, max_tokens=5)
    assert missing.value.body == {
        "type": "error",
        "error": {"type": "not_found_error", "message": "the model 'huge' is not served here, only tiny, also-tiny"},
    }
    headers = {"x-api-key": "s3cret"}
    for answer, kind in (
        (server.http.get("/v1/messages", headers=headers), "invalid_request_error"),
        (server.http.post("/v1/messages/nothing", headers=headers, json={}), "not_found_error"),
        (server.http.post("/v1/messages", headers=headers, content=b"{}"), "invalid_request_error"),
    ):
        assert answer.json()["type"] == "error" and answer.json()["error"]["type"] == kind


def test_a_failure_in_a_stream_is_an_error_event(scripted: Callable[..., Served]) -> None:
    server = scripted("Once", "", engine={"reason": FinishReason.ERROR, "error": "out of memory"})
    with pytest.raises(anthropic.APIStatusError, match="out of memory"):
        list(ask(server, stream=True))
    with pytest.raises(anthropic.InternalServerError, match="out of memory"):
        ask(server)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 100_000}, "max_tokens=100000"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "name": "f"}]}]}, "tool_use"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_result"}]}]}, "tool_result"),
        ({"temperature": 1.5}, "temperature"),
        ({"tool_choice": {"type": "any"}}, "no tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "no"}}, "'no'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"temprature": 1}, "did you mean 'temperature'"),
    ],
)
def test_what_is_wrong_is_named(served: Served, body: dict[str, Any], words: str) -> None:
    answer = served.http.post("/v1/messages", json={"max_tokens": 5, "messages": HELLO, **body})
    error = answer.json()
    assert answer.status_code == 400 and error["error"]["type"] == "invalid_request_error"
    assert words in error["error"]["message"] and "\n" not in error["error"]["message"], error
