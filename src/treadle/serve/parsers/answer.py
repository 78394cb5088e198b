"""The parts of an answer as they come: what is for the reader, what the model thought, the tools that it calls.

    parser = AnswerParser(FORMATS["hermes"], reasoning=Reasoning())
    for piece in [*parser.push("<think>hm</think>It is"), *parser.push(" noon."), *parser.finish()]: ...

There is this one parser, which reads a character at a time: a whole answer is parsed by pushing it at once, and however
an answer is cut into pieces, the same comes out. Calls and markers of reasoning leave no trace in the text; a call
that is malformed is text as the model wrote it. Of the blanks only those beside calls and reasoning are left out.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from treadle.serve.parsers.formats import ToolFormat
from treadle.serve.parsers.source import BLANK, Malformed, Reading, Source
from treadle.serve.parsers.tools import ToolCall


@dataclass(frozen=True)
class Text:
    """A part of the answer's text."""

    text: str


@dataclass(frozen=True)
class Thought:
    """A part of the reasoning before the answer."""

    text: str


Piece = Text | Thought | ToolCall


@dataclass(frozen=True)
class Reasoning:
    """The markers around reasoning, which only the beginning of an answer can be."""

    start: str = "<think>"
    end: str = "</think>"


class AnswerParser:
    """Takes an answer apart; see the top of this file."""

    def __init__(
        self,
        tools: ToolFormat | None = None,
        names: Collection[str] | None = None,
        reasoning: Reasoning | None = None,
        reasons: bool = False,
    ) -> None:
        """`names` are the tools that there are; a call without a marker is one only if it calls one of them.

        `reasons` says that the prompt has opened the reasoning already.
        """
        self._tools, self._names, self._reasoning, self._reasons = tools, names, reasoning, reasons
        self._source = Source()
        self._pieces: list[tuple[type[Text] | type[Thought], list[str]] | ToolCall] = []
        self._run = self._answer()
        next(self._run)

    def push(self, text: str) -> list[Piece]:
        """Take the next part of the answer; return what became certain with it."""
        for character in text:
            self._run.send(character)
        return self._take()

    def finish(self) -> list[Piece]:
        """Return what was held back until the end."""
        try:
            self._run.send(None)
        except StopIteration:
            return self._take()
        raise AssertionError("the parser reads on after the end")

    def _take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return [piece if isinstance(piece, ToolCall) else piece[0]("".join(piece[1])) for piece in pieces]

    def _emit(self, kind: type[Text] | type[Thought], text: str) -> None:
        if self._pieces and not isinstance(last := self._pieces[-1], ToolCall) and last[0] is kind:
            last[1].append(text)
        else:
            self._pieces.append((kind, [text]))

    def _answer(self) -> Reading[None]:
        reasoned = self._reasoning is not None and (yield from self._reason(self._reasoning))
        yield from self._rest(drop_blanks=reasoned)

    def _reason(self, markers: Reasoning) -> Reading[bool]:
        """Read the reasoning, if the answer begins with it; return whether it did."""
        source = self._source
        if not self._reasons and not (yield from source.attempt(_opening(source, markers.start))):
            return False
        blank = ""
        character = yield from source.blanks()
        while character is not None:
            if character == markers.end[0]:
                source.back(character)
                if (yield from source.attempt(source.literal(markers.end))):
                    return True
                character = yield from source.next()
                assert character is not None
            if character in BLANK:
                blank += character
            else:
                self._emit(Thought, blank + character)
                blank = ""
            character = yield from source.next()
        return True

    def _rest(self, drop_blanks: bool) -> Reading[None]:
        """Read text and calls. `drop_blanks`: those that come next stand beside something that is no text."""
        source, said, blank = self._source, False, ""
        while (character := (yield from source.next())) is not None:
            if character in BLANK:
                blank += character
                continue
            if self._tools is not None and self._tools.may_begin(character, bare=not said):
                source.back(character)
                calls = yield from source.attempt(self._tools.read(source, self._names))
                if calls is not None:
                    self._pieces += calls
                    blank, said, drop_blanks = "", True, True
                    continue
                character = yield from source.next()
                assert character is not None
            self._emit(Text, character if drop_blanks else blank + character)
            blank, said, drop_blanks = "", True, False
        if blank and not drop_blanks:
            self._emit(Text, blank)


def _opening(source: Source, start: str) -> Reading[bool]:
    first = yield from source.blanks()
    if first != start[0]:
        raise Malformed
    return (yield from source.literal(start[1:]))
