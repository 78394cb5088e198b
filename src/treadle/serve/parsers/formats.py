"""The ways in which models write calls of tools. A way is how it is read, and the grammar that forces it.

To add one, write a class of this shape and put it into FORMATS; `treadle serve --tool-call-parser NAME` takes it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Protocol

from treadle.model.tokenizer import Tokenizer
from treadle.serve.lark import Grammars, literal, marker, text_until
from treadle.serve.parsers.source import Malformed, Reading, Source
from treadle.serve.parsers.tools import Tool, ToolCall, argument_grammars, arguments_text, call_of, calls_of


class ToolFormat(Protocol):
    """One way to write calls."""

    name: str
    markers: tuple[str, ...]  # what the format is made of that may be special tokens

    def may_begin(self, character: str, bare: bool) -> bool:
        """Whether a call may begin with `character`; `bare` says that nothing but blanks came before it."""
        ...

    def read(self, source: Source, names: Collection[str] | None) -> Reading[list[ToolCall]]:
        """Return the calls that come next. Raises Malformed."""
        ...

    def write(self, calls: Sequence[ToolCall]) -> str:
        """Return the text of calls as the model would write it."""
        ...

    def grammar(self, tools: Sequence[Tool], required: bool, parallel: bool, tokenizer: Tokenizer) -> Grammars:
        """Return the grammar of answers that call `tools`: once, or with `parallel` several times.

        Without `required` an answer may be text too. Raises ValueError for parameters that are no schema of objects.
        """
        ...


class Hermes:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>: Hermes, Qwen 2.5 and 3, SmolLM3 and others."""

    name = "hermes"
    markers: tuple[str, ...] = ("<tool_call>", "</tool_call>")

    def may_begin(self, character: str, bare: bool) -> bool:
        return character == "<"

    def read(self, source: Source, names: Collection[str] | None) -> Reading[list[ToolCall]]:
        begin, end = self.markers
        yield from source.literal(begin)
        call = call_of((yield from source.json_value((yield from source.blanks()))))
        # Some models leave the end out, and an answer may be cut off within it.
        character, seen = (yield from source.blanks()), ""
        while character is not None and end.startswith(seen + character):
            seen += character
            if seen == end:
                return [call]
            character = yield from source.next()
        if character is not None:
            source.back(seen + character)
        return [call]

    def write(self, calls: Sequence[ToolCall]) -> str:
        begin, end = self.markers
        return "\n".join(f"{begin}\n{_object(call, 'arguments')}\n{end}" for call in calls)

    def grammar(self, tools: Sequence[Tool], required: bool, parallel: bool, tokenizer: Tokenizer) -> Grammars:
        begin, end = (marker(one, tokenizer) for one in self.markers)
        lark = f"body: BREAK? ({_objects(tools, 'arguments')}) BREAK? {end}\nBREAK: /\\n/\n"
        if required:
            lark += f"start: call (BREAK? call)*\ncall: {begin} body\n" if parallel else f"start: {begin} body\n"
        else:
            lark += f"start: {'(called body)* rest' if parallel else 'called body | rest'}\nrest: /(?s:.*)/\n"
            lark += text_until(self.markers[0], tokenizer, "called")
        return [{"lark_grammar": lark}, *argument_grammars(tools)]


class Llama3:
    """{"name": ..., "parameters": {...}}, alone or behind <|python_tag|>, several divided by semicolons: Llama 3."""

    name = "llama3"
    markers: tuple[str, ...] = ("<|python_tag|>",)

    def may_begin(self, character: str, bare: bool) -> bool:
        return character == "<" or (bare and character == "{")

    def read(self, source: Source, names: Collection[str] | None) -> Reading[list[ToolCall]]:
        first = yield from source.next()
        if first == "<":
            yield from source.literal(self.markers[0][1:])
            first, names = (yield from source.blanks()), None
        calls = [call_of((yield from source.json_value(first)), names)]
        while (character := (yield from source.blanks())) == ";":
            following = yield from source.blanks()
            if following != "{":
                source.back(";" + (following or ""))
                return calls
            calls.append(call_of((yield from source.json_value(following)), names))
        source.back(character or "")
        return calls

    def write(self, calls: Sequence[ToolCall]) -> str:
        return "; ".join(_object(call, "parameters") for call in calls)

    def grammar(self, tools: Sequence[Tool], required: bool, parallel: bool, tokenizer: Tokenizer) -> Grammars:
        lark = f"call: {_objects(tools, 'parameters')}\n"
        lark += 'calls: call ("; " call)*\n' if parallel else "calls: call\n"
        tag = marker(self.markers[0], tokenizer)
        tag = f"{tag}? " if tag.startswith("<") else ""
        if required:
            lark += f"start: {tag}calls\n"
        else:
            lark += f"start: {tag}calls | rest\nrest: {_NO_CALL}\n"
        return [{"lark_grammar": lark}, *argument_grammars(tools)]


class Mistral:
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], and the newer [TOOL_CALLS]name[ARGS]{...}."""

    name = "mistral"
    markers: tuple[str, ...] = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def may_begin(self, character: str, bare: bool) -> bool:
        return character == "["

    def read(self, source: Source, names: Collection[str] | None) -> Reading[list[ToolCall]]:
        yield from source.literal(self.markers[0])
        character = yield from source.blanks()
        if character in ("[", "{"):
            return calls_of((yield from source.json_value(character)))
        name = ""
        while character is not None and (character.isalnum() or character in "_-.") and len(name) < 256:
            name += character
            character = yield from source.next()
        if not name:
            raise Malformed
        if character == "[":
            tag = yield from self._tag(source)
            if tag == "CALL_ID":
                while (character := (yield from source.next())) != "[":
                    if character is None or not character.isalnum():
                        raise Malformed
                tag = yield from self._tag(source)
            if tag != "ARGS":
                raise Malformed
            character = yield from source.next()
        if character is not None and character.isspace():
            character = yield from source.blanks()
        return [ToolCall(name, arguments_text((yield from source.json_value(character))))]

    def _tag(self, source: Source) -> Reading[str]:
        """Return the name of a tag whose bracket was read."""
        tag = ""
        while (character := (yield from source.next())) != "]":
            if character is None or len(tag) > 8:
                raise Malformed
            tag += character
        return tag

    def write(self, calls: Sequence[ToolCall]) -> str:
        return f"{self.markers[0]}[{', '.join(_object(call, 'arguments') for call in calls)}]"

    def grammar(self, tools: Sequence[Tool], required: bool, parallel: bool, tokenizer: Tokenizer) -> Grammars:
        begin = marker(self.markers[0], tokenizer)
        if tokenizer.token_to_id("[ARGS]") is not None:
            arguments = marker("[ARGS]", tokenizer)
            named = (f"{literal(tool.name)} {arguments} @arguments_{i}" for i, tool in enumerate(tools))
            lark, more = f"body: {' | '.join(named)}\n", f"({begin} body)*"
        else:
            more = '(", " call)*' if parallel else ""
            lark = f'call: {_objects(tools, "arguments")}\nbody: "[" call {more} "]"\n'
            more = ""
        calls = f"{begin} body {more if parallel else ''}"
        if required:
            lark += f"start: {calls}\n"
        else:
            lark += f"start: called body {more if parallel else ''} | rest\nrest: /(?s:.*)/\n"
            lark += text_until(self.markers[0], tokenizer, "called")
        return [{"lark_grammar": lark}, *argument_grammars(tools)]


class Json:
    """{"name": ..., "arguments": {...}} or a list of them, alone or as a block of code: models without a way."""

    name = "json"
    markers: tuple[str, ...] = ()

    def may_begin(self, character: str, bare: bool) -> bool:
        return bare and character in "{[`"

    def read(self, source: Source, names: Collection[str] | None) -> Reading[list[ToolCall]]:
        first = yield from source.next()
        fenced = first == "`"
        if fenced:
            yield from source.literal("``")
            while (first := (yield from source.next())) is not None and first.isalpha():
                pass
            if first is not None and first.isspace():
                first = yield from source.blanks()
        calls = calls_of((yield from source.json_value(first)), names)
        if fenced and (last := (yield from source.blanks())) is not None:
            source.back(last)
            yield from source.literal("```")
        return calls

    def write(self, calls: Sequence[ToolCall]) -> str:
        written = ", ".join(_object(call, "arguments") for call in calls)
        return written if len(calls) == 1 else f"[{written}]"

    def grammar(self, tools: Sequence[Tool], required: bool, parallel: bool, tokenizer: Tokenizer) -> Grammars:
        lark = f"call: {_objects(tools, 'arguments')}\n"
        lark += 'calls: call | "[" call (", " call)* "]"\n' if parallel else "calls: call\n"
        lark += "start: calls\n" if required else f"start: calls | rest\nrest: {_NO_CALL}\n"
        return [{"lark_grammar": lark}, *argument_grammars(tools)]


# Text that cannot be taken for a call without a marker.
_NO_CALL = r"/\s*[^\s{\[`<](?s:.*)/"


def _object(call: ToolCall, key: str) -> str:
    return f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "{key}": {call.arguments}}}'


def _objects(tools: Sequence[Tool], key: str) -> str:
    """Return the Lark alternatives of JSON objects that name a tool and its arguments, as templates write them."""
    return " | ".join(
        literal(f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{key}": ') + f' @arguments_{i} "}}"'
        for i, tool in enumerate(tools)
    )


FORMATS: dict[str, ToolFormat] = {one.name: one for one in (Hermes(), Llama3(), Mistral(), Json())}
