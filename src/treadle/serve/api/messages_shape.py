"""A message as Anthropic's object and as its events: both come from one list of blocks that grows with the answer."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from treadle.serve.api.chat import ChoiceParser
from treadle.serve.api.errors import ApiError
from treadle.serve.api.exchange import Exchange, Usage
from treadle.serve.api.service import ChatRun, Service
from treadle.serve.api.streams import Event, Json, Shape
from treadle.serve.parsers import Piece, Thought, ToolCall
from treadle.serve.request import Completion, Delta, FinishReason


class MessagesShape(Shape):
    """A message, whole and in events."""

    def __init__(self, service: Service, model: str, run: ChatRun) -> None:
        self._chats = service.chats
        self._choice = ChoiceParser(run.parser())
        self._blocks: list[Json] = []
        self._open = False  # whether the last block is still growing
        self._version: Json = {}
        self._ends: Json = {"stop_reason": None, "stop_sequence": None}
        self._message: Json = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def whole(self, completions: Sequence[Completion], usage: Usage) -> Json:
        (completion,) = completions
        delta = Delta(
            0,
            completion.text,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            weight_version=completion.weight_version,
        )
        for _ in self.chunk(delta):
            pass
        return self._message | self._ends | self._version | {"content": self._blocks, "usage": _usage(usage)}

    def begin(self, exchange: Exchange) -> Iterable[Event]:
        yield self._event("message_start", message=self._message | {"usage": _usage(exchange.usage)})

    def chunk(self, delta: Delta) -> Iterator[Event]:
        for piece in self._choice.pieces(delta.text, delta.finish_reason is not None):
            yield from self._add(piece)
        if delta.finish_reason is not None:
            yield from self._close()
            self._ends = self._ending(delta)
            if delta.weight_version:
                self._version = {"system_fingerprint": delta.weight_version}

    def end(self, usage: Usage) -> Iterable[Event]:
        yield self._event("message_delta", delta=self._ends, usage=_usage(usage), **self._version)
        yield self._event("message_stop")

    def fail(self, error: ApiError) -> Iterable[Event]:
        yield Event(error.anthropic_body(), "error")

    def silence(self) -> bytes:
        return self._event("ping").encode()

    def _ending(self, delta: Delta) -> Json:
        reason = "max_tokens" if delta.finish_reason is FinishReason.LENGTH else "end_turn"
        if reason == "end_turn" and self._choice.calls:
            reason = "tool_use"
        elif reason == "end_turn" and isinstance(delta.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": delta.stop_reason}
        return {"stop_reason": reason, "stop_sequence": None}

    def _add(self, piece: Piece) -> Iterator[Event]:
        if isinstance(piece, ToolCall):
            yield from self._close()
            yield from self._call(piece)
            return
        kind = "thinking" if isinstance(piece, Thought) else "text"
        if not self._open or self._blocks[-1]["type"] != kind:
            yield from self._close()
            block: Json = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {"citations": None})
            yield from self._begin(block)
        self._blocks[-1][kind] += piece.text
        yield self._delta({"type": f"{kind}_delta", kind: piece.text})

    def _call(self, call: ToolCall) -> Iterator[Event]:
        assert self._chats is not None
        block: Json = {"type": "tool_use", "id": self._chats.new_call_id("toolu_"), "name": call.name, "input": {}}
        yield from self._begin(block)
        yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        block["input"] = json.loads(call.arguments)
        yield from self._close()

    def _begin(self, block: Json) -> Iterator[Event]:
        self._blocks.append(block)
        self._open = True
        yield self._event("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _close(self) -> Iterator[Event]:
        if self._open:
            self._open = False
            yield self._event("content_block_stop", index=len(self._blocks) - 1)

    def _delta(self, delta: Json) -> Event:
        return self._event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _event(self, name: str, /, **fields: Any) -> Event:
        return Event({"type": name, **fields}, name)


def _usage(usage: Usage) -> Json:
    """Return the tokens as Anthropic counts them: those from the cache apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
