"""What a client asked for, and the life of its request: waiting, running, finished, in that order only."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from treadle.config import Settings
from treadle.config.settings import parse_settings

MAX_LOGPROBS = 20
StopText = Annotated[str, StringConstraints(min_length=1, max_length=1024)]


class SamplingFields(Settings):
    """How tokens are chosen and when a request ends. The names and defaults are those of OpenAI's and vLLM's APIs."""

    max_tokens: int | None = Field(None, ge=1)  # None: up to the end of the context
    min_tokens: int = Field(0, ge=0)
    temperature: float = Field(1.0, ge=0, le=100, allow_inf_nan=False)  # 0: always the likeliest token
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)  # 0 and -1: off
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=100, allow_inf_nan=False)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: Mapping[int, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict, max_length=1024)
    stop: tuple[StopText, ...] = Field((), max_length=64)
    stop_token_ids: tuple[int, ...] = Field((), max_length=1024)
    ignore_eos: bool = False
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 64)
    n: int = Field(1, ge=1, le=128)
    skip_special_tokens: bool = True
    priority: int = Field(0, ge=-1000, le=1000)  # lower runs earlier

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else () if value is None else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        return self


class Grammar(Settings):
    """What an answer must look like: its tokens are chosen among those that keep it possible."""

    kind: Literal["json_schema", "json_object", "regex", "grammar", "choice", "tools"]
    text: str = Field("", max_length=1 << 20)  # the schema (JSON), expression, grammar (Lark), or choices (JSON list)
    # A reasoning block may come first: text up to `reasoning_end`. It is open already, or begins with `reasoning_start`.
    reasoning_start: str = Field("", max_length=64)
    reasoning_end: str = Field("", max_length=64)


class SamplingSettings(SamplingFields):
    """The sampling fields and what the HTTP interfaces ask for under other names."""

    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)  # likely tokens to report beside the chosen one
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)  # the same for the prompt's own tokens
    grammar: Grammar | None = None
    adapter: str = ""  # the name of a loaded LoRA adapter, "" for the model as it is
    cache_salt: str = Field("", max_length=256)  # prefixes are shared only between requests of the same salt

    @classmethod
    def of(cls, settings: SamplingSettings | None = None, **changes: Any) -> SamplingSettings:
        """Return `settings` (default: all defaults) with `changes`. Raises UserError naming what is not allowed."""
        base = {} if settings is None else settings.model_dump(exclude_unset=True)
        return parse_settings(cls, {**base, **changes}, source="the sampling settings")


class Phase(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    """Why a request ended. `stop` and `length` are OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True)
class TokenLogprob:
    """A chosen token with its log probability (before temperature and penalties), and the likeliest ones beside it."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Delta:
    """What a request gave since the last one. The delta that has a `finish_reason` is the last."""

    index: int  # which of the request's n choices
    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or token that ended it
    error: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # tokens of the prompt that were still in the cache


@dataclass
class Completion:
    """One finished answer; `str()` of it is its text."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_tokens: int = 0
    error: str | None = None

    def __str__(self) -> str:
        return self.text

    def add(self, delta: Delta) -> None:
        """Append what `delta` brought."""
        self.text += delta.text
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.prompt_tokens = delta.prompt_tokens
        self.finish_reason, self.stop_reason, self.error = delta.finish_reason, delta.stop_reason, delta.error


_numbers = itertools.count(1)


class Request:
    """One sequence on its way through the engine. Only the engine's thread changes it, except for `cancelled`."""

    def __init__(
        self,
        prompt: Sequence[int],
        settings: SamplingSettings,
        max_tokens: int,
        seed: int,
        stop_ids: frozenset[int],
        deliver: Callable[[Delta], None],
        index: int = 0,
    ) -> None:
        """`max_tokens` is resolved against the context, `stop_ids` holds the model's end tokens where they count."""
        self.number = next(_numbers)
        self.index = index
        self.tokens = list(prompt)
        self.prompt_tokens = len(self.tokens)
        self.settings, self.max_tokens, self.seed, self.stop_ids = settings, max_tokens, seed, stop_ids
        self.deliver = deliver
        self.phase = Phase.WAITING
        self.slot: int | None = None
        self.computed = 0  # tokens whose keys and values are in the cache
        self.cached_tokens = 0
        self.cancelled = False

    @property
    def completion_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def reserve(self) -> int:
        """The most cache tokens that this request can come to need."""
        return self.prompt_tokens + self.max_tokens

    def start(self, slot: int, computed: int) -> None:
        """Begin to run in cache slot `slot`, which already holds the first `computed` tokens."""
        assert self.phase is Phase.WAITING and computed < len(self.tokens)
        self.phase, self.slot, self.computed, self.cached_tokens = Phase.RUNNING, slot, computed, computed

    def finish(self) -> None:
        """End, from any phase but the last."""
        assert self.phase is not Phase.FINISHED
        self.phase = Phase.FINISHED
