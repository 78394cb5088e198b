"""The requests: OpenAI's fields and vLLM's additions. What is not understood is refused by name, never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self, TypeVar

from fastapi import Request
from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_core import from_json

from treadle.config import Settings, UserError, parse_settings
from treadle.serve.api.errors import ApiError
from treadle.serve.request import MAX_LOGPROBS, SamplingFields, SamplingSettings

MAX_BODY_BYTES = 32 << 20
MAX_PROMPTS = 256

# Bookkeeping of the client: it changes nothing about the answer.
HARMLESS = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention "
    "parallel_tool_calls".split()
)
# Fields that this server does not have, with the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "moderation": (),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "prompt_logprobs": (),
    "include_stop_str_in_output": (False,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "continue_final_message": (False,),
    "chat_template": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "documents": ([],),
    "lora_request": (),
}


class StreamOptions(Settings):
    include_usage: bool = False
    include_obfuscation: bool = False  # padding against traffic analysis: accepted, never sent


class TextPart(Settings):
    type: Literal["text"]
    text: str


class Message(Settings):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """Return the message as chat templates take it; they know `developer` under its older name `system`."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content} | ({"name": self.name} if self.name else {})


class _Generation(SamplingFields):
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream=true")
        return self

    def sampling(self, **changes: Any) -> SamplingSettings:
        given = {key: getattr(self, key) for key in SamplingFields.model_fields if key in self.model_fields_set}
        return SamplingSettings.of(**{**given, **changes})


class ChatBody(_Generation):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool = True
    chat_template_kwargs: Mapping[str, Any] = Field(default_factory=dict, max_length=64)

    @field_validator("chat_template_kwargs")
    @classmethod
    def _template_variables(cls, value: Mapping[str, Any]) -> Mapping[str, Any]:
        taken = {"tokenizer", "messages", "tools", "add_generation_prompt"} & set(value)
        if taken:
            raise ValueError(f"{', '.join(sorted(taken))} cannot be set here")
        return value

    def settings(self) -> SamplingSettings:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", "top_logprobs")
        if self.max_completion_tokens is not None and self.max_tokens not in (None, self.max_completion_tokens):
            raise ApiError(400, "max_tokens and max_completion_tokens differ; give one of them", "max_tokens")
        changes: dict[str, Any] = {}
        if self.max_completion_tokens is not None:
            changes["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            changes["logprobs"] = self.top_logprobs or 0
        return self.sampling(**changes)


class CompletionBody(_Generation):
    """POST /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @field_validator("prompt")
    @classmethod
    def _some(cls, value: Any) -> Any:
        if not value:
            raise ValueError("the prompt is empty; give at least one token")
        return value

    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # pyrefly: ignore
        if len(self.prompt) > MAX_PROMPTS:
            raise ApiError(400, f"{len(self.prompt)} prompts in one request; at most {MAX_PROMPTS}", "prompt")
        return list(self.prompt)  # pyrefly: ignore

    def settings(self) -> SamplingSettings:
        """Completions end after 16 tokens unless told otherwise, as OpenAI's do."""
        return self.sampling(max_tokens=self.max_tokens or 16, logprobs=self.logprobs)


class TokenizeBody(Settings):
    """POST /tokenize: a text, or messages as the chat template renders them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeBody(Settings):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


B = TypeVar("B", bound=Settings)


async def read_body(request: Request, kind: type[B]) -> B:
    """Return the request's JSON body as `kind`. Raises ApiError naming the field that is wrong or not supported."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the body must be JSON; send the header Content-Type: application/json")
    content = bytearray()
    async for piece in request.stream():
        content += piece
        if len(content) > MAX_BODY_BYTES:
            raise ApiError(413, f"the body is larger than {MAX_BODY_BYTES >> 20} MiB")
    try:
        tree = from_json(bytes(content), allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(tree, dict):
        raise ApiError(400, "the body must be a JSON object")
    return parse_body(tree, kind)


def parse_body(tree: Mapping[str, Any], kind: type[B]) -> B:
    """Return a decoded body as `kind`; null means absent. Raises ApiError."""
    fields = {}
    for key, value in tree.items():
        if value is None or key in HARMLESS:
            continue
        if key in UNSUPPORTED and key not in kind.model_fields:
            if value in UNSUPPORTED[key]:
                continue
            raise ApiError(400, f"'{key}' is not supported by this server; leave it out", key, "unsupported_parameter")
        fields[key] = value
    try:
        return parse_settings(kind, fields, source="the request")
    except UserError as error:
        cause = error.__cause__
        where = cause.errors()[0]["loc"] if isinstance(cause, ValidationError) else ()
        raise ApiError(400, str(error), str(where[0]) if where else None) from error
