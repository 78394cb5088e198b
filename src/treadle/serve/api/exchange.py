"""One HTTP request's dealings with the engine: its prompts go in together, their deltas come out mixed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

from starlette.types import Receive

from treadle.serve.interface import EngineInterface, Ticket
from treadle.serve.request import Completion, Delta, SamplingSettings


@dataclass
class Usage:
    """The tokens that an exchange took."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def body(self) -> dict[str, object]:
        """Return them as OpenAI's chats and completions report them."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Exchange:
    """Prompts x choices, numbered as OpenAI does: all choices of the first prompt, then those of the second."""

    def __init__(self, engine: EngineInterface, prompts: Sequence[Sequence[int]], settings: SamplingSettings) -> None:
        """Submit. Raises UserError, TreadleError as Engine.submit does; then none of the prompts runs."""
        self.choices = len(prompts) * settings.n
        self.usage = Usage(prompt_tokens=sum(len(prompt) for prompt in prompts))
        self._settings = settings
        self._arrived: asyncio.Queue[tuple[Delta, float]] = asyncio.Queue()
        self._begun = time.monotonic()
        # From the beginning until the delta that was yielded last was there; a client that reads slowly adds nothing.
        self.seconds = 0.0
        self._loop = asyncio.get_running_loop()
        self._tickets: list[Ticket] = []
        try:
            for number, prompt in enumerate(prompts):
                self._tickets.append(engine.submit(prompt, settings, self._receiver(number * settings.n)))
        except Exception:
            self.cancel()
            raise

    def _receiver(self, first: int) -> Callable[[Delta], None]:
        def deliver(delta: Delta) -> None:
            came = replace(delta, index=first + delta.index), time.monotonic()
            self._loop.call_soon_threadsafe(self._arrived.put_nowait, came)

        return deliver

    async def deltas(self, patience: float | None = None) -> AsyncIterator[Delta | None]:
        """Yield each delta; the last of each choice has a finish reason.

        Where nothing came for `patience` seconds, None is yielded.
        """
        left = self.choices
        while left:
            try:
                async with asyncio.timeout(patience):
                    delta, now = await self._arrived.get()
            except TimeoutError:
                yield None
                continue
            self.seconds = now - self._begun
            self.usage.completion_tokens += len(delta.tokens)
            if delta.finish_reason is not None:
                left -= 1
                if delta.index % self._settings.n == 0:
                    self.usage.cached_tokens += delta.cached_tokens
            yield delta

    async def completions(self, see: Callable[[Delta, float], None]) -> list[Completion]:
        """Return every choice once all have ended; `see` is shown each delta, and after how many seconds it came."""
        found = [Completion() for _ in range(self.choices)]
        async for delta in self.deltas():
            assert delta is not None
            see(delta, self.seconds)
            found[delta.index].add(delta)
        return found

    def cancel(self) -> None:
        """End what still runs."""
        for ticket in self._tickets:
            ticket.cancel()

    async def cancel_on_disconnect(self, receive: Receive) -> None:
        """Wait until the client has gone, then cancel. The request's body must have been read."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.cancel()
