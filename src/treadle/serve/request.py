"""What a client asked for, and the life of its request: waiting, running, perhaps waiting again, finished."""

from __future__ import annotations

import enum
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from treadle.config import Settings
from treadle.config.settings import parse_settings
from treadle.serve.scheduler import urgency

if TYPE_CHECKING:
    from treadle.serve.block_tables import SequenceBlocks
    from treadle.serve.speculation import Drafter
    from treadle.serve.structured import Matcher

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
    text: str = Field("", max_length=1 << 20)  # schema (JSON), expression, grammar (Lark), choices (JSON), tools
    # A reasoning block may come first: it is open already, or begins with `reasoning_start`; it ends with the other.
    reasoning_start: str = Field("", max_length=64)
    reasoning_end: str = Field("", max_length=64)


class SamplingSettings(SamplingFields):
    """The sampling fields and what the HTTP interfaces ask for under other names."""

    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)  # likely tokens to report beside the chosen one
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)  # the same for the prompt's own tokens
    grammar: Grammar | None = None
    adapter: str = ""  # the name of a loaded LoRA adapter, "" for the model as it is
    shown_tokens: tuple[int, ...] = ()  # special tokens that belong to the text where the others are skipped
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
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()  # with the first token; None for the prompt's first
    embedding: tuple[float, ...] = ()  # of a request for one: the only thing that it gives
    queue_seconds: float = 0.0  # until it first ran
    weight_version: str = ""  # of the weights that made this


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
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    embedding: tuple[float, ...] = ()
    weight_version: str = ""

    def __str__(self) -> str:
        return self.text

    def add(self, delta: Delta) -> None:
        """Append what `delta` brought."""
        self.text += delta.text
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.prompt_tokens, self.cached_tokens = delta.prompt_tokens, delta.cached_tokens
        self.prompt_logprobs += delta.prompt_logprobs
        self.embedding = delta.embedding or self.embedding
        self.weight_version = delta.weight_version
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
        leader: Request | None = None,
        embeds: bool = False,
    ) -> None:
        """`max_tokens` is resolved against the context, `stop_ids` holds the model's end tokens where they count.

        `leader` is another choice of the same prompt: once it is computed, this one begins with its blocks.
        """
        self.number = next(_numbers)
        self.index = index
        self.tokens = list(prompt)
        self.prompt_tokens = len(self.tokens)
        self.settings, self.max_tokens, self.seed, self.stop_ids = settings, max_tokens, seed, stop_ids
        self.deliver, self.leader, self.embeds = deliver, leader, embeds
        self.phase = Phase.WAITING
        self.arrived = time.monotonic()
        self.urgency = urgency(self.arrived, settings.priority)
        self.started: float | None = None  # when it first ran
        self.blocks: SequenceBlocks | None = None
        self.computed = 0  # tokens whose keys and values are in the cache
        self.rope_length = 0  # how long the sequence was when those were computed
        self.cached_tokens = 0
        self.preemptions = 0
        self.cancelled = False
        self.weights, self.version = 0, ""  # the number and the name of the weights that it is computed with
        self.adapter = 0  # the slot of its adapter
        self.matcher: Matcher | None = None
        self.drafter: Drafter | None = None
        self.drafts: list[int] = []
        self.prompt_logprobs: list[TokenLogprob | None] = [None]

    @property
    def completion_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def prompt_done(self) -> bool:
        """Whether the whole prompt is in the cache."""
        return self.computed >= self.prompt_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.settings.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_tokens

    def start(self, computed: int) -> None:
        """Begin to run with the first `computed` tokens in the cache."""
        assert self.phase is Phase.WAITING and computed < len(self.tokens)
        if self.started is None:
            self.started, self.cached_tokens = time.monotonic(), computed
        self.phase, self.computed = Phase.RUNNING, computed

    @property
    def first(self) -> Request:
        """The first choice of the same prompt."""
        return self.leader or self

    def preempt(self) -> None:
        """Wait again, with nothing in the cache; the tokens so far stay."""
        assert self.phase is Phase.RUNNING
        self.phase, self.computed, self.drafts = Phase.WAITING, 0, []
        self.preemptions += 1

    def begin_again(self) -> None:
        """Forget what other weights said of the prompt, unless it was told already."""
        if not self.completion_tokens:
            self.cached_tokens = 0
            self.prompt_logprobs = [None]

    def finish(self) -> None:
        """End, from any phase but the last."""
        assert self.phase is not Phase.FINISHED
        self.phase = Phase.FINISHED
