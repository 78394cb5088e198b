"""The answers: deltas and completions as OpenAI's chat and completion objects."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from treadle.model.tokenizer import Tokenizer
from treadle.serve.request import Completion, Delta, FinishReason, TokenLogprob

Json = dict[str, Any]


class Shape:
    """What the parts of one answer have in common: its id, its date, the model's name."""

    def __init__(self, model: str, tokenizer: Tokenizer | None, include_usage: bool = False) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model, self.tokenizer, self.include_usage = model, tokenizer, include_usage

    prefix = ""
    whole_object = ""
    chunk_object = ""

    def whole(self, completions: Sequence[Completion], usage: Json) -> Json:
        """Return the answer of a request that does not stream."""
        return {
            **self._head(self.whole_object),
            "choices": [self._choice(index, completion) for index, completion in enumerate(completions)],
            "usage": usage,
        }

    def first(self, index: int) -> Json | None:
        """Return the chunk that opens choice `index` of a stream, where the shape has one."""
        return None

    def chunk(self, delta: Delta) -> Json | None:
        """Return the chunk of a delta, or None where it has nothing to say."""
        if not delta.text and not delta.logprobs and delta.finish_reason is None:
            return None
        return self._chunk([self._chunk_choice(delta)])

    def usage_chunk(self, usage: Json) -> Json:
        """Return the last chunk of a stream whose client asked for its usage."""
        return self._head(self.chunk_object) | {"choices": [], "usage": usage}

    def _head(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, choices: list[Json]) -> Json:
        # OpenAI: with include_usage every chunk has the field, null in all but the last.
        return self._head(self.chunk_object) | {"choices": choices} | ({"usage": None} if self.include_usage else {})

    def _choice(self, index: int, completion: Completion) -> Json:
        raise NotImplementedError

    def _chunk_choice(self, delta: Delta) -> Json:
        raise NotImplementedError

    def token_text(self, token: int) -> str:
        """Return a token's text for the lists of log probabilities; half a character shows as U+FFFD."""
        if self.tokenizer is None:
            return f"token_id:{token}"
        return self.tokenizer.decode([token], skip_special_tokens=False)


class ChatShape(Shape):
    """chat.completion and chat.completion.chunk."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first(self, index: int) -> Json:
        delta = {"role": "assistant", "content": ""}
        return self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def _choice(self, index: int, completion: Completion) -> Json:
        return {
            "index": index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": self._logprobs(completion.logprobs),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }

    def _chunk_choice(self, delta: Delta) -> Json:
        choice = {
            "index": delta.index,
            "delta": {"content": delta.text} if delta.text else {},
            "logprobs": self._logprobs(delta.logprobs),
            "finish_reason": delta.finish_reason,
        }
        return choice | ({"stop_reason": delta.stop_reason} if delta.finish_reason else {})

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> Json | None:
        if not logprobs:
            return None
        return {
            "content": [
                self._token(one.token, one.logprob) | {"top_logprobs": [self._token(*pair) for pair in one.top]}
                for one in logprobs
            ],
            "refusal": None,
        }

    def _token(self, token: int, logprob: float) -> Json:
        text = self.token_text(token)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


class CompletionShape(Shape):
    """text_completion."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, tokenizer: Tokenizer | None, include_usage: bool = False) -> None:
        super().__init__(model, tokenizer, include_usage)
        self._offsets: dict[int, int] = {}  # by choice: the characters that its tokens so far stand for

    def _choice(self, index: int, completion: Completion) -> Json:
        return {
            "index": index,
            "text": completion.text,
            "logprobs": self._logprobs(index, completion.logprobs),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }

    def _chunk_choice(self, delta: Delta) -> Json:
        choice = {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self._logprobs(delta.index, delta.logprobs),
            "finish_reason": delta.finish_reason,
        }
        return choice | ({"stop_reason": delta.stop_reason} if delta.finish_reason else {})

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> Json | None:
        if not logprobs:
            return None
        texts = [self.token_text(one.token) for one in logprobs]
        offsets, offset = [], self._offsets.get(index, 0)
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        self._offsets[index] = offset
        return {
            "tokens": texts,
            "token_logprobs": [_finite(one.logprob) for one in logprobs],
            "top_logprobs": [
                {self.token_text(token): _finite(logprob) for token, logprob in one.top} for one in logprobs
            ],
            "text_offset": offsets,
        }


def _finite(logprob: float) -> float:
    """JSON knows no infinity; what has no probability at all gets the value that OpenAI gives it."""
    return max(logprob, -9999.0)


def failed(completions: Sequence[Completion]) -> str | None:
    """Return why one of the choices failed, or None."""
    wrong = (FinishReason.ERROR, FinishReason.CANCELLED)
    return next((c.error or "the request was cancelled" for c in completions if c.finish_reason in wrong), None)
