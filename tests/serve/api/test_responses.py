"""Responses by OpenAI's client: items, events, tools, formats."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import openai
import pytest

from tests.serve.api.scripted import ScriptedEngine
from tests.serve.api.test_chat import CALL, SCHEMA
from tests.serve.serving import Served
from treadle.serve.request import FinishReason, TokenLogprob

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Bonn"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


def ask(server: Served, **more: Any) -> Any:
    return server.client.responses.create(model="tiny", **{"input": "Hello", **more})


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_events_build_the_response(scripted: Callable[..., Served], size: int) -> None:
    answer = f"<think>Rome?</think>Let me see.\n{CALL}\n{CALL.replace('Rome', 'Bonn')}"
    server = scripted(*(answer[start : start + size] for start in range(0, len(answer), size)))
    whole = ask(server, tools=[WEATHER], instructions="Be brief.", metadata={"a": "b"})
    thought, message, first, second = whole.output
    assert (whole.object, whole.status, whole.error, whole.instructions) == ("response", "completed", None, "Be brief.")
    assert whole.metadata == {"a": "b"} and whole.tools[0].name == "weather" and whole.output_text == "Let me see."
    assert thought.type == "reasoning" and thought.content[0].text == "Rome?" and thought.summary == []
    assert message.type == "message" and message.status == "completed" and message.role == "assistant"
    assert [(one.type, one.name, one.arguments) for one in (first, second)] == [
        ("function_call", "weather", '{"city": "Rome"}'),
        ("function_call", "weather", '{"city": "Bonn"}'),
    ]
    assert first.call_id != second.call_id
    assert whole.usage.output_tokens == len(range(0, len(answer), size))
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens

    with server.client.responses.stream(model="tiny", input="Hello", tools=[WEATHER]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created" and events[-1].type == "response.completed"
    assert final.output_text == "Let me see." and [one.type for one in final.output] == [
        one.type for one in whole.output
    ]
    assert [one.arguments for one in final.output[2:]] == ['{"city": "Rome"}', '{"city": "Bonn"}']
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "Let me see."
    added = [event.item.id for event in events if event.type == "response.output_item.added"]
    done = [event.item.id for event in events if event.type == "response.output_item.done"]
    assert added == done == [one.id for one in final.output]


def test_a_whole_round_of_tools(scripted: Callable[..., Served]) -> None:
    server = scripted("It is sunny.")
    assert isinstance(server.engine, ScriptedEngine)
    items = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Rome."}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    ]
    answer = ask(server, input=items, tools=[WEATHER])
    assert answer.output_text == "It is sunny."
    prompt = server.engine.prompt()
    assert CALL in prompt and "sunny" in prompt and "Be kind." in prompt and "Weather?" in prompt
    # What was answered is taken as input again.
    again = ask(server, input=[*items, *(one.model_dump(exclude_none=True) for one in answer.output), items[1]])
    assert again.status == "completed" and "It is sunny." in server.engine.prompt()


def test_what_is_cut_off_is_incomplete(scripted: Callable[..., Served]) -> None:
    server = scripted("Once upon", engine={"reason": FinishReason.LENGTH})
    answer = ask(server, max_output_tokens=5)
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    events = list(ask(server, stream=True))
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == "Once upon"


def test_a_failure_is_an_event(scripted: Callable[..., Served]) -> None:
    server = scripted("Once", "", engine={"reason": FinishReason.ERROR, "error": "out of memory"})
    events = list(ask(server, stream=True))
    assert events[-1].type == "response.failed" and events[-1].response.error.message == "out of memory"
    with pytest.raises(openai.InternalServerError, match="out of memory"):
        ask(server)


def test_log_probabilities(scripted: Callable[..., Served]) -> None:
    logprobs = (TokenLogprob(70, -0.5, ((70, -0.5), (71, -1.5))),)
    server = scripted("x", engine={"logprobs": logprobs})
    answer = ask(server, include=["message.output_text.logprobs"], top_logprobs=2)
    (shown,) = answer.output[0].content[0].logprobs
    assert shown.logprob == -0.5 and [one.logprob for one in shown.top_logprobs] == [-0.5, -1.5]
    (event,) = [
        event for event in ask(server, stream=True, top_logprobs=2) if event.type == "response.output_text.delta"
    ]
    assert event.logprobs[0].logprob == -0.5


def test_a_random_model_keeps_to_formats_and_tools(served: Served) -> None:
    form = {"format": {"type": "json_schema", "name": "person", "schema": SCHEMA, "strict": True}}
    answer = ask(served, text=form, extra_body={**NO_THINKING, "seed": 3})
    jsonschema.validate(json.loads(answer.output_text), SCHEMA)
    for choice in (
        "required",
        {"type": "function", "name": "weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
    ):
        answer = ask(served, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False, extra_body=NO_THINKING)
        (call,) = answer.output
        assert call.name == "weather"
        jsonschema.validate(json.loads(call.arguments), WEATHER["parameters"])  # fmt: skip


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "stores no responses"),
        ({"conversation": "conv_1"}, "conversation", "stores no responses"),
        ({"input": []}, "input", "empty"),
        ({"input": None}, "input", "required"),
        ({"input": [{"type": "function_call", "call_id": "a"}]}, "input", "input.0"),
        ({"input": [{"role": "user"}]}, "input", "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input", "input_image"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools", "web_search"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "no"}}, "tool_choice", "'no'"),
        ({"text": {"format": {"type": "json_schema"}}}, "text", "schema"),
        ({"text": {"format": {"type": "json_schema", "schema": False}}}, "text", "false"),
        ({"background": True}, "background", "background"),
        ({"reasoning": {"effort": "high"}}, "reasoning", "high"),
    ],
)
def test_what_is_wrong_is_named(served: Served, body: dict[str, Any], param: str, words: str) -> None:
    error = served.error("/v1/responses", 400, **{"input": "Hello", **body})
    assert words in error["message"] and error["param"] == param, error
