"""Server-sent events: what every API's answers go through, streamed or whole."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from treadle.serve.api.errors import ApiError
from treadle.serve.api.exchange import Exchange, Usage
from treadle.serve.api.metrics import RequestClock
from treadle.serve.request import Completion, Delta, FinishReason

Json = dict[str, Any]
R = TypeVar("R")
# Proxies and clients give up on a connection that is silent; a long prompt or a tool call can take this long.
SECONDS_OF_SILENCE = 15.0


class Event(NamedTuple):
    """One server-sent event: its data (text as it is, else JSON), and its name in the APIs that name them."""

    data: Json | str
    name: str = ""

    def encode(self) -> bytes:
        head = f"event: {self.name}\n" if self.name else ""
        data = self.data if isinstance(self.data, str) else None
        return f"{head}data: ".encode() + (dumps(self.data) if data is None else data.encode()) + b"\n\n"


def dumps(value: Any) -> bytes:
    """Return compact JSON in UTF-8; half a character, which UTF-8 cannot hold, is escaped."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


class JsonAnswer(Response):
    """A JSON body, written as in streams."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content)


class Shape(ABC):
    """How an API writes an answer, whole or in events. One object serves one answer."""

    @abstractmethod
    def whole(self, completions: Sequence[Completion], usage: Usage) -> Json:
        """Return the body of an answer that is not streamed."""

    def begin(self, exchange: Exchange) -> Iterable[Event]:
        """Return the events before the first delta."""
        return ()

    @abstractmethod
    def chunk(self, delta: Delta) -> Iterable[Event]:
        """Return the events of a delta."""

    def end(self, usage: Usage) -> Iterable[Event]:
        """Return the events after the last delta."""
        return ()

    @abstractmethod
    def fail(self, error: ApiError) -> Iterable[Event]:
        """Return the events that end a stream which an error has cut off."""

    def silence(self) -> bytes:
        """Return what keeps a connection alive that has nothing to say."""
        return b": still at work\n\n"


class EventStream(Response):
    """A streamed answer. The exchange is cancelled when the client goes, or when anything else ends the answer."""

    media_type = "text/event-stream"

    def __init__(self, exchange: Exchange, shape: Shape, clock: RequestClock) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.exchange, self.shape, self.clock = exchange, shape, clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self.exchange.cancel_on_disconnect(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for part in self._parts():
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self.exchange.cancel()
            watcher.cancel()

    async def _parts(self) -> AsyncIterator[bytes]:
        for event in self.shape.begin(self.exchange):
            yield event.encode()
        async for delta in self.exchange.deltas(SECONDS_OF_SILENCE):
            if delta is None:
                yield self.shape.silence()
                continue
            self.clock.see(delta, self.exchange.seconds)
            if why := failure(delta):
                for event in self.shape.fail(ApiError(500, why)):
                    yield event.encode()
                return
            if part := b"".join(event.encode() for event in self.shape.chunk(delta)):
                yield part
        for event in self.shape.end(self.exchange.usage):
            yield event.encode()


def failure(ended: Delta | Completion) -> str:
    """Return why a choice failed, or ""."""
    if ended.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED):
        return ended.error or "the request was cancelled"
    return ""


async def while_connected(request: Request, work: Sequence[Coroutine[Any, Any, R]]) -> list[R]:
    """Return the results of `work`; where a part fails, or the client goes, all of it is cancelled.

    The request's body must have been read. Raises ApiError once the client has gone, which nobody hears.
    """

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.create_task(one) for one in work]
    results, watcher = asyncio.gather(*tasks), asyncio.create_task(gone())
    try:
        await asyncio.wait([results, watcher], return_when=asyncio.FIRST_COMPLETED)
        if not results.done():
            raise ApiError(499, "the client has gone")
        return await results
    finally:
        for task in (results, watcher, *tasks):
            task.cancel()


async def answer(request: Request, exchange: Exchange, shape: Shape, clock: RequestClock, stream: bool) -> Response:
    """Return the answer of a request that was handed to the engine. Raises ApiError where it failed."""
    if stream:
        return EventStream(exchange, shape, clock)
    watcher = asyncio.create_task(exchange.cancel_on_disconnect(request.receive))
    try:
        completions = await exchange.completions(clock.see)
    finally:
        exchange.cancel()
        watcher.cancel()
    for completion in completions:
        if why := failure(completion):
            raise ApiError(500, why)
    return JsonAnswer(shape.whole(completions, exchange.usage))
