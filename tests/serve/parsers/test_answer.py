"""One parser: whatever way an answer is cut into pieces, the same text, thoughts and calls come out."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.serve.parsers import FORMATS, AnswerParser, Piece, Reasoning, Text, Thought, ToolCall

THINK = Reasoning()
NAMES = ["weather", "get_time", "f"]


def parse(pieces: Iterable[str], name: str | None, reasoning: Reasoning | None = None, **more: Any) -> list[Piece]:
    """Return what comes out, neighbours of one kind joined."""
    parser = AnswerParser(None if name is None else FORMATS[name], NAMES, reasoning, **more)
    out: list[Piece] = []
    for piece in [one for text in pieces for one in parser.push(text)] + parser.finish():
        if out and not isinstance(piece, ToolCall) and type(out[-1]) is type(piece):
            out[-1] = type(piece)(out[-1].text + piece.text)  # pyrefly: ignore
        else:
            out.append(piece)
    return out


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


FRAGMENTS = st.sampled_from([
    "<tool_call>", "</tool_call>", "<tool_c", "<think>", "</think>", "</thi", "<", "<|", "<|python_tag|>",
    "[TOOL_CALLS]", "[TOOL_CALLS", "[ARGS]", "[CALL_ID]", "[", "]", "{", "}", "```", "```json", ";", ",", ":", '"',
    "\\", "\\u00e9", "\\ud83d", '"name"', '{"name": "f"', '"a"', "1", "-0.5e3", "01", "true", "nul", "null",
    '[1,{"b":[]}]', "f", "weather", "\u6771", '{"name": "f", "arguments": {}}',
    '{"name":"weather","parameters":{"city":"K\u00f6ln"}}', '[{"name":"f","arguments":{}}]',
    '{"name":"f","arguments":"{}"}', '{"name":"f","arguments":[]}', '"</tool_call>"', " ", "\n", "\n\n", "Well, ",
    "\t", '{"name": "f", "arguments": {"a": "</tool_call> <tool_call>"}}',
])  # fmt: skip
ANSWERS = st.lists(FRAGMENTS, max_size=14).map("".join)


@pytest.mark.parametrize("name", [None, *FORMATS])
@settings(max_examples=150, deadline=None)
@given(answer=ANSWERS | st.text(max_size=40), places=st.lists(st.integers(0, 500), max_size=12), reasons=st.booleans())
def test_pieces_do_not_matter_and_nothing_is_lost(name: str, answer: str, places: list[int], reasons: bool) -> None:
    whole = parse([answer], name, THINK, reasons=reasons)
    assert parse(cut(answer, places), name, THINK, reasons=reasons) == whole
    assert parse(answer, name, THINK, reasons=reasons) == whole
    for piece in whole:
        if isinstance(piece, ToolCall):
            assert isinstance(json.loads(piece.arguments), dict) and piece.name
            piece.arguments.encode()
    if not reasons and "<think>" not in answer and all(isinstance(piece, Text) for piece in whole):
        assert "".join(piece.text for piece in whole if isinstance(piece, Text)) == answer
    # What is left of the text, the thoughts and the calls is what the answer's characters were, in their order.
    rest = iter(answer)
    for piece in whole:
        if not isinstance(piece, ToolCall):
            assert all(character in rest for character in piece.text)


ARGUMENTS = st.dictionaries(
    st.text('ab<>/{}[]"\\_', max_size=12),
    st.recursive(
        st.text('x<tool_call>/[]{}";|` \n', max_size=20) | st.integers() | st.booleans() | st.none() | st.floats(-9, 9),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
        max_leaves=4,
    ),
    max_size=3,
)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3)


def hermes(calls: list[tuple[str, Any]]) -> str:
    shown = (json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in shown)


def llama3(calls: list[tuple[str, Any]]) -> str:
    return "; ".join(json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls)


def mistral(calls: list[tuple[str, Any]]) -> str:
    return "[TOOL_CALLS]" + json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])


def new_mistral(calls: list[tuple[str, Any]]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)


def as_json(calls: list[tuple[str, Any]]) -> str:
    return json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls], ensure_ascii=False)


@pytest.mark.parametrize(
    ("name", "write", "before"),
    [
        ("hermes", hermes, True),
        ("llama3", llama3, False),
        ("llama3", lambda calls: "<|python_tag|>" + llama3(calls), True),
        ("mistral", mistral, True),
        ("mistral", new_mistral, True),
        ("json", as_json, False),
        ("json", lambda calls: f"```json\n{as_json(calls)}\n```", False),
    ],
)
@settings(max_examples=60, deadline=None)
@given(
    calls=CALLS,
    text=st.sampled_from(["", "I will look <b>this</b> up [1].", "a < b"]),
    thoughts=st.sampled_from(["", "hm", "shall I <tool_call>?\nno\n\nyes"]),
    places=st.lists(st.integers(0, 500), max_size=8),
)
def test_what_a_model_writes_is_read(
    name: str, write: Any, before: bool, calls: Any, text: str, thoughts: str, places: list[int]
) -> None:
    text = text if before else ""
    answer = (f"<think>\n{thoughts}\n</think>\n\n" if thoughts else "") + text + ("\n\n" if text else "") + write(calls)
    expected: list[Piece] = [Thought(thoughts)] if thoughts else []
    expected += [Text(text)] if text else []
    out = parse(cut(answer, places), name, THINK)
    assert out[: len(expected)] == expected
    found = out[len(expected) :]
    assert [piece.name for piece in found if isinstance(piece, ToolCall)] == [one for one, _ in calls]
    assert [json.loads(piece.arguments) for piece in found if isinstance(piece, ToolCall)] == [one for _, one in calls]
    assert len(found) == len(calls), "no trace of the calls is left in the text"


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {bad}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call> and so on'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "argum'),
        ("hermes", "<tool_call> ordinary text </tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>'),
        ("hermes", "<tool_call>" + "[" * 3000),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}</tool_call>"),
        ("llama3", '{"name": "Ada", "parameters": {}}'),
        ("llama3", '{"answer": 42}'),
        ("llama3", '<|python_tag|>print("hi")'),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", "[TOOL_CALLS]f[ARGS]none"),
        ("mistral", "[TOOL_CALLS]f[WHAT]{}"),
        ("mistral", "[1] is a citation"),
        ("json", '[{"name": "weather", "arguments": {}}, {"name": "Ada"}]'),
        ("json", '```json\n{"a": 1}\n```'),
        ("json", 'Here: {"name": "f", "arguments": {}}'),
        ("json", "``"),
    ],
)
def test_what_is_no_call_is_text(name: str, answer: str) -> None:
    assert parse([answer], name) == [Text(answer)] == parse(answer, name)


def test_a_good_call_within_a_bad_one_is_found() -> None:
    good = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parse(['<tool_call>{"name": ' + good], "hermes") == [Text('<tool_call>{"name":'), ToolCall("f", "{}")]
    cut_off = '<tool_call>{"name": "f", "arguments": {}} </tool_c'
    assert parse([cut_off], "hermes") == [ToolCall("f", "{}")]
    assert parse([cut_off + "x"], "hermes") == [ToolCall("f", "{}"), Text("</tool_cx")]


def test_variants_of_calls() -> None:
    assert parse(['<tool_call>{"name": "f"}</tool_call>'], "hermes") == [ToolCall("f", "{}")]
    as_text = '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert parse([as_text], "hermes") == [ToolCall("f", '{"a": 1}')]
    broken_line = '<tool_call>{"name": "f", "arguments": {"a": "one\ntwo"}}</tool_call>'
    assert parse([broken_line], "hermes") == [ToolCall("f", '{"a": "one\\ntwo"}')]
    half = '<tool_call>{"name": "f", "arguments": {"a": "\\ud83d"}}</tool_call>'
    assert parse([half], "hermes") == [ToolCall("f", '{"a": "\\ud83d"}')]
    assert parse(["[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{}"], "mistral") == [ToolCall("f", "{}")]
    wrapped = '{"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}'
    assert parse([wrapped + " Done."], "llama3") == [ToolCall("f", '{"a": 1}'), Text("Done.")]
    assert parse(['{"name": "f"}; then'], "llama3") == [ToolCall("f", "{}"), Text(";then")]


def test_reasoning() -> None:
    assert parse(["I think.</think>\n\nSo: 4"], None, THINK, reasons=True) == [Thought("I think."), Text("So: 4")]
    assert parse(["\n<think>\n\n</think>\n\n4"], None, THINK) == [Text("4")]
    assert parse(["<think>cut o"], None, THINK) == [Thought("cut o")]
    late = "Say <think>no</think>"
    assert parse([late], None, THINK) == [Text(late)], "only the beginning can be reasoning"
    assert parse(["<think>a"], None) == [Text("<think>a")]
    assert parse(["[THINK]a[/THINK]b"], None, Reasoning("[THINK]", "[/THINK]")) == [Thought("a"), Text("b")]


def test_what_is_certain_comes_at_once() -> None:
    parser = AnswerParser(FORMATS["hermes"], NAMES, THINK)
    assert parser.push("Hel") == [Text("Hel")]
    assert parser.push("lo <to") == [Text("lo")]
    assert parser.push("y>") == [Text(" <toy>")]
    assert parser.push('<tool_call>{"name": "f"}</tool_call') == []
    assert parser.push(">") == [ToolCall("f", "{}")]
    assert parser.finish() == []
