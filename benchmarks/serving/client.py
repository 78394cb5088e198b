"""Asks a server and notes when each piece of the answer arrives.

A plain asynchronous client over sockets, since it shares the machine's cores with the server: what it costs, the server
lacks. Times are those at which bytes are read, before anything is parsed.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from serving.shapes import Ask, Load

LONGEST_HEAD = 1 << 16
AT_ONCE = 4096


class HttpError(Exception):
    """The server answered something else than a stream of events."""


class EventReader:
    """Bytes of an HTTP/1.1 answer in, in any pieces; the data of its server-sent events out."""

    def __init__(self) -> None:
        self.status = 0
        self.finished = False  # everything that belongs to the answer was read
        self._chunked = False
        self._left: int | None = None  # of the chunk, or of a body whose length is known
        self._raw, self._body = b"", b""

    def feed(self, data: bytes) -> list[str]:
        """Return the events that `data` completes. Raises HttpError for an answer that is no stream."""
        self._raw += data
        if not self.status and not self._read_head():
            return []
        while self._take():
            pass
        if self.status != 200:
            if self.finished:
                self.close()
            return []
        *lines, self._body = self._body.split(b"\n")
        texts = (line.strip().decode() for line in lines)
        return [text.removeprefix("data:").strip() for text in texts if text.startswith("data:")]

    def close(self) -> None:
        """Note that the server closed the connection. Raises HttpError where that is not how an answer ends."""
        if self.status and self.status != 200:
            raise HttpError(f"HTTP {self.status}: {' '.join(self._body.decode(errors='replace').split())[:200]}")
        if not self.finished and (self._chunked or self._left or not self.status):
            raise HttpError("the connection was closed within the answer")
        self.finished = True

    def _read_head(self) -> bool:
        head, end, rest = self._raw.partition(b"\r\n\r\n")
        if not end:
            if len(self._raw) > LONGEST_HEAD:
                raise HttpError("the answer does not look like HTTP")
            return False
        lines = head.decode("latin-1").split("\r\n")
        try:
            self.status = int(lines[0].split()[1])
        except (IndexError, ValueError):
            raise HttpError(f"the answer does not look like HTTP: {lines[0][:80]}") from None
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        self._chunked = fields.get("transfer-encoding", "").lower() == "chunked"
        self._left = int(fields["content-length"]) if "content-length" in fields else None
        self._raw = rest
        return True

    def _take(self) -> bool:
        """Move what is at hand of the body on. Returns whether there may be more."""
        if self.finished:
            return False
        if self._chunked and self._left is None:
            line, end, rest = self._raw.partition(b"\r\n")
            if not end:
                return False
            self._raw = rest
            if line:  # the empty line ends the chunk before
                self._left = int(line.split(b";")[0], 16)
                self.finished = self._left == 0
            return True
        count = len(self._raw) if self._left is None else min(self._left, len(self._raw))
        self._body, self._raw = self._body + self._raw[:count], self._raw[count:]
        if self._left is None:
            return False
        self._left -= count
        if self._left == 0:
            self.finished, self._left = not self._chunked, None
        return bool(count) and self._chunked


@dataclass
class Answer:
    """What became of one request. Times are seconds since the run began."""

    due: float  # when it was to be sent
    sent: float = 0.0
    ended: float = 0.0
    pieces: list[float] = field(default_factory=list)  # when each event with text came
    prompt_tokens: int = 0
    tokens: int = 0
    error: str = ""

    @property
    def first(self) -> float:
        """Seconds to the first token, from when the request was due: a late generator must not flatter the server."""
        return self.pieces[0] - self.due

    @property
    def gaps(self) -> Iterator[float]:
        return (after - before for before, after in zip(self.pieces, self.pieces[1:], strict=False))


class Client:
    """Sends requests to one server."""

    def __init__(self, url: str, model: str, api_key: str = "", chat: bool = False, timeout: float = 600.0) -> None:
        self.model, self.chat, self.timeout = model, chat, timeout
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SystemExit(f"'{url}' is not the address of a server, such as http://127.0.0.1:8000")
        self.secure = parts.scheme == "https"
        self.host, self.port = parts.hostname, parts.port or (443 if self.secure else 80)
        path = parts.path.rstrip("/").removesuffix("/v1")
        self.path = path + ("/v1/chat/completions" if chat else "/v1/completions")
        self.key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""

    async def ask(self, ask: Ask, due: float, started: float) -> Answer:
        """Return what became of `ask`; errors are in the answer. `started` is the run's time.perf_counter()."""
        answer = Answer(due)
        try:
            async with asyncio.timeout(self.timeout):
                await self._exchange(ask, answer, started)
        except TimeoutError:
            answer.error = f"no answer within {self.timeout:g} s"
        except (OSError, HttpError, ValueError, KeyError, TypeError) as error:
            answer.error = " ".join(str(error).split())[:200] or type(error).__name__
        answer.ended = time.perf_counter() - started
        if not answer.error and not answer.pieces:
            answer.error = "the stream ended without an answer"
        return answer

    async def _exchange(self, ask: Ask, answer: Answer, started: float) -> None:
        reader, writer = await asyncio.open_connection(self.host, self.port, ssl=self.secure or None)
        try:
            answer.sent = time.perf_counter() - started
            writer.write(self._request(ask))
            events = EventReader()
            while not events.finished:
                data = await reader.read(1 << 16)
                now = time.perf_counter() - started
                if not data:
                    events.close()
                    break
                for event in events.feed(data):
                    if event != "[DONE]":
                        self._note(json.loads(event), answer, now)
        finally:
            writer.close()

    def _request(self, ask: Ask) -> bytes:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": ask.answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.chat:
            body["messages"] = [{"role": "user", "content": ask.prompt}]
        else:
            body["prompt"] = ask.prompt
        content = json.dumps(body).encode()
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n{self.key}Connection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        return head.encode() + content

    def _note(self, event: dict[str, Any], answer: Answer, now: float) -> None:
        if event.get("error"):
            raise HttpError(str(event["error"]))
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            text = choice.get("text") or delta.get("content") or delta.get("reasoning_content")
            # An answer may have no text at all (an end token, half a character): then its end is its first piece.
            if text or (choice.get("finish_reason") and not answer.pieces):
                answer.pieces.append(now)
        if usage := event.get("usage"):
            answer.prompt_tokens, answer.tokens = usage["prompt_tokens"], usage["completion_tokens"]


async def run_load(client: Client, load: Load, asks: list[Ask], due: list[float]) -> tuple[list[Answer], float]:
    """Put a load on a server and return the answers, and how many seconds it took.

    An open loop sends each request when it is due, however many are under way; a closed one has `load.clients` clients
    that send their next one when the last was answered.
    """
    started = time.perf_counter()
    if load.rate:
        gate = asyncio.Semaphore(AT_ONCE)

        async def later(ask: Ask, moment: float) -> Answer:
            await asyncio.sleep(max(0.0, moment - (time.perf_counter() - started)))
            async with gate:
                return await client.ask(ask, moment, started)

        answers = await asyncio.gather(*(later(ask, moment) for ask, moment in zip(asks, due, strict=True)))
        return list(answers), time.perf_counter() - started
    queue, answers = iter(asks), []

    async def one_client() -> None:
        for ask in queue:
            answers.append(await client.ask(ask, time.perf_counter() - started, started))

    await asyncio.gather(*(one_client() for _ in range(load.clients)))
    return answers, time.perf_counter() - started
