"""Grammars that hang or crash their compiler end a process of their own, not the server."""

from __future__ import annotations

import json
import time

import pytest

from tests.serve.test_structured import TOKENIZERS, compiled
from treadle.config import UserError
from treadle.serve.grammar_guard import is_plain
from treadle.serve.request import Grammar
from treadle.serve.structured import _COMPILED


def chain(length: int) -> str:
    rules = "\n".join(f'x{place}: "a" x{place + 1} | "b"' for place in range(length))
    return f'{rules}\nx{length}: "a"\nstart: x0'


def schema_chain(length: int) -> str:
    links = {str(place): {"properties": {"a": {"$ref": f"#/$defs/{place + 1}"}}} for place in range(length)}
    return json.dumps({"$ref": "#/$defs/0", "$defs": {**links, str(length): {}}})


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("grammar", chain(20_000)),
        ("json_schema", schema_chain(8_000)),
        ("grammar", "start: X\nX: " + " & ".join(f"/.*a{number}.*/" for number in range(40))),
        ("json_schema", json.dumps({"type": "string", "allOf": [{"pattern": f"a{number}"} for number in range(40)]})),
        ("regex", "(a|b?)" * 100_000),
    ],
    ids=["many rules", "many references", "intersection", "patterns that meet", "long expression"],
)
def test_what_cannot_be_compiled_is_refused(kind: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.serve.grammar_guard.SECONDS", 1.0)
    begun = time.monotonic()
    with pytest.raises(UserError, match="refused"):
        compiled(kind, text)
    assert time.monotonic() - begun < 30


def test_the_other_process_is_used_where_it_must_be_and_comes_back() -> None:
    guard = _COMPILED.view(TOKENIZERS["byte level"]).guard
    guard.close()
    compiled("regex", "(yes|no)")
    assert guard._process is None, "nothing to fear"
    matching = json.dumps({"type": "string", "pattern": "^[a-c]{2}$", "maxLength": 5})
    for _ in range(2):
        assert compiled("json_schema", matching).accept(TOKENIZERS["byte level"].encode('"', special_tokens=False)[0])
    first = guard._process
    assert first is not None
    first.kill()
    first.wait()
    with pytest.raises(UserError, match="make it simpler"):
        compiled("json_schema", matching.replace("c", "d"))
    compiled("json_schema", matching.replace("c", "e"))
    assert guard._process is not None and guard._process is not first
    with pytest.raises(UserError, match="impossible"):
        compiled("grammar", "start: X\nX: /a/ & /b/")
    with pytest.raises(UserError, match="unclosed group"):
        compiled("json_schema", '{"type": "string", "pattern": "("}')


def test_plain_ones() -> None:
    for kind, text, plain in (
        ("choice", json.dumps(["a"] * 10_000), True),
        ("json_schema", '{"properties": {"pattern_of_life": {"type": "string"}}}', True),
        ("json_schema", '{"properties": {"a": {"pattern": "x"}}}', False),
        ("grammar", 'start: "a"', True),
        ("grammar", "start: A\nA: /a/ & /b/", False),
    ):
        assert is_plain(Grammar(kind=kind, text=text)) == plain  # pyrefly: ignore
