"""A response as OpenAI's object and as its events: both come from one list of items that grows with the answer."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from treadle.serve.api.chat import ChoiceParser
from treadle.serve.api.errors import ApiError
from treadle.serve.api.exchange import Exchange, Usage
from treadle.serve.api.logprobs import chat_tokens
from treadle.serve.api.service import ChatRun, Service
from treadle.serve.api.streams import Event, Json, Shape
from treadle.serve.parsers import Piece, Text, Thought, ToolCall
from treadle.serve.request import Completion, Delta, FinishReason

# By the kind of an item: the kind of its content, and the event that brings a part of it.
_PARTS = {
    "message": ("output_text", "response.output_text"),
    "reasoning": ("reasoning_text", "response.reasoning_text"),
}


class ResponsesShape(Shape):
    """A response, whole and in events."""

    def __init__(self, service: Service, model: str, given: Mapping[str, Any], run: ChatRun) -> None:
        """`given` are the fields of the request, which the response repeats."""
        self._tokenizer, self._chats = service.engine.tokenizer, service.chats
        self._choice = ChoiceParser(run.parser())
        self._output: list[Json] = []
        self._open = False  # whether the last item is still growing
        self._number = 0
        self._thoughts = ""
        self._ended: FinishReason | None = None
        self._response: Json = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": model,
            "output": [],
            "instructions": given.get("instructions"),
            "max_output_tokens": given.get("max_output_tokens"),
            "metadata": given.get("metadata", {}),
            "parallel_tool_calls": given.get("parallel_tool_calls", True),
            "previous_response_id": None,
            "reasoning": given.get("reasoning"),
            "store": False,
            "temperature": given.get("temperature", 1.0),
            "text": given.get("text", {"format": {"type": "text"}}),
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": given.get("tools", []),
            "top_p": given.get("top_p", 1.0),
            "truncation": "disabled",
            "usage": None,
        }

    def whole(self, completions: Sequence[Completion], usage: Usage) -> Json:
        (completion,) = completions
        delta = Delta(
            0,
            completion.text,
            logprobs=tuple(completion.logprobs),
            finish_reason=completion.finish_reason,
            weight_version=completion.weight_version,
        )
        for _ in self.chunk(delta):
            pass
        return self._finished(usage)

    def begin(self, exchange: Exchange) -> Iterable[Event]:
        yield self._event("response.created", response=self._response)
        yield self._event("response.in_progress", response=self._response)

    def chunk(self, delta: Delta) -> Iterator[Event]:
        logprobs = list(chat_tokens(self._tokenizer, delta.logprobs))
        for piece in self._choice.pieces(delta.text, delta.finish_reason is not None):
            yield from self._add(piece, logprobs if isinstance(piece, Text) else [])
            logprobs = [] if isinstance(piece, Text) else logprobs
        if delta.finish_reason is not None:
            if not self._output:
                yield from self._begin("message")
            yield from self._close()
            self._ended = delta.finish_reason
            if delta.weight_version:
                self._response["system_fingerprint"] = delta.weight_version

    def end(self, usage: Usage) -> Iterable[Event]:
        response = self._finished(usage)
        yield self._event(f"response.{response['status']}", response=response)

    def fail(self, error: ApiError) -> Iterable[Event]:
        failure = {"code": "server_error", "message": error.message}
        response = {**self._response, "status": "failed", "error": failure, "output": self._output}
        yield self._event("response.failed", response=response)

    def _finished(self, usage: Usage) -> Json:
        cut = self._ended is FinishReason.LENGTH
        thoughts = self._thoughts
        reasoning = 0 if self._tokenizer is None or not thoughts else len(self._tokenizer.encode(thoughts, False))
        return self._response | {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "completed_at": int(time.time()),
            "output": self._output,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": min(reasoning, usage.completion_tokens)},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }

    def _add(self, piece: Piece, logprobs: list[Json]) -> Iterator[Event]:
        if isinstance(piece, ToolCall):
            yield from self._close()
            yield from self._call(piece)
            return
        kind = "reasoning" if isinstance(piece, Thought) else "message"
        if not self._open or self._output[-1]["type"] != kind:
            yield from self._close()
            yield from self._begin(kind)
        part = self._output[-1]["content"][0]
        part["text"] += piece.text
        more: Json = {}
        if isinstance(piece, Thought):
            self._thoughts += piece.text
        else:
            more["logprobs"] = logprobs
            part["logprobs"] += logprobs
        yield self._at(f"{_PARTS[kind][1]}.delta", content_index=0, delta=piece.text, **more)

    def _begin(self, kind: str) -> Iterator[Event]:
        part: Json = {"type": _PARTS[kind][0], "text": ""}
        item: Json = {"type": kind, "status": "in_progress"}
        if kind == "message":
            part |= {"annotations": [], "logprobs": []}
            item |= {"id": f"msg_{uuid.uuid4().hex}", "role": "assistant", "content": []}
        else:
            item |= {"id": f"rs_{uuid.uuid4().hex}", "summary": [], "content": []}
        self._output.append(item)
        self._open = True
        yield self._event("response.output_item.added", output_index=len(self._output) - 1, item=item)
        item["content"] = [part]
        yield self._at("response.content_part.added", content_index=0, part=part)

    def _close(self) -> Iterator[Event]:
        if not self._open:
            return
        self._open = False
        item = self._output[-1]
        item["status"] = "completed"
        (part,) = item["content"]
        more = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
        yield self._at(f"{_PARTS[item['type']][1]}.done", content_index=0, text=part["text"], **more)
        yield self._at("response.content_part.done", content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _call(self, call: ToolCall) -> Iterator[Event]:
        assert self._chats is not None
        item: Json = {"type": "function_call", "id": f"fc_{uuid.uuid4().hex}", "status": "in_progress"}
        item |= {"call_id": self._chats.new_call_id(), "name": call.name, "arguments": ""}
        self._output.append(item)
        yield self._event("response.output_item.added", output_index=len(self._output) - 1, item=item)
        yield self._at("response.function_call_arguments.delta", delta=call.arguments)
        yield self._at("response.function_call_arguments.done", name=call.name, arguments=call.arguments)
        item |= {"arguments": call.arguments, "status": "completed"}
        yield self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _at(self, name: str, /, **fields: Any) -> Event:
        """Return an event of the last item."""
        return self._event(name, item_id=self._output[-1]["id"], output_index=len(self._output) - 1, **fields)

    def _event(self, name: str, /, **fields: Any) -> Event:
        self._number += 1
        return Event({"type": name, "sequence_number": self._number - 1, **fields}, name)
