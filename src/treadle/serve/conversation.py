"""A chat of several turns with one model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from treadle.config import UserError
from treadle.config.files import write_atomically
from treadle.model.chat import encode_chat
from treadle.model.tokenizer import Tokenizer
from treadle.serve.engine import Engine
from treadle.serve.request import Delta, SamplingSettings

MIN_ANSWER = 64  # tokens of the context that are kept free for an answer, where the context is that large


def check_chat_template(tokenizer: Tokenizer | None) -> None:
    """Raise UserError where a model cannot chat."""
    if tokenizer is None or tokenizer.chat_template is None:
        raise UserError(
            "this model has no chat template, it only continues texts; use 'treadle generate', or a model tuned for "
            "chats (often named -Instruct or -it)"
        )


class Conversation:
    """The messages so far, and the engine that answers them."""

    def __init__(self, engine: Engine, settings: SamplingSettings, system: str | None = None) -> None:
        """`settings.max_tokens` bounds an answer; near the context's end answers are shorter."""
        check_chat_template(engine.tokenizer)
        self.engine, self.settings = engine, settings
        self.messages: list[dict[str, str]] = []
        self.forgotten = 0  # messages that no longer fit the context and were dropped, the oldest first
        self.reset(system)

    def reset(self, system: str | None = None) -> None:
        """Begin again, with another system message or none."""
        self.system = system
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self.forgotten = 0

    def ask(self, text: str) -> Iterator[Delta]:
        """Yield the answer to `text` as it comes; whatever part of it was yielded becomes part of the conversation.

        Raises UserError, and forgets the question, where it alone is too long for the context.
        """
        self.messages.append({"role": "user", "content": text})
        try:
            tokens = self._fit()
        except UserError:
            self.messages.pop()
            raise
        room = self.engine.max_model_len - len(tokens)
        limit = room if self.settings.max_tokens is None else min(room, self.settings.max_tokens)
        answer = ""
        try:
            for delta in self.engine.deltas(tokens, SamplingSettings.of(self.settings, max_tokens=limit)):
                answer += delta.text
                yield delta
        finally:
            self.messages.append({"role": "assistant", "content": answer})

    def _fit(self) -> list[int]:
        """Return the conversation's tokens, dropping its oldest exchanges until an answer fits behind it."""
        assert self.engine.tokenizer is not None
        space = self.engine.max_model_len
        kept_free = min(MIN_ANSWER, max(1, space // 4))
        while True:
            tokens = encode_chat(self.engine.tokenizer, self.messages, add_generation_prompt=True)
            if len(tokens) + kept_free <= space:
                return tokens
            first = 0 if self.system is None else 1
            if len(self.messages) <= first + 1:
                raise UserError(
                    f"the message takes {len(tokens)} of the context's {space} tokens, which leaves no room for an "
                    "answer; shorten it"
                )
            drop = 2 if len(self.messages) > first + 2 else 1
            del self.messages[first : first + drop]
            self.forgotten += drop

    def save(self, path: str | Path) -> None:
        """Write the conversation as one line of JSON, the form that `treadle train` takes as chat data.

        Raises UserError where the file exists.
        """
        if Path(path).exists():
            raise UserError(f"{path} already exists; choose another name")
        line = json.dumps({"messages": self.messages}, ensure_ascii=False) + "\n"
        write_atomically(path, line.encode("utf-8", "replace"))
