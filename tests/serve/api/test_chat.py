"""Chats by OpenAI's client: tools, reasoning, formats."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import openai
import pytest

from tests.serve.api.scripted import ScriptedEngine
from tests.serve.serving import Served
from treadle.model.tokenizer import Tokenizer
from treadle.serve.request import FinishReason

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Bonn"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def ask(server: Served, **more: Any) -> Any:
    return server.client.chat.completions.create(model="tiny", messages=more.pop("messages", HELLO), **more)


def joined(chunks: Any) -> dict[str, Any]:
    """Return what a client puts together of a stream of one choice."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "reasons": []}
    for chunk in chunks:
        for choice in chunk.choices:
            found["content"] += choice.delta.content or ""
            found["reasoning"] += (choice.delta.model_extra or {}).get("reasoning_content") or ""
            for call in choice.delta.tool_calls or []:
                if call.id:
                    assert call.index == len(found["calls"]) and call.type == "function"
                    found["calls"].append([call.function.name, ""])
                found["calls"][call.index][1] += call.function.arguments
            found["reasons"] += [choice.finish_reason] if choice.finish_reason else []
    return found


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_reasoning_text_and_calls_come_apart(scripted: Callable[..., Served], size: int) -> None:
    answer = f"<think>\nRome, or Bonn?\n</think>\n\nLet me see.\n{CALL}\n" + CALL.replace("Rome", "Bonn")
    server = scripted(*(answer[start : start + size] for start in range(0, len(answer), size)))
    whole = ask(server, tools=[WEATHER])
    message = whole.choices[0].message
    assert message.content == "Let me see." and message.model_extra["reasoning_content"] == "Rome, or Bonn?"
    assert [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls] == [
        ("weather", {"city": "Rome"}),
        ("weather", {"city": "Bonn"}),
    ]
    assert len({call.id for call in message.tool_calls}) == 2 and whole.choices[0].finish_reason == "tool_calls"
    shown = joined(ask(server, tools=[WEATHER], stream=True))
    assert shown == {
        "content": "Let me see.",
        "reasoning": "Rome, or Bonn?",
        "calls": [["weather", '{"city": "Rome"}'], ["weather", '{"city": "Bonn"}']],
        "reasons": ["tool_calls"],
    }
    silent = ask(server, tools=[WEATHER], extra_body={"include_reasoning": False})
    assert "reasoning_content" not in silent.choices[0].message.model_extra


def test_a_whole_round_of_tools(scripted: Callable[..., Served]) -> None:
    server = scripted("It is sunny.")
    engine = server.engine
    assert isinstance(engine, ScriptedEngine)
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]},
    ]
    answer = ask(server, messages=messages, tools=[WEATHER, CLOCK], tool_choice="auto")
    assert answer.choices[0].message.content == "It is sunny." and answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"
    prompt = engine.prompt()
    assert CALL in prompt and "sunny" in prompt
    assert '"name": "weather", "description": "Tells the weather."' in prompt and '"name": "clock"' in prompt
    ask(server, tools=[WEATHER], tool_choice="none")
    assert "Tells the weather" not in engine.prompt()


def test_calls_that_are_cut_off_are_text(scripted: Callable[..., Served]) -> None:
    cut_off = CALL[:40]
    server = scripted("Well. ", cut_off, engine={"reason": FinishReason.LENGTH})
    choice = ask(server, tools=[WEATHER]).choices[0]
    assert choice.message.content == f"Well. {cut_off}" and choice.finish_reason == "length"
    assert choice.message.tool_calls is None
    shown = joined(ask(server, tools=[WEATHER], stream=True))
    assert shown["content"] == f"Well. {cut_off}" and shown["reasons"] == ["length"]


def test_without_tools_a_call_is_text(scripted: Callable[..., Served]) -> None:
    server = scripted(CALL)
    assert ask(server).choices[0].message.content == CALL
    assert ask(server, tools=[WEATHER], tool_choice="none").choices[0].message.content == CALL


def test_parsers_by_name(scripted: Callable[..., Served]) -> None:
    server = scripted('[TOOL_CALLS]clock[ARGS]{"a": 1}', tool_call_parser="mistral", reasoning_parser="none")
    (call,) = ask(server, tools=[CLOCK]).choices[0].message.tool_calls
    assert call.function.name == "clock" and re.fullmatch("[0-9a-f]{9}", call.id)
    server = scripted("<think>a</think>b", reasoning_parser="none")
    assert ask(server).choices[0].message.content == "<think>a</think>b"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"weather", "clock"}),
        ({"type": "function", "function": {"name": "clock"}}, {"clock"}),
    ],
)
def test_a_random_model_calls_tools_where_it_must(served: Served, stream: bool, choice: Any, names: set[str]) -> None:
    for seed in range(4):
        answer = ask(
            served, tools=[WEATHER, CLOCK], tool_choice=choice, parallel_tool_calls=False, seed=seed, stream=stream,
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )  # fmt: skip
        if stream:
            shown = joined(answer)
            assert (shown["content"], shown["reasons"]) == ("", ["tool_calls"])
            ((name, arguments),) = shown["calls"]
        else:
            message = answer.choices[0].message
            assert message.content is None and answer.choices[0].finish_reason == "tool_calls"
            (call,) = message.tool_calls
            name, arguments = call.function.name, call.function.arguments
        assert name in names
        schema = WEATHER["function"]["parameters"] if name == "weather" else {"maxProperties": 0}
        jsonschema.validate(json.loads(arguments), schema)


def formats() -> list[tuple[dict[str, Any], Any]]:
    def of_schema(text: str) -> None:
        jsonschema.validate(json.loads(text), SCHEMA)

    def of_words(text: str) -> None:
        assert text in ("yes", "no")

    def of_digits(text: str) -> None:
        assert re.fullmatch(r"[0-9]{4}(-[0-9]{2}){2}", text)

    lark = 'start: "yes" | "no"'
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    return [
        ({"response_format": schema}, of_schema),
        ({"guided_json": SCHEMA}, of_schema),
        ({"guided_json": json.dumps(SCHEMA)}, of_schema),
        ({"structured_outputs": {"json": SCHEMA}}, of_schema),
        ({"guided_choice": ["yes", "no"]}, of_words),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, of_words),
        ({"structured_outputs": {"grammar": lark}}, of_words),
        ({"guided_grammar": lark}, of_words),
        ({"guided_regex": "[0-9]{4}(-[0-9]{2}){2}"}, of_digits),
        ({"structured_outputs": {"regex": "[0-9]{4}(-[0-9]{2}){2}"}}, of_digits),
    ]


@pytest.mark.parametrize(("body", "check"), formats())
def test_a_random_model_keeps_to_formats(
    served: Served, tokenizer: Tokenizer, body: dict[str, Any], check: Callable[[str], None]
) -> None:
    thinking = {"chat_template_kwargs": {"enable_thinking": False}}
    whole = ask(served, n=3, seed=1, extra_body={**body, **thinking})
    for choice in whole.choices:
        check(choice.message.content)
        assert choice.finish_reason == "stop"
    shown = joined(ask(served, seed=1, stream=True, extra_body={**body, **thinking}))
    assert shown["content"] == whole.choices[0].message.content
    if "response_format" not in body:
        completion = served.client.completions.create(model="tiny", prompt="x", max_tokens=900, seed=2, extra_body=body)
        check(completion.choices[0].text)


def test_a_format_comes_behind_the_reasoning(served: Served) -> None:
    """The model may reason freely before it keeps to the format, also where the prompt has begun the reasoning."""
    for seed in range(6):
        answer = ask(served, seed=seed, extra_body={"guided_choice": ["yes", "no"]}, max_tokens=400).choices[0]
        assert answer.finish_reason == "length" or answer.message.content in ("yes", "no")


def test_a_format_or_tools(scripted: Callable[..., Served]) -> None:
    server = scripted(CALL)
    assert ask(server, tools=[WEATHER], extra_body={"guided_choice": ["a"]}).choices[0].message.tool_calls
    grammar = server.engine.asked[-1].settings.grammar  # pyrefly: ignore
    assert grammar is not None and grammar.kind == "tools" and json.loads(grammar.text)["other"]["kind"] == "choice"


WRONG_CALL = {"function": {"name": "f", "arguments": "[1]"}}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_object"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": False}}}, "response_format", "false"),
        ({"guided_regex": "("}, "guided_regex", "unclosed"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex", "guided_choice"),
        ({"guided_regex": "a" * (2 << 20)}, None, "at most 1048576"),
        ({"guided_choice": []}, "guided_choice", "at least one"),
        ({"structured_outputs": {"grammar": 'start: "a" start'}}, "structured_outputs", "without end"),
        ({"tools": [{"type": "function"}]}, "tools", "function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "name"),
        ({"tools": [CLOCK, CLOCK]}, "tools", "two tools are named 'clock'"),
        ({"tools": [CLOCK], "tool_choice": "weather"}, "tool_choice", "required"),
        ({"tools": [CLOCK], "tool_choice": WEATHER}, "tool_choice", "description"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice", "'no'"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": [CLOCK], "tool_choice": "required", "guided_regex": "a"}, None, "format"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}],
             "tool_choice": "required"},
            "tools", "not object",
        ),
        ({"messages": [{"role": "user"}]}, "messages", "messages.0"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, None, ""),
        (
            {"messages": [*HELLO, {"role": "assistant", "tool_calls": [WRONG_CALL]}]},
            "messages", "messages.1.tool_calls.0",
        ),
        ({"messages": HELLO, "continue_final_message": True}, "messages", "last message"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(served: Served, body: dict[str, Any], param: str | None, words: str) -> None:
    if not words:
        assert served.http.post("/v1/chat/completions", json={"max_tokens": 1, **body}).status_code == 200
        return
    error = served.error("/v1/chat/completions", 400, **{"messages": HELLO, **body})
    assert words in error["message"] and error["param"] == param, error


def test_the_last_message_is_continued(scripted: Callable[..., Served]) -> None:
    server = scripted(" four.")
    messages = [*HELLO, {"role": "assistant", "content": "Two and two is"}]
    answer = ask(server, messages=messages, extra_body={"continue_final_message": True, "add_generation_prompt": False})
    assert answer.choices[0].message.content == " four."
    assert isinstance(server.engine, ScriptedEngine) and server.engine.prompt().endswith("Two and two is")


def test_half_a_character_in_a_call_can_be_sent(scripted: Callable[..., Served]) -> None:
    server = scripted(CALL.replace("Rome", "\\ud83d"))
    (call,) = ask(server, tools=[WEATHER]).choices[0].message.tool_calls
    assert call.function.arguments == '{"city": "\\ud83d"}'
    assert joined(ask(server, tools=[WEATHER], stream=True))["calls"] == [["weather", '{"city": "\\ud83d"}']]


def test_prompt_logprobs_and_priorities(served: Served) -> None:
    answer = ask(served, max_tokens=1, extra_body={"prompt_logprobs": 2, "priority": 5, "cache_salt": "me"})
    shown = answer.model_extra["prompt_logprobs"]
    assert shown[0] is None and len(shown) == answer.usage.prompt_tokens
    assert all(2 <= len(one) <= 3 and all(value["logprob"] <= 0 for value in one.values()) for one in shown[1:])
    with pytest.raises(openai.BadRequestError, match="not streamed"):
        ask(served, stream=True, extra_body={"prompt_logprobs": 2})
