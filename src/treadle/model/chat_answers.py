"""Which tokens of a chat the model is to learn: the assistant's answers with the token that ends each, nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from treadle.config import UserError
from treadle.model.chat import (
    ANSWER_CLOSE,
    ANSWER_OPEN,
    Chat,
    Message,
    Rendered,
    encode_rendered,
    plain_chat,
    render,
    with_literals,
)
from treadle.model.chat_sandbox import GENERATION_CLOSE, GENERATION_OPEN, has_generation_blocks
from treadle.model.tokenizer import Tokenizer


def encode_chat_with_answers(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> tuple[list[int], list[bool]]:
    """Return the ids of a whole chat, and for each whether it belongs to an answer of the assistant.

    An answer begins where generation would begin: after the header that the template writes for it, thinking included.
    It ends with the token that ends the turn. A template with {% generation %} blocks says itself what an answer is.
    Raises UserError where the messages hold no answer, or the template does not let its answers be found.
    """
    chat = plain_chat(tokenizer, messages, False, tools, variables)
    if not any(message["role"] == "assistant" for message in chat.messages):
        raise UserError("the chat has no message of the assistant, so there is nothing in it to learn")
    literal = with_literals(tokenizer, chat)
    rendered = render(tokenizer, literal)
    ids, offsets = encode_rendered(tokenizer, rendered)
    if has_generation_blocks(chat.template):
        spans = rendered.spans(GENERATION_OPEN, GENERATION_CLOSE)
        if spans is None:
            raise UserError("the model's chat template cuts its own generation blocks apart; correct the template")
    else:
        ends = {token for index in tokenizer.eos_ids if (token := tokenizer.id_to_token(index))}
        spans = _Finder(tokenizer, chat, rendered.text, ends).spans()
    return ids, _overlapping(offsets, spans)


def _overlapping(offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> list[bool]:
    """Whether each token stands for a character of a span. Both come in order, so one pass is enough."""
    mask, place = [], 0
    for start, end in offsets:
        while place < len(spans) and spans[place][1] <= start:
            place += 1
        mask.append(place < len(spans) and end > max(start, spans[place][0]))
    return mask


class _Finder:
    """Finds the answers in the text of a chat by rendering variations of it.

    What comes before an answer, rendered by itself with the generation prompt, is the text up to the answer. Where a
    template renders it otherwise (it may put tools before the last question), marks around the answer's own text tell.
    """

    def __init__(self, tokenizer: Tokenizer, chat: Chat, text: str, ends: set[str]) -> None:
        self.tokenizer, self.chat, self.text, self.ends = tokenizer, chat, text, ends
        self.special = tokenizer.special_pattern
        self.marked = self._marked()

    def spans(self) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for number, message in enumerate(self.chat.messages):
            if message["role"] == "assistant":
                start = self._start(number)
                end = self._end(number, start)
                if not (found[-1][1] if found else 0) <= start <= end:
                    raise self._lost(number)
                found.append((start, end))
        return found

    def _lost(self, number: int) -> UserError:
        return UserError(
            f"the model's chat template does not let message {number + 1} of the chat be found in what it writes; "
            "put {% generation %} and {% endgeneration %} around the assistant's answer in the template"
        )

    def _marked(self) -> dict[int, tuple[int, int]]:
        """Where the own text of each answer lies, as far as marks around it come through the template unharmed."""
        return self._marked_around(lambda content: content) or self._marked_around(str.strip)

    def _marked_around(self, part: Callable[[str], str]) -> dict[int, tuple[int, int]]:
        """Put the marks around `part` of each answer: all of it, or for templates that trim what they leave."""
        numbers, messages = [], []
        for number, message in enumerate(self.chat.messages):
            content = message.get("content")
            if message["role"] == "assistant" and isinstance(content, str) and content.strip():
                left, right = content.split(part(content), 1)
                marked = f"{left}{ANSWER_OPEN}{part(content)}{ANSWER_CLOSE}{right}"
                message = {**message, "content": marked}
                numbers.append(number)
            messages.append(message)
        rendered = self._try(dataclasses.replace(self.chat, messages=messages))
        if rendered is None or rendered.text != self.text:
            return {}
        spans = rendered.spans(ANSWER_OPEN, ANSWER_CLOSE)
        if spans is not None and len(spans) == len(numbers):
            return dict(zip(numbers, spans, strict=True))
        closed = rendered.places[ANSWER_CLOSE]
        if len(closed) == len(numbers):  # the thinking before some answers was left out, and the opening mark with it
            return {number: (-1, end) for number, end in zip(numbers, closed, strict=True)}
        return {}

    def _try(self, chat: Chat) -> Rendered | None:
        try:
            return render(self.tokenizer, chat)
        except UserError:  # a template may well refuse a part of a chat
            return None

    def _before(self, number: int, prompt: bool) -> str | None:
        """The text of the messages before `number`, where the whole text begins with it."""
        part = dataclasses.replace(self.chat, messages=self.chat.messages[:number], add_generation_prompt=prompt)
        rendered = self._try(part) if number else None
        return rendered.text if rendered is not None and self.text.startswith(rendered.text) else None

    def _start(self, number: int) -> int:
        prompt, own = self._before(number, True), self.marked.get(number, (-1, -1))[0]
        if prompt is not None and (own < 0 or prompt != self._before(number, False)):
            return len(prompt)
        if own < 0:
            raise self._lost(number)
        return own  # a template without a generation prompt: the header before the answer is not to be learnt

    def _end(self, number: int, start: int) -> int:
        """The place after the token that ends the turn; without one, after the answer's own text."""
        message = self.chat.messages[number]
        if number not in self.marked:
            whole = self._before(number + 1, False)
            if whole is not None:
                return max(start, len(whole.rstrip()))
            if message.get("content"):
                raise self._lost(number)
        own = max(start, self.marked.get(number, (-1, -1))[1])
        for match in self.special.finditer(self.text, own) if self.special else ():
            follows = not message.get("tool_calls") and not self.text[own : match.start()].strip()
            if follows or match.group() in self.ends:
                return match.end()
        return own
