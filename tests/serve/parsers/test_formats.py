"""What a tool grammar allows, its own parser reads as calls that their schemas allow."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serve.test_structured import TEXT, TOKENIZERS, TOKENS, answer
from treadle.config import UserError
from treadle.model.tokenizer import Tokenizer
from treadle.serve.grammars import tools_text
from treadle.serve.parsers import FORMATS, AnswerParser, Piece, Reasoning, Text, ToolCall
from treadle.serve.parsers.tools import Tool
from treadle.serve.request import Grammar
from treadle.serve.structured import Matcher, compile_grammar

CITY = {"properties": {"city": {"enum": ["Köln", "東京"]}, "days": {"type": "integer"}}, "required": ["city"]}
WHAT = {
    "type": "object",
    "properties": {"what": {"$ref": "#/$defs/w"}},
    "$defs": {"w": {"type": "string", "maxLength": 5}},
}
TOOLS = [
    Tool("weather", {**CITY, "additionalProperties": False}),
    Tool("say_it", {**WHAT, "additionalProperties": False}),
    Tool("now"),
]
PLAIN = TOKENIZERS["byte level"]


def with_markers(*markers: str) -> Tokenizer:
    """A tokenizer in which the markers are special tokens."""
    tokenizer = Tokenizer.train([TEXT] * 4, TOKENS)
    tokenizer.backend.add_special_tokens(list(markers))
    return Tokenizer(tokenizer.backend, eos_token=tokenizer.eos_token)


FAMILIES = {
    "hermes": (FORMATS["hermes"], PLAIN),
    "hermes, special tokens": (FORMATS["hermes"], with_markers("<tool_call>", "</tool_call>")),
    "llama3": (FORMATS["llama3"], with_markers("<|python_tag|>")),
    "mistral": (FORMATS["mistral"], with_markers("[TOOL_CALLS]")),
    "new mistral": (FORMATS["mistral"], with_markers("[TOOL_CALLS]", "[ARGS]")),
    "json": (FORMATS["json"], PLAIN),
}


def compiled(which: str, tools: list[Tool], required: bool = True, parallel: bool = True, **more: Any) -> Matcher:
    form, tokenizer = FAMILIES[which]
    grammar = Grammar(kind="tools", text=tools_text(tools, form.name, required, parallel), **more)
    return compile_grammar(grammar, tokenizer, tokenizer.vocabulary_size)


def parsed(which: str, text: str) -> list[Piece]:
    parser = AnswerParser(FAMILIES[which][0], [tool.name for tool in TOOLS], Reasoning())
    return parser.push(text) + parser.finish()


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("which", list(FAMILIES))
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_forced_calls_are_read_and_valid(which: str, parallel: bool, seed: int) -> None:
    _, tokenizer = FAMILIES[which]
    said = answer(compiled(which, TOOLS, parallel=parallel), tokenizer, random.Random(seed), patience=300, rows=340)
    if said is None:
        assert parallel, "one call comes to an end"
        return
    calls = parsed(which, said)
    assert calls and all(isinstance(call, ToolCall) for call in calls) and (parallel or len(calls) == 1)
    for call in calls:
        assert isinstance(call, ToolCall)
        schema = {tool.name: tool.parameters for tool in TOOLS}[call.name]
        jsonschema.validate(json.loads(call.arguments), schema or {"maxProperties": 0})


@pytest.mark.parametrize("which", list(FAMILIES))
def test_without_a_must_an_answer_is_text_or_calls(which: str) -> None:
    _, tokenizer = FAMILIES[which]
    for parallel in (True, False):
        for seed in range(4):
            matcher = compiled(which, TOOLS, required=False, parallel=parallel)
            said = answer(matcher, tokenizer, random.Random(seed), patience=20, rows=340)
            assert said is None or parsed(which, said) == [Text(said)]
        (call,) = parsed(which, written := SAMPLES[which])
        assert isinstance(call, ToolCall) and call.name == "weather"
        matcher = compiled(which, TOOLS, required=False, parallel=parallel)
        ids = tokenizer.encode(written, special_tokens=False)
        assert all(map(matcher.accept, ids)) and matcher.may_end
        wrong = tokenizer.encode(written.replace("Köln", "Rome"), special_tokens=False)
        matcher = compiled(which, TOOLS, required=False, parallel=parallel)
        assert not all(map(matcher.accept, wrong)), "a call that is begun keeps to its schema"


OBJECT = '{"name": "weather", "arguments": {"city": "Köln"}}'
SAMPLES = {
    "hermes": f"<tool_call>\n{OBJECT}\n</tool_call>",
    "hermes, special tokens": f"<tool_call>\n{OBJECT}\n</tool_call>",
    "llama3": OBJECT.replace("arguments", "parameters"),
    "mistral": f"[TOOL_CALLS][{OBJECT}]",
    "new mistral": '[TOOL_CALLS]weather[ARGS]{"city": "Köln"}',
    "json": OBJECT,
}


@pytest.mark.parametrize("which", list(FAMILIES))
def test_one_call_and_no_more(which: str) -> None:
    _, tokenizer = FAMILIES[which]
    ids = tokenizer.encode(SAMPLES[which], special_tokens=False)
    matcher = compiled(which, TOOLS[:1], parallel=False)
    assert all(map(matcher.accept, ids)) and matcher.finished
    matcher = compiled(which, TOOLS[1:], parallel=False)
    assert not all(map(matcher.accept, ids)), "another tool than the one that was named"
    matcher = compiled(which, TOOLS[:1], parallel=False, reasoning_start="<think>", reasoning_end="</think>")
    reasoned = tokenizer.encode("<think>which city?</think>\n\n", special_tokens=False)
    assert all(map(matcher.accept, [*reasoned, *ids])) and matcher.finished


def test_parameters_that_are_no_schema() -> None:
    for parameters, words in (
        ({"type": "string"}, "'f' are of type 'string'"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "'a' is unsatisfiable"),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"}, "without end"),
    ):
        with pytest.raises(UserError, match=words):
            compiled("hermes", [Tool("f", parameters)])
    odd = {"properties": {"a": {"type": "array", "items": {"const": 1}, "maxItems": 1, "uniqueItems": True}}}
    compiled("hermes", [Tool("f", odd)])
    with pytest.raises(UserError, match="uniqueItems"):
        compiled("hermes", [Tool("f", odd, strict=True)])
