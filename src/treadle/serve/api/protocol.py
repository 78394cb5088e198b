"""What the requests of OpenAI's shape have in common. What is not understood is refused by name, never ignored."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from fastapi import Request
from pydantic import ConfigDict, Field, StringConstraints, ValidationError, model_validator
from pydantic_core import from_json

from treadle.config import Settings, UserError, parse_settings
from treadle.serve.api.errors import ApiError
from treadle.serve.request import MAX_LOGPROBS, Grammar, SamplingFields, SamplingSettings

MAX_BODY_BYTES = 8 << 20
LARGE_BODY_BYTES = 1 << 16  # larger ones are read in another thread, so that streams are not held up

# Bookkeeping of the client: it changes nothing about the answer.
HARMLESS = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention "
    "prompt_cache_options".split()
)
# Fields that this server does not have, with the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "verbosity": (),
    "web_search_options": (),
    "moderation": (),
    "best_of": (1,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "include_stop_str_in_output": (False,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "chat_template": (),
    "documents": ([],),
    "lora_request": (),
}


class StreamOptions(Settings):
    include_usage: bool = False
    include_obfuscation: bool = False  # padding against traffic analysis: accepted, never sent


class StructuredOutputs(Settings):
    """vLLM's `structured_outputs`: exactly one of these."""

    model_config = ConfigDict(validate_by_alias=True)

    schema_: Mapping[str, Any] | bool | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool = False


class Generation(SamplingFields):
    """The fields of chats and completions."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    cache_salt: str = Field("", max_length=256)
    structured_outputs: StructuredOutputs | None = None
    guided_json: Mapping[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

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
        extra: dict[str, Any] = {
            "prompt_logprobs": self.prompt_logprobs,
            "cache_salt": self.cache_salt,
            "grammar": self.grammar(),
        }
        return SamplingSettings.of(**{**given, **extra, **changes})

    def grammar(self) -> Grammar | None:
        """Return what the answer must look like. Raises ApiError where two things are asked for."""
        found = {name: value for name, value in self._grammars().items() if value is not None}
        if len(found) > 1:
            names = " and ".join(found)
            raise ApiError(
                400, f"{names} both say what the answer must look like; give one of them", self.format_field()
            )
        return next(iter(found.values()), None)

    def format_field(self) -> str:
        """Return the name of the field that says what the answer must look like, or ""."""
        return next((name.partition(".")[0] for name, value in self._grammars().items() if value is not None), "")

    def _grammars(self) -> dict[str, Grammar | None]:
        """Return by the names of the fields what each asks for."""
        one = self.structured_outputs or StructuredOutputs()
        return {
            "structured_outputs.json": schema_grammar(one.schema_),
            "structured_outputs.regex": text_grammar("regex", one.regex),
            "structured_outputs.choice": choice_grammar(one.choice),
            "structured_outputs.grammar": text_grammar("grammar", one.grammar),
            "structured_outputs.json_object": Grammar(kind="json_object") if one.json_object else None,
            "guided_json": schema_grammar(self.guided_json),
            "guided_regex": text_grammar("regex", self.guided_regex),
            "guided_choice": choice_grammar(self.guided_choice),
            "guided_grammar": text_grammar("grammar", self.guided_grammar),
        }


def schema_grammar(schema: Mapping[str, Any] | bool | str | None) -> Grammar | None:
    """Return the grammar of a JSON schema, which vLLM also takes as text."""
    if schema is None:
        return None
    return text_grammar("json_schema", schema if isinstance(schema, str) else json.dumps(schema))


def choice_grammar(choices: list[str] | None) -> Grammar | None:
    return None if choices is None else text_grammar("choice", json.dumps(choices))


def text_grammar(
    kind: Literal["json_schema", "regex", "grammar", "choice", "tools"], text: str | None
) -> Grammar | None:
    """Return the grammar of that text. Raises UserError where it is too long."""
    return None if text is None else parse_settings(Grammar, {"kind": kind, "text": text}, source="the grammar")


FunctionName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]

B = TypeVar("B", bound=Settings)


async def read_body(request: Request, kind: type[B]) -> B:
    """Return the request's JSON body as `kind`. Raises ApiError naming the field that is wrong or not supported."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the body must be JSON; send the header Content-Type: application/json")
    limit: int = request.app.state.max_body_bytes
    too_large = ApiError(413, f"the body is larger than the {limit} bytes that this server takes")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    content = bytearray()
    async for piece in request.stream():
        content += piece
        if len(content) > limit:
            raise too_large
    if len(content) > LARGE_BODY_BYTES:
        return await asyncio.to_thread(_parse, bytes(content), kind)
    return _parse(bytes(content), kind)


def _parse(content: bytes, kind: type[B]) -> B:
    try:
        tree = from_json(content, allow_inf_nan=False)
    except ValueError as error:
        if "surrogate" in str(error) or _has_lone_surrogates(content):
            raise ApiError(
                400,
                f"the body spells half a character, a lone surrogate such as \\ud800 ({error}); send whole characters",
            ) from error
        raise ApiError(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(tree, dict):
        raise ApiError(400, "the body must be a JSON object")
    return parse_body(tree, kind)


def _has_lone_surrogates(content: bytes) -> bool:
    """Whether the body is valid JSON but for a \\ud800 without its other half."""
    try:
        text = json.dumps(json.loads(content), ensure_ascii=False)
    except (ValueError, RecursionError):
        return False
    return any("\ud800" <= character <= "\udfff" for character in text)


def parse_body(tree: Mapping[str, Any], kind: type[B]) -> B:
    """Return a decoded body as `kind`; null means absent. Raises ApiError."""
    fields = {}
    for key, value in tree.items():
        if value is None or (key in HARMLESS and key not in kind.model_fields):
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
