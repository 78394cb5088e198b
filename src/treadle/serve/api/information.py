"""What a server tells of itself: its models, its health, its metrics, its tokens."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from treadle.config import Settings, UserError
from treadle.serve.api.chat import ChatFields, Message
from treadle.serve.api.errors import ApiError
from treadle.serve.api.protocol import read_body
from treadle.serve.api.service import Service, is_short
from treadle.serve.api.streams import JsonAnswer
from treadle.serve.model import token_ids


class TokenizeBody(ChatFields):
    """POST /tokenize: a text, or a chat as its template renders it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] = Field(default_factory=list)
    add_special_tokens: bool = True


class DetokenizeBody(Settings):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


def add_information(app: FastAPI, service: Service) -> None:
    engine = service.engine

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [service.describe(name) for name in service.all_names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> JSONResponse:
        return JSONResponse(service.describe(service.check_model(name)))

    @app.get("/health")
    async def health() -> JSONResponse:
        if engine.unhealthy:
            return JSONResponse({"status": "failed", "reason": engine.unhealthy}, 503)
        if engine.asleep:
            return JSONResponse({"status": "asleep", "reason": engine.asleep}, 503)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await read_body(request, TokenizeBody)
        service.check_model(body.model)
        tokenizer = engine.tokenizer
        if tokenizer is None:
            raise ApiError(400, "the model has no tokenizer")
        if (body.prompt is None) == (not body.messages):
            raise ApiError(400, "give either prompt or messages", "prompt")
        if body.prompt is None:
            tokens = await service.encode_chat(
                body.plain_messages(),
                body.plain_tools(),
                body.add_generation_prompt,
                body.chat_template_kwargs,
                body.continue_final_message,
            )
        elif is_short([body.prompt]):
            tokens = tokenizer.encode(body.prompt, body.add_special_tokens)
        else:
            tokens = await asyncio.to_thread(tokenizer.encode, body.prompt, body.add_special_tokens)
        return JsonAnswer({"tokens": tokens, "count": len(tokens), "max_model_len": engine.max_model_len})

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await read_body(request, DetokenizeBody)
        service.check_model(body.model)
        if engine.tokenizer is None:
            raise ApiError(400, "the model has no tokenizer")
        try:
            tokens = token_ids(body.tokens, engine.spec.vocabulary) if body.tokens else []
        except UserError as error:
            raise ApiError(400, str(error), "tokens") from error
        return JsonAnswer({"prompt": engine.tokenizer.decode(tokens, skip_special_tokens=False)})
