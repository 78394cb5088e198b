"""What llguidance compiles although no answer can keep to it.

Some grammars never end, such as an object that requires another of its own kind: an answer would go on until it is cut
off. What cannot be decided here counts as able to end; the answer is then still bounded by its number of tokens.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from typing import Any

MAX_ROUNDS = 64  # a chain of references that is longer is not followed to its end


def check_schema(schema: Any) -> None:
    """Raise ValueError where no value of a JSON schema ends, or its values cannot be told by their text."""
    if schema_is_endless(schema):
        raise ValueError("it is impossible: each value that it allows would have to hold another without end")
    stack = [schema]
    while stack:
        part = stack.pop()
        stack += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        if isinstance(part, dict) and isinstance(least := part.get("minProperties"), int):
            required = part.get("required")
            named = len(required) if isinstance(required, list) else 0
            if least > named + 1:  # a text may name the same property twice
                raise ValueError(f"minProperties={least} cannot be enforced beyond the required properties; lower it")


def check_lark(text: str) -> None:
    """Raise ValueError where no text of a grammar ends."""
    if lark_is_endless(text):
        raise ValueError("it is impossible: its rule 'start' would go on without end")


def schema_is_endless(schema: Any) -> bool:
    """Whether each value that a JSON schema allows must hold another one without end."""
    targets = {ref: _resolve(schema, ref) for ref in _references(schema)}
    ending: set[str] = set()
    for _ in range(MAX_ROUNDS):
        found = {ref for ref, target in targets.items() if ref not in ending and _value_ends(target, ending)}
        if not found:
            return bool(targets) and not _value_ends(schema, ending)
        ending |= found
    return False


def _references(schema: Any) -> Iterator[str]:
    stack = [schema]
    while stack:
        part = stack.pop()
        if isinstance(part, dict):
            if isinstance(ref := part.get("$ref"), str):
                yield ref
            stack += part.values()
        elif isinstance(part, list):
            stack += part


def _resolve(schema: Any, reference: str) -> Any:
    """Return what a reference within the schema points at; True (anything) for one that leads elsewhere."""
    if not reference.startswith("#"):
        return True
    part = schema
    for step in reference[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(part, dict) and step in part:
            part = part[step]
        elif isinstance(part, list) and step.isdecimal() and int(step) < len(part):
            part = part[int(step)]
        else:
            return True
    return part


def _value_ends(schema: Any, ending: set[str]) -> bool:
    """Whether some value of the schema ends, if those of the references in `ending` (and no others) do."""
    if not isinstance(schema, dict) or "enum" in schema or "const" in schema:
        return True
    if isinstance(ref := schema.get("$ref"), str) and ref not in ending:
        return False
    for key in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(key), list) and parts and not any(_value_ends(one, ending) for one in parts):
            return False
    if isinstance(parts := schema.get("allOf"), list) and not all(_value_ends(part, ending) for part in parts):
        return False
    kinds = schema.get("type")
    if kinds == "object" or kinds == ["object"]:
        properties, required = schema.get("properties"), schema.get("required")
        if isinstance(properties, dict) and isinstance(required, list):
            return all(_value_ends(properties.get(name), ending) for name in required if isinstance(name, str))
    if (kinds == "array" or kinds == ["array"]) and isinstance(least := schema.get("minItems"), int) and least > 0:
        first = schema.get("prefixItems")
        first = first[:least] if isinstance(first, list) else []
        others = [schema.get("items")] if len(first) < least else []
        return all(_value_ends(item, ending) for item in [*first, *others])
    return True


_TOKENS = re.compile(
    r"""(?P<blank>[ \t\r\n]+|//[^\n]*|\#[^\n]*)
    |(?P<rule>(?m:^)[ \t]*[?!]?[a-z_][\w-]*(?:\[[^\]\n]*\])?[ \t]*:(?!:))
    |(?P<terminal>(?m:^)[ \t]*[A-Z][\w-]*(?:\[[^\]\n]*\])?[ \t]*:(?!:))
    |(?P<text>"(?:[^"\\\n]|\\.)*"i?|/(?:[^/\\\n]|\\.)+/[a-z]*|<[^<>\s]+>|@[\w-]+|[A-Z][\w-]*)
    |(?P<name>[a-z_][\w-]*)
    |(?P<none>[?*]|~0\.\.\d+|\{0?,\d*\}|\{0\})
    |(?P<some>\+|~[1-9]\d*(?:\.\.\d+)?|\{[1-9]\d*(?:,\d*)?\})
    |(?P<sign>[()\[\]|])""",
    re.VERBOSE,
)


def lark_is_endless(text: str) -> bool:
    """Whether the rule `start` of a grammar in llguidance's dialect of Lark has no text that ends."""
    rules = _rules(text)
    ending: set[str] = set()
    for _ in range(MAX_ROUNDS):
        found = {name for name, body in rules.items() if name not in ending and _Body(body, ending, rules).ends()}
        if not found:
            return "start" in rules and "start" not in ending
        ending |= found
    return False


def _rules(text: str) -> dict[str, list[tuple[str, str]]]:
    """Return the tokens of each rule; none at all where the text has something that is not understood here."""
    rules: dict[str, list[tuple[str, str]]] = {}
    body: list[tuple[str, str]] = []
    place = 0
    while place < len(text):
        found = _TOKENS.match(text, place)
        if found is None:
            return {}
        kind, spelled, place = str(found.lastgroup), found.group(), found.end()
        if kind == "rule":
            body = rules.setdefault(re.split(r"[\[:]", spelled)[0].strip(" \t?!"), [])
        elif kind == "terminal":
            body = []  # terminals cannot hold themselves
        elif kind != "blank":
            body.append((kind, spelled))
    return rules


class _Body:
    """Reads the tokens of one rule: alternatives of sequences of items, each perhaps repeated."""

    def __init__(self, tokens: list[tuple[str, str]], ending: set[str], rules: Container[str]) -> None:
        self.tokens, self.ending, self.rules = tokens, ending, rules

    def ends(self) -> bool:
        """Whether one of the alternatives ends. A parenthesis is a frame of a stack: its alternatives, its items."""
        frames: list[list[list[bool]]] = [[[]]]
        openings: list[str] = []
        for kind, spelled in self.tokens:
            items = frames[-1][-1]
            if kind == "name":
                items.append(spelled in self.ending or spelled not in self.rules)
            elif kind == "text":
                items.append(True)
            elif kind == "none" and items:
                items[-1] = True
            elif spelled == "|":
                frames[-1].append([])
            elif spelled in "([":
                openings.append(spelled)
                frames.append([[]])
            elif spelled in ")]" and openings:
                closed, optional = any(map(all, frames.pop())), openings.pop() == "["
                frames[-1][-1].append(closed or optional)
        return any(map(all, frames[0]))
