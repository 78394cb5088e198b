"""POST /v1/completions: OpenAI's text completions, with vLLM's additions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import Field, field_validator

from treadle.serve.api.errors import ApiError
from treadle.serve.api.exchange import Usage
from treadle.serve.api.logprobs import CompletionLogprobs, prompt_logprobs
from treadle.serve.api.protocol import Generation, read_body
from treadle.serve.api.service import Service
from treadle.serve.api.streams import Event, Json, Shape, answer
from treadle.serve.request import MAX_LOGPROBS, Completion, Delta, SamplingSettings, TokenLogprob

MAX_PROMPTS = 256
DEFAULT_TOKENS = 16  # OpenAI's


class CompletionBody(Generation):
    """POST /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    max_tokens: int | None = Field(DEFAULT_TOKENS, ge=0)  # 0: only score the prompt
    echo: bool = False

    @field_validator("prompt")
    @classmethod
    def _some(cls, value: Any) -> Any:
        if not value or (isinstance(value, list) and any(one in ("", []) for one in value)):
            raise ValueError("the prompt is empty; give at least one token")
        return value

    @property
    def scores_only(self) -> bool:
        """Whether nothing is to be generated."""
        return self.max_tokens == 0

    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # pyrefly: ignore
        if len(self.prompt) > MAX_PROMPTS:
            raise ApiError(400, f"{len(self.prompt)} prompts in one request; at most {MAX_PROMPTS}", "prompt")
        return list(self.prompt)  # pyrefly: ignore

    def settings(self) -> SamplingSettings:
        if self.scores_only and not self.echo and self.prompt_logprobs is None:
            raise ApiError(
                400,
                "max_tokens is 0, which asks for nothing without echo=true or prompt_logprobs; use 1 or more",
                "max_tokens",
            )
        changes: Json = {"max_tokens": self.max_tokens or 1, "logprobs": self.logprobs}
        if self.scores_only:
            changes["min_tokens"] = 0
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            changes["prompt_logprobs"] = self.logprobs
        return self.sampling(**changes)


class CompletionShape(Shape):
    """text_completion, whole and in chunks."""

    def __init__(self, service: Service, model: str, body: CompletionBody, prompts: Sequence[Sequence[int]]) -> None:
        self.id, self.created, self.model = f"cmpl-{uuid.uuid4().hex}", int(time.time()), model
        self.tokenizer, self.body = service.engine.tokenizer, body
        self._prompts = prompts
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def whole(self, completions: Sequence[Completion], usage: Usage) -> Json:
        choices = [self._choice(index, one) for index, one in enumerate(completions)]
        return self._head(completions[0].weight_version) | {"choices": choices, "usage": self._usage(usage)}

    def chunk(self, delta: Delta) -> Iterable[Event]:
        starts = delta.index not in self._logprobs
        if starts or delta.text or delta.logprobs or delta.finish_reason is not None:
            choice = self._choice(delta.index, delta, starts)
            if choice["text"] or choice["logprobs"] or "prompt_logprobs" in choice or delta.finish_reason is not None:
                # OpenAI: with include_usage every chunk has the field, null in all but the last.
                usage = {"usage": None} if self.body.include_usage else {}
                yield Event(self._head(delta.weight_version) | {"choices": [choice]} | usage)

    def end(self, usage: Usage) -> Iterable[Event]:
        if self.body.include_usage:
            yield Event(self._head() | {"choices": [], "usage": self._usage(usage)})
        yield Event("[DONE]")

    def fail(self, error: ApiError) -> Iterable[Event]:
        yield Event(error.body())
        yield Event("[DONE]")

    def _head(self, version: str = "") -> Json:
        head = {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}
        return head | ({"system_fingerprint": version} if version else {})

    def _usage(self, usage: Usage) -> Json:
        return Usage(usage.prompt_tokens, 0, usage.cached_tokens).body() if self.body.scores_only else usage.body()

    def _choice(self, index: int, given: Completion | Delta, starts: bool = True) -> Json:
        """Return a choice, or a part of one; the part that `starts` it has the prompt, where that is asked for."""
        shown = self._logprobs.setdefault(index, CompletionLogprobs(self.tokenizer))
        text, logprobs = given.text, list[TokenLogprob | None](given.logprobs)
        if self.body.scores_only:  # one token had to be generated, and is not shown
            text, logprobs = "", []
        prompt = self._prompts[index // self.body.n]
        scored = list(given.prompt_logprobs)
        if self.body.echo and starts:
            text = self._prompt_text(index // self.body.n) + text
            if self.body.logprobs is not None:
                logprobs = scored + logprobs
        choice: Json = {
            "index": index,
            "text": text,
            "logprobs": shown.body(logprobs, prompt),
            "finish_reason": "length" if self.body.scores_only and given.finish_reason else given.finish_reason,
        }
        if given.finish_reason is not None:
            choice["stop_reason"] = None if self.body.scores_only else given.stop_reason
        if self.body.prompt_logprobs is not None and scored:
            choice["prompt_logprobs"] = prompt_logprobs(self.tokenizer, scored)
        return choice

    def _prompt_text(self, number: int) -> str:
        prompts = self.body.prompts()
        given = prompts[number]
        if isinstance(given, str):
            return given
        return "" if self.tokenizer is None else self.tokenizer.decode(given, skip_special_tokens=False)


def add_completions(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        body = await read_body(request, CompletionBody)
        name = service.check_model(body.model)
        settings = body.settings()
        prompts = await service.encode(body.prompts())
        exchange = await service.open(prompts, settings, body.format_field(), name)
        shape = CompletionShape(service, name, body, prompts)
        return await answer(request, exchange, shape, service.metrics.watch(), body.stream)
