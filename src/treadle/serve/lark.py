"""Pieces of grammars in the forms that llguidance reads: its dialect of Lark, and JSON schemas."""

from __future__ import annotations

import json
from typing import Any

from treadle.model.tokenizer import Tokenizer

# Between the parts of a JSON text: a blank, or a new line with its indent. Bounded, so that no model can go on with
# blanks for ever.
WHITESPACE = r"( |\r?\n[ \t]{0,32})"

# llguidance takes a list of grammars: the first is where it starts, the others are named for it ("@name").
Grammars = list[dict[str, Any]]


def json_grammar(schema: Any, lenient: bool = False) -> dict[str, Any]:
    """Return the grammar of the JSON texts that `schema` allows.

    `lenient` leaves out the keywords that cannot be enforced, which are otherwise refused. Raises ValueError for what
    is no schema.
    """
    if not isinstance(schema, (dict, bool)):
        raise ValueError(f"a JSON schema is an object, not a {type(schema).__name__}")
    if isinstance(schema, dict):
        # The library's own settings are no part of a schema: they could switch its checks off.
        schema = {key: value for key, value in schema.items() if key != "x-guidance"}
        schema["x-guidance"] = {"whitespace_pattern": WHITESPACE, "lenient": lenient, "coerce_one_of": lenient}
    return {"json_schema": schema}


def literal(text: str) -> str:
    """Return how Lark spells a text."""
    return json.dumps(text, ensure_ascii=False)


def marker(text: str, tokenizer: Tokenizer) -> str:
    """Return how Lark names a marker of a chat format: the token where it is a special one, else its text."""
    index = tokenizer.token_to_id(text)
    return f"<[{index}]>" if index in tokenizer.special_ids else literal(text)


def text_until(end: str, tokenizer: Tokenizer, name: str = "free_text") -> str:
    """Return the Lark rule `name`: any text up to the first `end`, which belongs to it."""
    named = marker(end, tokenizer)
    if named.startswith("<"):
        return f"{name}: /(?s:.*)/ {named}\n"
    return f"{name}[lazy]: /(?s:.*)/ {named}\n"
