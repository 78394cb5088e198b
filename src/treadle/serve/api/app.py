"""The FastAPI application: routes, streaming, the key, what a request may cost."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from treadle.config import TreadleError, UserError
from treadle.model.chat import encode_chat
from treadle.serve.api.errors import ApiError, as_api_error, handle_errors
from treadle.serve.api.exchange import Exchange
from treadle.serve.api.metrics import RequestClock, ServerMetrics
from treadle.serve.api.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, read_body
from treadle.serve.api.protocol import Message as ChatMessage
from treadle.serve.api.responses import ChatShape, CompletionShape, Shape, failed
from treadle.serve.interface import EngineInterface
from treadle.serve.model import token_ids
from treadle.serve.request import SamplingSettings

MAX_WAITING = 1024
# The paths that metrics tell apart; others could be anything.
PATHS = frozenset("/v1/chat/completions /v1/completions /v1/models /tokenize /detokenize /health /metrics".split())


class Server:
    """What the routes share."""

    def __init__(self, engine: EngineInterface, names: Sequence[str]) -> None:
        self.engine, self.names = engine, list(names)
        self.metrics = ServerMetrics(engine)
        self.started = int(time.time())

    def check_model(self, name: str | None) -> str:
        """Return the model's name for the answer. Raises ApiError (404) for one that is not served."""
        if name is not None and name not in self.names:
            known = ", ".join(self.names)
            raise ApiError(404, f"the model '{name}' is not served here, only {known}", "model", "model_not_found")
        return name or self.names[0]

    def describe(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.started,
            "owned_by": "treadle",
            "max_model_len": self.engine.max_model_len,
        }

    async def encode_messages(
        self, messages: Sequence[ChatMessage], add_generation_prompt: bool, **variables: Any
    ) -> list[int]:
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise ApiError(400, "the model has no tokenizer; use /v1/completions with token ids", "messages")
        plain = [message.plain() for message in messages]
        self.engine.check_length(sum(len(message["content"]) for message in plain))
        return await asyncio.to_thread(
            encode_chat, tokenizer, plain, add_generation_prompt=add_generation_prompt, **variables
        )

    def open(self, prompts: Sequence[Sequence[int]], settings: SamplingSettings) -> Exchange:
        """Hand the prompts to the engine. Raises ApiError where it refuses them or too many wait already."""
        if self.engine.failure:
            raise ApiError(503, self.engine.failure)
        if len(prompts) * settings.n > MAX_WAITING:
            raise ApiError(400, f"{len(prompts) * settings.n} answers in one request; at most {MAX_WAITING}", "n")
        if self.engine.stats.waiting + len(prompts) * settings.n > MAX_WAITING:
            raise ApiError(503, f"{self.engine.stats.waiting} requests wait already; try again later")
        try:
            return Exchange(self.engine, prompts, settings)
        except TreadleError as error:
            raise as_api_error(error) from error

    async def answer(self, request: Request, exchange: Exchange, shape: Shape, stream: bool) -> Response:
        """Return the answer of a request that was handed to the engine."""
        clock = self.metrics.watch()
        if stream:
            return EventStream(exchange, shape, clock)
        watcher = asyncio.create_task(exchange.cancel_on_disconnect(request.receive))
        try:
            completions = await exchange.completions(clock.see)
        finally:
            exchange.cancel()
            watcher.cancel()
        if error := failed(completions):
            raise ApiError(500, error)
        return JSONResponse(shape.whole(completions, exchange.usage.body()))


class EventStream(Response):
    """Server-sent events. The exchange is cancelled when the client goes, or when anything else ends the answer."""

    media_type = "text/event-stream"

    def __init__(self, exchange: Exchange, shape: Shape, clock: RequestClock) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.exchange, self.shape, self.clock = exchange, shape, clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self.exchange.cancel_on_disconnect(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in self._events():
                data = event if isinstance(event, str) else json.dumps(event, ensure_ascii=False, separators=(",", ":"))
                await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self.exchange.cancel()
            watcher.cancel()

    async def _events(self) -> AsyncIterator[dict[str, Any] | str]:
        for index in range(self.exchange.choices):
            if (first := self.shape.first(index)) is not None:
                yield first
        async for delta in self.exchange.deltas():
            self.clock.see(delta)
            if delta.error is not None:
                yield ApiError(500, delta.error).body()
                yield "[DONE]"
                return
            if (chunk := self.shape.chunk(delta)) is not None:
                yield chunk
        if self.shape.include_usage:
            yield self.shape.usage_chunk(self.exchange.usage.body())
        yield "[DONE]"


class Gate:
    """Checks the key of every request but /health, and counts the answers."""

    def __init__(self, app: ASGIApp, key: str | None, server: Server) -> None:
        self.app, self.key, self.server = app, key, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in PATHS else "other"
                self.server.metrics.responses.labels(path, message["status"]).inc()
            await send(message)

        if self.key is not None and scope["path"] != "/health" and not self._has_key(scope):
            error = ApiError(
                401, "the API key is missing or wrong; send it as Authorization: Bearer KEY", None, "invalid_api_key"
            )
            await error.response()(scope, receive, counted)
            return
        await self.app(scope, receive, counted)

    def _has_key(self, scope: Scope) -> bool:
        assert self.key is not None
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self.key.encode())


def create_app(engine: EngineInterface, names: Sequence[str], api_key: str | None = None) -> FastAPI:
    """Return the application that serves `engine` under `names`. It does not close the engine."""
    server = Server(engine, names)
    app = FastAPI(title="Treadle", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Gate, key=api_key, server=server)
    handle_errors(app)
    _add_generation(app, server)
    _add_information(app, server)
    return app


def _add_generation(app: FastAPI, server: Server) -> None:
    engine = server.engine

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await read_body(request, ChatBody)
        name = server.check_model(body.model)
        settings = body.settings()
        prompt = await server.encode_messages(body.messages, body.add_generation_prompt, **body.chat_template_kwargs)
        exchange = server.open([prompt], settings)
        shape = ChatShape(name, engine.tokenizer, body.include_usage)
        return await server.answer(request, exchange, shape, body.stream)

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        body = await read_body(request, CompletionBody)
        name = server.check_model(body.model)
        settings = body.settings()
        prompts = await asyncio.to_thread(lambda: [engine.encode(prompt) for prompt in body.prompts()])
        exchange = server.open(prompts, settings)
        shape = CompletionShape(name, engine.tokenizer, body.include_usage)
        return await server.answer(request, exchange, shape, body.stream)


def _add_information(app: FastAPI, server: Server) -> None:
    engine = server.engine

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [server.describe(name) for name in server.names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> JSONResponse:
        return JSONResponse(server.describe(server.check_model(name)))

    @app.get("/health")
    async def health() -> JSONResponse:
        if engine.failure:
            return JSONResponse({"status": "failed", "reason": engine.failure}, 503)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(server.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.post("/tokenize")
    async def tokenize(request: Request) -> JSONResponse:
        body = await read_body(request, TokenizeBody)
        server.check_model(body.model)
        tokenizer = engine.tokenizer
        if tokenizer is None:
            raise ApiError(400, "the model has no tokenizer")
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", "prompt")
        if body.prompt is None:
            tokens = await server.encode_messages(body.messages or [], body.add_generation_prompt)
        else:
            tokens = await asyncio.to_thread(tokenizer.encode, body.prompt, body.add_special_tokens)
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": engine.max_model_len})

    @app.post("/detokenize")
    async def detokenize(request: Request) -> JSONResponse:
        body = await read_body(request, DetokenizeBody)
        server.check_model(body.model)
        if engine.tokenizer is None:
            raise ApiError(400, "the model has no tokenizer")
        try:
            tokens = token_ids(body.tokens, engine.spec.vocabulary) if body.tokens else []
        except UserError as error:
            raise ApiError(400, str(error), "tokens") from error
        text = engine.tokenizer.decode(tokens, skip_special_tokens=False)
        return JSONResponse({"prompt": text})
