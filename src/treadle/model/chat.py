"""Chats: messages to text by the model's own template, and to tokens.

A message's text never forges a turn. The template's own `<|im_end|>` becomes that token; a message that spells
`<|im_end|>` gets the characters. Training on chats and serving them both come through here, so that they agree.
"""

from __future__ import annotations

import bisect
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from treadle.config import UserError
from treadle.model import chat_sandbox
from treadle.model.chat_sandbox import GENERATION_CLOSE, GENERATION_OPEN, Refusal, TooMuch
from treadle.model.tokenizer import Tokenizer

Message = Mapping[str, Any]
# Noncharacters of Unicode mark places in what is rendered; where a message has one it is replaced.
LITERAL_OPEN, LITERAL_CLOSE = "\ufdd2", "\ufdd3"
ANSWER_OPEN, ANSWER_CLOSE = "\ufdd4", "\ufdd5"
MARKS = (GENERATION_OPEN, GENERATION_CLOSE, LITERAL_OPEN, LITERAL_CLOSE, ANSWER_OPEN, ANSWER_CLOSE)
_MARK = re.compile(f"[{''.join(MARKS)}]")
# Names under which different templates look for the thinking before an answer; the first is the usual one.
_REASONING = ("reasoning_content", "thinking", "reasoning")
MAX_DEPTH = 64


@dataclass(frozen=True)
class Chat:
    """What a template is given, as plain data."""

    template: str
    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    tools: list[Any] | None
    variables: dict[str, Any]


@dataclass(frozen=True)
class Rendered:
    """A chat's text without marks, and the places where each kind of mark stood, in order."""

    text: str
    places: Mapping[str, tuple[int, ...]]

    def spans(self, opening: str, closing: str) -> list[tuple[int, int]] | None:
        """Return the spans between two kinds of mark, or None where the template tore a pair apart."""
        pairs = list(zip(self.places[opening], self.places[closing], strict=False))
        whole = len(self.places[opening]) == len(self.places[closing]) and all(start <= end for start, end in pairs)
        return pairs if whole else None


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """Return the text of a chat as the model's chat template writes it, BOS included where the template has it.

    `messages` are mappings with "role" and usually "content"; `tools` are JSON schemas; `variables` go to the template
    (such as enable_thinking=False). Raises UserError where the model has no template, or it fails, refuses or does not
    come to an end.
    """
    return render(tokenizer, plain_chat(tokenizer, messages, add_generation_prompt, tools, variables)).text


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> list[int]:
    """Return the ids of a chat: the template's special tokens parsed, those that messages spell kept as text.

    BOS is there where the template writes it, and never twice. Raises UserError as `render_chat` does.
    """
    chat = plain_chat(tokenizer, messages, add_generation_prompt, tools, variables)
    rendered = render(tokenizer, with_literals(tokenizer, chat))
    if not rendered.places[LITERAL_OPEN] and not rendered.places[LITERAL_CLOSE]:
        return tokenizer.encode(rendered.text, special_tokens=False)
    return encode_rendered(tokenizer, rendered)[0]


def plain_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
) -> Chat:
    """Return what the template is to be given: no nulls, no objects, thinking under each name that templates use."""
    templates = tokenizer.chat_templates
    template = templates.get("tool_use", templates.get("default")) if tools else templates.get("default")
    if template is None:
        raise UserError(
            "the model has no chat template, so it was not made for chats; "
            "use a plain prompt, or a model tuned for chats (often named -Instruct or -it)"
        )
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise UserError("a chat is a list of at least one message, each with a role and content")
    plain_messages = []
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UserError(f'message {number} of the chat is not of the form {{"role": ..., "content": ...}}')
        plain = {str(key): _plain(value) for key, value in message.items() if value is not None}
        thinking = next((plain[key] for key in _REASONING if key in plain), None)
        if thinking is not None:
            plain = {"thinking": thinking, **plain, "reasoning_content": thinking}
        plain_messages.append(plain)
    return Chat(
        template,
        plain_messages,
        add_generation_prompt,
        None if tools is None else _plain(list(tools)),
        {key: _plain(value) for key, value in variables.items()},
    )


def _plain(value: Any, depth: int = 0) -> Any:
    if depth > MAX_DEPTH:
        raise UserError(f"the chat's messages or tools are nested more than {MAX_DEPTH} deep")
    if isinstance(value, str):
        return _MARK.sub("\ufffd", str.__str__(value))
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, depth + 1) for item in value]
    raise UserError(f"the chat's messages or tools hold a {type(value).__name__}; only what JSON has is allowed")


def render(tokenizer: Tokenizer, chat: Chat) -> Rendered:
    """Return the template's output. Raises UserError."""
    roles = ("bos_token", "eos_token", "unk_token", "pad_token")
    given = {
        **{role: token for role in roles if (token := getattr(tokenizer, role)) is not None},
        "messages": chat.messages,
        "tools": chat.tools,
        "documents": None,
        "add_generation_prompt": chat.add_generation_prompt,
        **chat.variables,
    }
    try:
        marked = chat_sandbox.render(chat.template, given)
    except Refusal as error:
        raise UserError(f"the model's chat template refuses these messages: {_line(error)}") from error
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"the model's chat template is wrong in line {error.lineno}: {_line(error)}") from error
    except TooMuch as error:
        raise UserError(f"the model's chat template was stopped: {_line(error)}") from error
    except Exception as error:  # a template may raise anything at all
        raise UserError(f"the model's chat template fails on these messages: {_line(error)}") from error
    return _without_marks(marked)


def _line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def _without_marks(text: str) -> Rendered:
    places: dict[str, list[int]] = {mark: [] for mark in MARKS}
    parts, last, length = [], 0, 0
    for match in _MARK.finditer(text):
        parts.append(text[last : match.start()])
        length += match.start() - last
        places[match.group()].append(length)
        last = match.end()
    parts.append(text[last:])
    return Rendered("".join(parts), {mark: tuple(found) for mark, found in places.items()})


def with_literals(tokenizer: Tokenizer, chat: Chat) -> Chat:
    """Return the chat with each special token that messages, tools or variables spell put between LITERAL marks."""
    spelled = tokenizer.special_pattern
    if spelled is None:
        return chat

    def mark(text: str) -> str:
        return spelled.sub(lambda match: f"{LITERAL_OPEN}{match.group()}{LITERAL_CLOSE}", text)

    return dataclasses.replace(
        chat,
        messages=map_text(chat.messages, mark),
        tools=map_text(chat.tools, mark),
        variables=map_text(chat.variables, mark),
    )


def map_text(value: Any, change: Callable[[str], str]) -> Any:
    """Return plain data with `change` applied to each text in it (keys of mappings stay)."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: map_text(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [map_text(item, change) for item in value]
    return value


def encode_rendered(tokenizer: Tokenizer, rendered: Rendered) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the ids of a rendered chat and the characters [start, end) of its text that each stands for.

    The text is cut at its true special tokens; a stretch between two of them that holds literal ones is encoded as
    ordinary text, the rest as usual. Raises UserError where the template tore a literal one apart.
    """
    text, literal = rendered.text, rendered.spans(LITERAL_OPEN, LITERAL_CLOSE)
    if literal is None:
        raise UserError(
            "a message spells a special token of the model where its chat template cuts messages up; remove it there"
        )
    spelled = tokenizer.special_pattern
    if not literal or spelled is None:
        return tokenizer.encode_with_offsets(text)
    starts = [start for start, _ in literal]

    def is_literal(match: re.Match[str]) -> bool:
        before = bisect.bisect_right(starts, match.start()) - 1
        after = bisect.bisect_left(starts, match.start())
        return (before >= 0 and literal[before][1] > match.start()) or (
            after < len(starts) and starts[after] < match.end()
        )

    edges = [0]
    for match in spelled.finditer(text):
        if not is_literal(match):
            edges += [match.start(), match.end()]
    edges.append(len(text))
    ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    begun = 0
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        if bisect.bisect_left(starts, start) == bisect.bisect_left(starts, end):
            continue  # nothing literal: it goes with its special tokens
        for first, last, parse in ((begun, start, True), (start, end, False)):
            found, places = tokenizer.encode_with_offsets(text[first:last], parse)
            ids += found
            offsets += [(first + left, first + right) for left, right in places]
        begun = end
    found, places = tokenizer.encode_with_offsets(text[begun:])
    return ids + found, offsets + [(begun + left, begun + right) for left, right in places]
