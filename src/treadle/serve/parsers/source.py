"""Characters of an answer, one at a time, from pieces that come whenever they come.

A reader is a generator: it asks for the next character with `yield from source.next()`, and says what it read by
`return`, or raises Malformed. It never sees how the text was cut into pieces, so what it reads cannot depend on that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from typing import Any, TypeVar

R = TypeVar("R")
# Yields nothing, is sent the next character or None at the end, and returns what was read.
Reading = Generator[None, str | None, R]

BLANK = frozenset(" \t\r\n")
MAX_DEPTH = 128
_ATOM = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?", re.ASCII)
_ATOM_CHARACTERS = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzE")


class Malformed(Exception):
    """What comes is not what the reader reads."""


class Source:
    """The characters to read. What a reader took can be given back."""

    def __init__(self) -> None:
        self._again: list[str] = []  # given back, the next one last
        self._taken: list[str] | None = None
        self.ended = False

    def next(self) -> Reading[str | None]:
        """Return the next character, None at the end."""
        if self._again:
            character = self._again.pop()
        elif self.ended:
            return None
        else:
            given = yield
            if given is None:
                self.ended = True
                return None
            character = given
        if self._taken is not None:
            self._taken.append(character)
        return character

    def back(self, text: str) -> None:
        """Let `text`, the last that was read, be read again."""
        self._again += reversed(text)
        if self._taken is not None and text:
            del self._taken[-len(text) :]

    def attempt(self, reader: Reading[R]) -> Reading[R | None]:
        """Return what `reader` reads; where that is malformed None, and nothing was read. Attempts do not nest."""
        assert self._taken is None
        self._taken = []
        try:
            return (yield from reader)
        except Malformed:
            taken, self._taken = self._taken, None
            self.back("".join(taken))
            return None
        finally:
            self._taken = None

    def literal(self, text: str) -> Reading[bool]:
        """Read exactly `text` and return True. Raises Malformed."""
        for wanted in text:
            if (yield from self.next()) != wanted:
                raise Malformed
        return True

    def blanks(self) -> Reading[str | None]:
        """Read blanks; return the first character that is none (it is read too), or None at the end."""
        while True:
            character = yield from self.next()
            if character is None or character not in BLANK:
                return character

    def json_value(self, first: str | None) -> Reading[Any]:
        """Return the JSON object or list that begins with `first`, which has been read. Raises Malformed.

        Line breaks within texts are taken as they are, as models write them.
        """
        if first not in ("{", "["):
            raise Malformed
        text = yield from self._container(first)
        try:
            return json.loads(text, strict=False, parse_constant=_no_number)
        except (ValueError, RecursionError):  # such as a number of more digits than Python converts
            raise Malformed from None

    def _container(self, first: str) -> Reading[str]:
        """Read to the bracket that closes the first one, over nothing that JSON does not have."""
        text, open_ones = [first], [first]
        expected = "key or end" if first == "{" else "value or end"
        while open_ones:
            character = yield from self.blanks()
            if character is None:
                raise Malformed
            if character == '"' and expected in ("key", "key or end"):
                text.append((yield from self._string()))
                expected = "colon"
            elif character == ":" and expected == "colon":
                text.append(":")
                expected = "value"
            elif character == "," and expected == "comma or end":
                text.append(",")
                expected = "key" if open_ones[-1] == "{" else "value"
            elif character in "}]" and expected.endswith("end") and open_ones[-1] + character in ("{}", "[]"):
                text.append(character)
                open_ones.pop()
                expected = "comma or end"
            elif expected in ("value", "value or end"):
                if character in "{[":
                    open_ones.append(character)
                    if len(open_ones) > MAX_DEPTH:
                        raise Malformed
                    text.append(character)
                    expected = "key or end" if character == "{" else "value or end"
                    continue
                text.append((yield from (self._string() if character == '"' else self._atom(character))))
                expected = "comma or end"
            else:
                raise Malformed
        return "".join(text)

    def _string(self) -> Reading[str]:
        """Read the rest of a string whose opening quote was read."""
        text = ['"']
        while True:
            character = yield from self.next()
            if character is None:
                raise Malformed
            text.append(character)
            if character == '"':
                return "".join(text)
            if character == "\\":
                escaped = yield from self.next()
                if escaped is None or escaped not in '"\\/bfnrtu':
                    raise Malformed
                text.append(escaped)
                for _ in range(4 if escaped == "u" else 0):
                    digit = yield from self.next()
                    if digit is None or digit not in "0123456789abcdefABCDEF":
                        raise Malformed
                    text.append(digit)

    def _atom(self, first: str) -> Reading[str]:
        """Read a number, true, false or null. The character that ends it is given back."""
        text = first
        while (character := (yield from self.next())) is not None:
            if character not in _ATOM_CHARACTERS:
                self.back(character)
                break
            text += character
        if _ATOM.fullmatch(text) is None:
            raise Malformed
        return text


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
