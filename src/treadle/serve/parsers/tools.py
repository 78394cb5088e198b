"""A tool that a client offers, a call that a model makes of one, and the grammar of its arguments."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from treadle.serve.lark import Grammars, json_grammar
from treadle.serve.parsers.source import Malformed


@dataclass(frozen=True)
class Tool:
    """A function by its name and the JSON schema of its arguments (None: it has none)."""

    name: str
    parameters: Mapping[str, Any] | None = None
    strict: bool = False  # refuse a schema of which a part cannot be enforced, rather than leave that part out


@dataclass(frozen=True)
class ToolCall:
    """A complete call; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


def call_of(value: Any, names: Collection[str] | None = None) -> ToolCall:
    """Return the call that a JSON value means, by the keys that the formats use for it.

    Raises Malformed where it is none, or not of one of `names`.
    """
    if not isinstance(value, dict):
        raise Malformed
    if isinstance(inner := value.get("function"), dict):
        value = inner
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the object as a text
        try:
            arguments = json.loads(arguments, strict=False)
        except (ValueError, RecursionError):
            raise Malformed from None
    if not isinstance(name, str) or not name or not _is_unicode(name) or (names is not None and name not in names):
        raise Malformed
    return ToolCall(name, arguments_text(arguments))


def calls_of(value: Any, names: Collection[str] | None = None) -> list[ToolCall]:
    """Return the calls of a JSON object or a list of them. Raises Malformed."""
    calls = [call_of(one, names) for one in (value if isinstance(value, list) else [value])]
    if not calls:
        raise Malformed
    return calls


def arguments_text(arguments: Any) -> str:
    """Return an object as JSON. Raises Malformed for another value, or a number that JSON does not have."""
    if not isinstance(arguments, dict):
        raise Malformed
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise Malformed from None
    # Half a character, which a model can spell as \ud83d, cannot be sent but as it was spelled.
    return text if _is_unicode(text) else json.dumps(arguments)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def argument_grammars(tools: Collection[Tool]) -> Grammars:
    """Return a grammar for the arguments of each tool, in their order, named arguments_0, ... Raises ValueError."""
    grammars: Grammars = []
    for number, tool in enumerate(tools):
        schema = {"type": "object", "additionalProperties": False} if tool.parameters is None else dict(tool.parameters)
        schema.setdefault("type", "object")
        if schema["type"] != "object":
            raise ValueError(f"the parameters of '{tool.name}' are of type {schema['type']!r}, not object")
        grammars.append({"name": f"arguments_{number}", **json_grammar(schema, lenient=not tool.strict)})
    return grammars
