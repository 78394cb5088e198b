"""How one model chats: what its template takes, how it writes calls of tools, how it marks its reasoning.

Templates differ in what they can render. Each is tried once, on a small chat; what it leaves out is said in plain text
instead: tools in the system message, calls and their results as the text of messages.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treadle.config import UserError
from treadle.config.errors import nearest
from treadle.model.chat import encode_chat, render_chat
from treadle.model.tokenizer import Tokenizer
from treadle.serve.parsers import FORMATS, AnswerParser, Reasoning, ToolCall, ToolFormat

Json = dict[str, Any]

THINK, BRACKETS = Reasoning("<think>", "</think>"), Reasoning("[THINK]", "[/THINK]")
# The names of the flags; those after the first of each are vLLM's for the same.
TOOL_PARSERS = {**{name: name for name in FORMATS}, "llama3_json": "llama3", "qwen": "hermes"}
REASONING_PARSERS: dict[str, Reasoning | None] = {
    "none": None, "think": THINK, "deepseek_r1": THINK, "qwen3": THINK, "mistral": BRACKETS,
}  # fmt: skip
_PROBE = "probe7"
_TOOL = {"type": "function", "function": {"name": _PROBE, "description": "x", "parameters": {"type": "object"}}}


@dataclass(frozen=True)
class Opening:
    """How an answer begins, as its prompt left it."""

    reasoning: Reasoning | None  # None: there will be none, or it was closed already
    open: bool = False  # the prompt ends within the reasoning


def check_parsers(tool_parser: str, reasoning_parser: str) -> None:
    """Raise UserError for a parser that there is not."""
    for what, name, known in (
        ("tool call", tool_parser, TOOL_PARSERS),
        ("reasoning", reasoning_parser, REASONING_PARSERS),
    ):
        if name != "auto" and name not in known:
            hint = nearest(name, known) or f"; there are {', '.join(['auto', *known])}"
            raise UserError(f"unknown {what} parser '{name}'{hint}")


class ChatFormat:
    """What is known of one model's chats. Immutable."""

    def __init__(self, tokenizer: Tokenizer, tool_parser: str = "auto", reasoning_parser: str = "auto") -> None:
        """The parsers are names of TOOL_PARSERS and REASONING_PARSERS. Raises UserError for other names."""
        check_parsers(tool_parser, reasoning_parser)
        self.tokenizer = tokenizer
        self.takes_system = self._says([{"role": "system", "content": _PROBE}, {"role": "user", "content": "x"}])
        self.takes_tools = self._says([{"role": "user", "content": "x"}], [_TOOL])
        # Most templates want a call's arguments as an object, a few as text.
        ways = (
            name for name, arguments in (("object", {"a": 1}), ("text", '{"a": 1}')) if self._takes_calls(arguments)
        )
        self.calls_as = next(ways, "")
        self.tools = _tool_format(tokenizer, tool_parser, self.takes_tools)
        self.reasoning = _reasoning(tokenizer, reasoning_parser)

    def _says(self, messages: Sequence[Json], tools: Sequence[Json] | None = None) -> bool:
        """Whether the template renders the chat and the probe is in what it writes."""
        try:
            return _PROBE in render_chat(self.tokenizer, messages, tools=tools)
        except UserError:
            return False

    def _takes_calls(self, arguments: Any) -> bool:
        call = {"id": "abcdefghi", "type": "function", "function": {"name": "f" + _PROBE, "arguments": arguments}}
        result = {"role": "tool", "name": "f" + _PROBE, "tool_call_id": "abcdefghi", "content": "r" + _PROBE}
        messages = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            result,
        ]
        try:
            text = render_chat(self.tokenizer, messages)
        except UserError:
            return False
        return "f" + _PROBE in text and "r" + _PROBE in text

    def notes(self) -> list[str]:
        """Return what a start-up summary should say of chats."""
        if self.tokenizer.chat_template is None:
            return ["none, the model has no chat template: only completions"]
        how = "" if self.takes_tools else " (its template takes no tools: they are put into the system message)"
        reasoning = "none" if self.reasoning is None else f"{self.reasoning.start}...{self.reasoning.end}"
        return [f"tool calls {self.tools.name}{how}, reasoning {reasoning}"]

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Json] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        continue_final: bool = False,
    ) -> list[int]:
        """Return the ids of a chat in OpenAI's form, with `arguments` as objects.

        With `continue_final` the last message, which must be the assistant's, is left open for more. Raises UserError.
        """
        if continue_final:
            if len(messages) < 2 or messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls"):
                raise UserError("only a last message of the assistant, behind another one, can be continued")
            before = self.encode(messages[:-1], tools, True, variables)
            begun = str(messages[-1].get("content") or "")
            return before + self.tokenizer.encode(begun, special_tokens=False, parse_special=False)
        shown = [dict(message) for message in messages]
        if self.tools.name == "mistral":
            _shorten_ids(shown)
        if not self.calls_as:
            shown = self._calls_as_text(shown)
        elif self.calls_as == "text":
            _write_arguments(shown)
        if tools and not self.takes_tools:
            shown, tools = self._with_instructions(shown, tools), None
        return encode_chat(
            self.tokenizer, shown, add_generation_prompt=add_generation_prompt, tools=tools or None, **(variables or {})
        )

    def _calls_as_text(self, messages: list[Json]) -> list[Json]:
        shown: list[Json] = []
        for message in messages:
            calls = message.pop("tool_calls", None)
            if calls:
                made = [ToolCall(one["function"]["name"], json.dumps(one["function"]["arguments"])) for one in calls]
                message["content"] = "\n".join(filter(None, (message.get("content"), self.tools.write(made))))
            if message["role"] == "tool":
                result = f"<tool_response>\n{message['content']}\n</tool_response>"
                if shown and shown[-1].pop("results", False):  # roles must often alternate
                    shown[-1] |= {"content": f"{shown[-1]['content']}\n{result}", "results": True}
                else:
                    shown.append({"role": "user", "content": result, "results": True})
                continue
            shown.append(message)
        for message in shown:
            message.pop("results", None)
        return shown

    def _with_instructions(self, messages: list[Json], tools: Sequence[Json]) -> list[Json]:
        """Return the messages with the tools described in the first of them that may hold it."""
        listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        example = self.tools.write([ToolCall("NAME", '{"ARGUMENT": "VALUE"}')])
        text = (
            f"You can call these functions, given with the JSON schemas of their arguments:\n{listed}\n"
            f"To call one, answer with nothing but:\n{example}\nIts result is then given to you."
        )
        system = messages[0]["role"] == "system"
        if not system and self.takes_system:
            return [{"role": "system", "content": text}, *messages]
        first = {
            **messages[0],
            "content": f"{messages[0]['content']}\n\n{text}" if system else f"{text}\n\n{messages[0]['content']}",
        }
        return [first, *messages[1:]]

    def effort(self, effort: str) -> Json:
        """Return the variables by which the template learns how much to reason. Raises UserError where it cannot."""
        template = _templates(self.tokenizer)
        if effort == "none" and "enable_thinking" in template:
            return {"enable_thinking": False}
        if "reasoning_effort" in template:
            return {"reasoning_effort": effort}
        if effort == "none" and self.reasoning is None:
            return {}
        raise UserError(f"this model's chat template knows no reasoning effort '{effort}'; leave it out")

    def thinking(self, wanted: bool) -> Json:
        """Return the variables that turn reasoning on or off. Raises UserError for a model that does not reason."""
        if "enable_thinking" in _templates(self.tokenizer):
            return {"enable_thinking": wanted}
        if wanted and self.reasoning is None:
            raise UserError("this model does not reason before it answers; leave 'thinking' out")
        return {}

    def opening(self, prompt: Sequence[int]) -> Opening:
        """Return how the answer to a prompt will begin."""
        if self.reasoning is None:
            return Opening(None)
        tail = self.tokenizer.decode(prompt[-24:], skip_special_tokens=False).rstrip()
        if tail.endswith(self.reasoning.end):
            return Opening(None)
        return Opening(self.reasoning, tail.endswith(self.reasoning.start))

    def parser(self, opening: Opening, tools: Sequence[str]) -> AnswerParser | None:
        """Return a parser for one answer that may call `tools`, by name; None where all of it is text."""
        if not tools and opening.reasoning is None:
            return None
        return AnswerParser(self.tools if tools else None, tools, opening.reasoning, opening.open)

    def shown_tokens(self, opening: Opening, tools: bool) -> tuple[int, ...]:
        """Return the special tokens that the parser must see in the text."""
        markers = (*(self.tools.markers if tools else ()),)
        if opening.reasoning is not None:
            markers += (opening.reasoning.start, opening.reasoning.end)
        ids = (self.tokenizer.token_to_id(one) for one in markers)
        return tuple(index for index in ids if index is not None and index in self.tokenizer.special_ids)

    def new_call_id(self, prefix: str = "call_") -> str:
        """Return a new name for a call, of the kind that the model's template takes."""
        digits = uuid.uuid4().hex
        return digits[:9] if self.tools.name == "mistral" else prefix + digits[:24]


def _shorten_ids(messages: list[Json]) -> None:
    """Give calls names of nine letters and digits, which Mistral's templates insist on."""

    def short(name: Any) -> str:
        fits = isinstance(name, str) and len(name) == 9 and name.isascii() and name.isalnum()
        return name if fits else hashlib.sha256(str(name).encode()).hexdigest()[:9]

    for message in messages:
        if "tool_call_id" in message:
            message["tool_call_id"] = short(message["tool_call_id"])
        if message.get("tool_calls"):
            message["tool_calls"] = [{**call, "id": short(call.get("id"))} for call in message["tool_calls"]]


def _write_arguments(messages: list[Json]) -> None:
    for message in messages:
        if message.get("tool_calls"):
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ]


def _tool_format(tokenizer: Tokenizer, name: str, takes_tools: bool) -> ToolFormat:
    if name != "auto":
        return FORMATS[TOOL_PARSERS[name]]
    template = _templates(tokenizer)
    if "<tool_call>" in template:
        return FORMATS["hermes"]
    if "[TOOL_CALLS]" in template:
        return FORMATS["mistral"]
    if takes_tools and ('"parameters": ' in template or tokenizer.token_to_id("<|python_tag|>") is not None):
        return FORMATS["llama3"]
    if tokenizer.token_to_id("[TOOL_CALLS]") is not None:
        return FORMATS["mistral"]
    return FORMATS["json" if takes_tools else "hermes"]


def _reasoning(tokenizer: Tokenizer, name: str) -> Reasoning | None:
    if name != "auto":
        return REASONING_PARSERS[name]
    template = _templates(tokenizer)
    for one in (THINK, BRACKETS):
        if one.end in template or tokenizer.token_to_id(one.end) is not None:
            return one
    return None


def _templates(tokenizer: Tokenizer) -> str:
    return "".join(tokenizer.chat_templates.values())
