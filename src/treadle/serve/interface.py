"""What clients of an engine see, whether it runs in this process (engine.py) or in others (client.py)."""

from __future__ import annotations

import asyncio
import functools
import itertools
import queue
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from treadle.config import TreadleError, UserError
from treadle.model.spec import ModelSpec
from treadle.serve.model import encode_prompt
from treadle.serve.request import Completion, Delta, Request, SamplingSettings
from treadle.serve.stats import EngineStats
from treadle.serve.versions import unknown_adapter

if TYPE_CHECKING:
    from treadle.model.tokenizer import Tokenizer
    from treadle.serve.capacity import Capacity
    from treadle.serve.structured import Matcher


class Ticket(ABC):
    """A submitted prompt: its sequences (one a choice), which can be cancelled together."""

    prompt_tokens: int

    @abstractmethod
    def cancel(self) -> None:
        """End what still runs; harmless afterwards. Its last delta has the finish reason `cancelled`."""


@dataclass(frozen=True)
class Prepared:
    """A prompt that was checked and can be handed to the engine's thread."""

    tokens: list[int]
    settings: SamplingSettings
    max_tokens: int
    stop_ids: frozenset[int]
    embeds: bool = False


class EngineInterface(ABC):
    """Serves one model to any number of threads and event loops. Close it, or use it in a `with` block."""

    capacity: Capacity
    summary: list[str] = []  # what it said at its start, one fact a line

    def __init__(self, tokenizer: Tokenizer | None, spec: ModelSpec, max_model_len: int) -> None:
        self.tokenizer, self.spec, self.max_model_len = tokenizer, spec, max_model_len

    @property
    @abstractmethod
    def stats(self) -> EngineStats:
        """What was counted since the start."""

    @property
    def engine_stats(self) -> Sequence[EngineStats]:
        """What each engine counted, where there are several."""
        return [self.stats]

    @property
    @abstractmethod
    def weight_version(self) -> str:
        """The name of the weights that new requests get."""

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the LoRA adapters that requests may ask for."""
        return ()

    @property
    def asleep(self) -> str:
        """Why requests are refused while it sleeps, or ""."""
        return ""

    @property
    @abstractmethod
    def pending(self) -> int:
        """How many prompts were handed over that the engine has not begun with."""

    @property
    @abstractmethod
    def failure(self) -> str:
        """Why the engine takes no requests any more, or ""."""

    @property
    @abstractmethod
    def unhealthy(self) -> str:
        """Why the engine makes no steps although it should, or ""."""

    @abstractmethod
    def hand_over(self, prepared: Prepared, deliver: Callable[[Delta], None]) -> Ticket:
        """Queue what was prepared. Raises TreadleError once the engine is closing or has failed."""

    @abstractmethod
    def command(self, name: str, /, **arguments: Any) -> Any:
        """Carry out one of `COMMANDS` (see commands.py) and return its result. Blocks.

        Raises UserError for what cannot be carried out, TreadleError where the engine failed.
        """

    @abstractmethod
    def close(self, timeout: float = 0.0) -> None:
        """Refuse new requests, let those at hand finish for up to `timeout` seconds, end the rest."""

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- checking

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the prompt's token ids. Raises UserError where there are none, or one is not in the vocabulary."""
        if isinstance(prompt, str):
            self.check_length(len(prompt))
        return encode_prompt(self.tokenizer, self.spec.vocabulary, prompt)

    def check_length(self, characters: int) -> None:
        """Raise UserError where a text of so many characters cannot fit the context, without tokenizing it."""
        if self.tokenizer is not None and characters > self.max_model_len * self._longest_token:
            raise UserError(
                f"the prompt has {characters} characters, more than fit the context of {self.max_model_len} tokens; "
                "shorten it"
            )

    @functools.cached_property
    def _longest_token(self) -> int:
        return 1 if self.tokenizer is None else max(map(len, self.tokenizer.backend.get_vocab()), default=1)

    def prepare(self, prompt: str | Sequence[int], settings: SamplingSettings) -> Prepared:
        """Return a prompt ready to be handed over. Raises UserError for what cannot be carried out."""
        if settings.adapter and settings.adapter not in self.adapters:
            raise UserError(unknown_adapter(settings.adapter, self.adapters))
        tokens = self.encode(prompt)
        max_tokens = self._resolve_max_tokens(len(tokens), settings)
        self._check_ids("logit_bias", settings.logit_bias)
        self._check_ids("stop_token_ids", settings.stop_token_ids)
        if settings.stop and self.tokenizer is None:
            raise UserError("the model has no tokenizer, so stop strings cannot be found; use stop_token_ids")
        self.matcher(settings)  # an impossible grammar is refused before the request is admitted
        ends = () if settings.ignore_eos or self.tokenizer is None else self.tokenizer.eos_ids
        return Prepared(tokens, settings, max_tokens, frozenset((*settings.stop_token_ids, *ends)))

    def matcher(self, settings: SamplingSettings, checked: bool = False) -> Matcher | None:
        """Return a matcher at the beginning of the settings' grammar, which is known to be good where it is `checked`.

        Raises UserError for an impossible one.
        """
        if settings.grammar is None:
            return None
        from treadle.serve.structured import compile_grammar

        if self.tokenizer is None:
            raise UserError("the model has no tokenizer, so its answers cannot follow a grammar")
        return compile_grammar(settings.grammar, self.tokenizer, self.spec.vocabulary, checked)

    def _resolve_max_tokens(self, prompt_tokens: int, settings: SamplingSettings) -> int:
        room = self.max_model_len - prompt_tokens
        if room < 1:
            raise UserError(
                f"the prompt has {prompt_tokens} tokens, but the context holds {self.max_model_len} with the answer; "
                "shorten it"
            )
        wanted = room if settings.max_tokens is None else settings.max_tokens
        if wanted > room:
            raise UserError(
                f"the prompt's {prompt_tokens} tokens and max_tokens={wanted} exceed the context of "
                f"{self.max_model_len} tokens; ask for at most {room}"
            )
        if settings.min_tokens > wanted:
            raise UserError(f"min_tokens={settings.min_tokens} is more than the {wanted} tokens that may be made")
        return wanted

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        vocabulary = self.spec.vocabulary
        for token in ids:
            if not 0 <= token < vocabulary:
                raise UserError(f"{name}: {token} is not a token id; they lie in 0 to {vocabulary - 1}")

    # --- asking

    def submit(
        self, prompt: str | Sequence[int], settings: SamplingSettings, deliver: Callable[[Delta], None]
    ) -> Ticket:
        """Queue a prompt; `deliver` is called in another thread with each delta and must not block.

        Raises UserError for what cannot be carried out, TreadleError once the engine is closing or has failed.
        """
        return self.hand_over(self.prepare(prompt, settings), deliver)

    def generate(
        self, prompts: Sequence[str | Sequence[int]] | str, settings: SamplingSettings | None = None, **sampling: Any
    ) -> list[Completion]:
        """Return the completions of `prompts`, in their order (with n > 1: n for each). Blocks.

        Raises UserError for what cannot be carried out, TreadleError where the engine failed.
        """
        chosen = SamplingSettings.of(settings, **sampling)
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        if prompts and isinstance(prompts[0], int):
            raise UserError("generate takes a list of prompts; put the token ids of one prompt into a list")
        deltas: queue.SimpleQueue[tuple[int, Delta]] = queue.SimpleQueue()
        completions = [Completion() for _ in range(len(prompts) * chosen.n)]
        tickets: list[Ticket] = []
        try:
            for first, prompt in zip(itertools.count(step=chosen.n), prompts, strict=False):
                tickets.append(self.submit(prompt, chosen, lambda delta, first=first: deltas.put((first, delta))))
            left = len(completions)
            while left:
                first, delta = deltas.get()
                completions[first + delta.index].add(delta)
                raise_if_failed(delta)
                left -= delta.finish_reason is not None
        finally:
            for ticket in tickets:
                ticket.cancel()
        return completions

    def deltas(
        self, prompt: str | Sequence[int], settings: SamplingSettings | None = None, **sampling: Any
    ) -> Iterator[Delta]:
        """Yield what a prompt gives as it comes, as `stream` does, for a caller that may block."""
        chosen = SamplingSettings.of(settings, **sampling)
        arrived: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        ticket = self.submit(prompt, chosen, arrived.put)
        try:
            left = chosen.n
            while left:
                delta = arrived.get()
                raise_if_failed(delta)
                yield delta
                left -= delta.finish_reason is not None
        finally:
            ticket.cancel()

    def stream(
        self, prompt: str | Sequence[int], settings: SamplingSettings | None = None, **sampling: Any
    ) -> AsyncIterator[Delta]:
        """Return an asynchronous iterator over what a prompt gives as it comes, the deltas of n choices mixed.

        Leaving the loop cancels the request. Raises UserError for what cannot be carried out, and while iterating
        TreadleError where the engine failed.
        """
        chosen = SamplingSettings.of(settings, **sampling)
        return self._arriving(self.prepare(prompt, chosen))

    async def embed(self, prompt: str | Sequence[int]) -> tuple[list[float], int]:
        """Return the prompt's embedding (the last token's hidden state, its length scaled to 1) and its token count.

        Raises UserError where the prompt cannot be computed, TreadleError where the engine failed.
        """
        tokens = self.encode(prompt)
        if len(tokens) > self.max_model_len:
            raise UserError(f"the input has {len(tokens)} tokens, but the context holds {self.max_model_len}")
        prepared = Prepared(tokens, SamplingSettings(), 0, frozenset(), embeds=True)
        embedding: tuple[float, ...] = ()
        async for delta in self._arriving(prepared):
            embedding = delta.embedding
        return list(embedding), len(tokens)

    def _arriving(self, prepared: Prepared) -> AsyncIterator[Delta]:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Delta] = asyncio.Queue()

        def deliver(delta: Delta) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, delta)

        ticket = self.hand_over(prepared, deliver)

        async def deltas() -> AsyncIterator[Delta]:
            try:
                left = prepared.settings.n
                while left:
                    delta = await arrived.get()
                    raise_if_failed(delta)
                    yield delta
                    left -= delta.finish_reason is not None
            finally:
                ticket.cancel()

        return deltas()


def raise_if_failed(delta: Delta) -> None:
    """Raise what a request failed of."""
    if delta.error is not None:
        raise TreadleError(delta.error)


def make_requests(prepared: Prepared, seed: int, deliver: Callable[[Delta], None]) -> list[Request]:
    """Return the sequences of a prompt, one for each choice; `seed` where the settings have none."""
    from treadle.serve.sampler import derive_seed

    chosen = seed if prepared.settings.seed is None else prepared.settings.seed
    requests: list[Request] = []
    for index in range(prepared.settings.n):
        requests.append(
            Request(
                prepared.tokens,
                prepared.settings,
                prepared.max_tokens,
                derive_seed(chosen, index),
                prepared.stop_ids,
                deliver,
                index,
                requests[0] if requests else None,
                prepared.embeds,
            )
        )
    return requests
