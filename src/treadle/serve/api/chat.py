"""POST /v1/chat/completions: OpenAI's chats, with vLLM's additions."""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import ConfigDict, Field, field_validator

from treadle.config import Settings
from treadle.serve.api.errors import ApiError
from treadle.serve.api.exchange import Exchange, Usage
from treadle.serve.api.logprobs import chat_logprobs, prompt_logprobs
from treadle.serve.api.protocol import FunctionName, Generation, read_body, schema_grammar
from treadle.serve.api.service import ChatAsk, ChatRun, Service
from treadle.serve.api.streams import Event, Json, Shape, answer
from treadle.serve.parsers import AnswerParser, Piece, Text, Thought, ToolCall
from treadle.serve.request import MAX_LOGPROBS, Completion, Delta, FinishReason, Grammar, SamplingSettings

MAX_TOOLS = 512


class TextPart(Settings):
    type: Literal["text", "refusal"]
    text: str = ""
    refusal: str = ""


class CalledFunction(Settings):
    name: str
    arguments: str = ""


class Called(Settings):
    """A call that the assistant made earlier."""

    id: str = ""
    type: Literal["function"] = "function"
    index: int | None = None
    function: CalledFunction


class Message(Settings):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[Called] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    # Of the assistant's messages as they were answered: nothing that a template renders.
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class Function(Settings):
    name: FunctionName
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    strict: bool | None = None


class ToolBody(Settings):
    type: Literal["function"]
    function: Function


class NamedFunction(Settings):
    name: str


class NamedTool(Settings):
    type: Literal["function"]
    function: NamedFunction


class JsonSchemaFormat(Settings):
    model_config = ConfigDict(validate_by_alias=True)

    name: str = ""
    description: str | None = None
    schema_: Mapping[str, Any] | bool = Field(True, alias="schema")
    strict: bool | None = None


class ResponseFormat(Settings):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def grammar(self) -> Grammar | None:
        if self.type == "json_schema":
            if self.json_schema is None:
                raise ApiError(400, "response_format of type json_schema needs json_schema.schema", "response_format")
            return schema_grammar(self.json_schema.schema_)
        return Grammar(kind="json_object") if self.type == "json_object" else None


class ChatFields(Settings):
    """What a chat's body shares with /tokenize: all that makes its prompt."""

    messages: list[Message] = Field(min_length=1)
    tools: Annotated[list[ToolBody], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Mapping[str, Any] = Field(default_factory=dict, max_length=64)

    @field_validator("chat_template_kwargs")
    @classmethod
    def _template_variables(cls, value: Mapping[str, Any]) -> Mapping[str, Any]:
        taken = {"tokenizer", "messages", "tools", "add_generation_prompt"} & set(value)
        if taken:
            raise ValueError(f"{', '.join(sorted(taken))} cannot be set here")
        return value

    @field_validator("tools")
    @classmethod
    def _names_differ(cls, value: list[ToolBody]) -> list[ToolBody]:
        names = [tool.function.name for tool in value]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two tools are named '{twice}'")
        return value

    def plain_messages(self) -> list[Json]:
        """Return the messages as chat templates take them. Raises ApiError naming the one that is wrong."""
        plain: list[Json] = []
        names: dict[str, str] = {}  # of the functions, by the ids of their calls
        for number, message in enumerate(self.messages):
            plain.append(_plain(message, number, names))
        return plain

    def plain_tools(self) -> list[Json]:
        return [tool.model_dump(exclude_none=True) for tool in self.tools]


class ChatBody(Generation, ChatFields):
    """POST /v1/chat/completions."""

    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None
    include_reasoning: bool = True
    reasoning_effort: str | None = None

    def _grammars(self) -> dict[str, Grammar | None]:
        form = None if self.response_format is None else self.response_format.grammar()
        return {"response_format": form, **super()._grammars()}

    def settings(self) -> SamplingSettings:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", "top_logprobs")
        if self.max_completion_tokens is not None and self.max_tokens not in (None, self.max_completion_tokens):
            raise ApiError(400, "max_tokens and max_completion_tokens differ; give one of them", "max_tokens")
        if self.prompt_logprobs is not None and self.stream:
            raise ApiError(400, "prompt_logprobs of a chat are not streamed; leave stream out", "prompt_logprobs")
        changes: Json = {}
        if self.max_completion_tokens is not None:
            changes["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            changes["logprobs"] = self.top_logprobs or 0
        return self.sampling(**changes)

    def ask(self, service: Service) -> ChatAsk:
        """Return what is asked for. Raises ApiError."""
        tools, choice = self.plain_tools(), self.tool_choice
        named = choice.function.name if isinstance(choice, NamedTool) else None
        if (named is not None or choice == "required") and not tools:
            raise ApiError(400, "tool_choice wants a tool to be called, but there are no tools", "tool_choice")
        return ChatAsk(
            self.plain_messages(),
            self.settings(),
            chosen_tools(tools, named, none=choice == "none"),
            required=named is not None or choice == "required",
            parallel=self.parallel_tool_calls and named is None,
            variables={**self.chat_template_kwargs, **service.effort(self.reasoning_effort, "reasoning_effort")},
            format_field=self.format_field(),
            add_generation_prompt=self.add_generation_prompt,
            continue_final=self.continue_final_message,
        )


def chosen_tools(tools: list[Json], named: str | None, none: bool) -> list[Json]:
    """Return the tools that may be called. Raises ApiError where the one that is named is not there."""
    if none:
        return []
    if named is None:
        return tools
    found = [tool for tool in tools if tool["function"]["name"] == named]
    if not found:
        raise ApiError(400, f"tool_choice names '{named}', which is not among the tools", "tool_choice")
    return found


def _plain(message: Message, number: int, names: dict[str, str]) -> Json:
    where = f"messages.{number}"
    if message.content is None and message.role != "assistant":
        raise ApiError(400, f"the request: '{where}' has no content", "messages")
    content = message.content or ""
    if not isinstance(content, str):
        content = "".join(part.text + part.refusal for part in content)
    # Templates know `developer` under its older name.
    plain: Json = {"role": "system" if message.role == "developer" else message.role, "content": content}
    if message.name:
        plain["name"] = message.name
    if thinking := message.reasoning_content or message.reasoning:
        plain["reasoning_content"] = thinking
    if message.tool_calls:
        if message.role != "assistant":
            raise ApiError(
                400, f"the request: '{where}' has tool_calls, but only the assistant calls tools", "messages"
            )
        plain["tool_calls"] = [
            _plain_call(call, f"{where}.tool_calls.{i}") for i, call in enumerate(message.tool_calls)
        ]
        names.update((call.id, call.function.name) for call in message.tool_calls)
    if message.role == "tool":
        plain["tool_call_id"] = message.tool_call_id or ""
        plain.setdefault("name", names.get(message.tool_call_id or "", ""))
    return plain


def _plain_call(call: Called, where: str) -> Json:
    function = {"name": call.function.name, "arguments": read_arguments(call.function.arguments, where)}
    return {"id": call.id, "type": "function", "function": function}


def read_arguments(text: str, where: str) -> Json:
    """Return the object that a call's arguments spell ("" for none). Raises ApiError."""
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ApiError(400, f"the request: '{where}.function.arguments' is not the text of a JSON object", "messages")
    return arguments


class ChoiceParser:
    """One choice's answer taken apart; without a parser all of it is text."""

    def __init__(self, parser: AnswerParser | None) -> None:
        self._parser = parser
        self.calls = 0
        self.numbers = itertools.count()  # of the calls that were shown

    def pieces(self, text: str, last: bool) -> list[Piece]:
        """Return the parts that became certain with `text`."""
        if self._parser is None:
            return [Text(text)] if text else []
        found = self._parser.push(text) + (self._parser.finish() if last else [])
        self.calls += sum(isinstance(piece, ToolCall) for piece in found)
        return found

    def reason(self, ended: FinishReason | None) -> str | None:
        """Return why the choice ended, in OpenAI's words."""
        return "tool_calls" if ended is FinishReason.STOP and self.calls else ended


class ChatShape(Shape):
    """chat.completion and chat.completion.chunk."""

    def __init__(self, service: Service, model: str, body: ChatBody, run: ChatRun) -> None:
        self.id, self.created, self.model = f"chatcmpl-{uuid.uuid4().hex}", int(time.time()), model
        self.tokenizer, self.chats = service.engine.tokenizer, service.chats
        self.include_usage, self.include_reasoning = body.include_usage, body.include_reasoning
        self._run = run
        self._choices: dict[int, ChoiceParser] = {}

    def whole(self, completions: Sequence[Completion], usage: Usage) -> Json:
        first = completions[0]
        body = self._head("chat.completion", first.weight_version) | {
            "choices": [self._whole_choice(index, one) for index, one in enumerate(completions)],
            "usage": usage.body(),
        }
        if first.prompt_logprobs:
            body["prompt_logprobs"] = prompt_logprobs(self.tokenizer, first.prompt_logprobs)
        return body

    def begin(self, exchange: Exchange) -> Iterable[Event]:
        for index in range(exchange.choices):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def chunk(self, delta: Delta) -> Iterable[Event]:
        if delta.index not in self._choices:
            self._choices[delta.index] = ChoiceParser(self._run.parser())
        choice = self._choices[delta.index]
        last = delta.finish_reason is not None
        deltas = [self._delta(choice, piece) for piece in choice.pieces(delta.text, last)]
        deltas = [one for one in deltas if one]
        if not deltas and (delta.logprobs or last):
            deltas = [{}]
        for place, one in enumerate(deltas):
            ends = last and place == len(deltas) - 1
            more: Json = {"stop_reason": delta.stop_reason} if ends else {}
            yield self._chunk(
                delta.index,
                one,
                chat_logprobs(self.tokenizer, () if place else delta.logprobs),
                choice.reason(delta.finish_reason) if ends else None,
                more,
                delta.weight_version,
            )

    def end(self, usage: Usage) -> Iterable[Event]:
        if self.include_usage:
            yield Event(self._head("chat.completion.chunk") | {"choices": [], "usage": usage.body()})
        yield Event("[DONE]")

    def fail(self, error: ApiError) -> Iterable[Event]:
        yield Event(error.body())
        yield Event("[DONE]")

    def _head(self, kind: str, version: str = "") -> Json:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return head | ({"system_fingerprint": version} if version else {})

    def _chunk(
        self,
        index: int,
        delta: Json,
        logprobs: Json | None = None,
        reason: str | None = None,
        more: Json | None = None,
        version: str = "",
    ) -> Event:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason, **(more or {})}
        # OpenAI: with include_usage every chunk has the field, null in all but the last.
        usage = {"usage": None} if self.include_usage else {}
        return Event(self._head("chat.completion.chunk", version) | {"choices": [choice]} | usage)

    def _delta(self, choice: ChoiceParser, piece: Piece) -> Json:
        if isinstance(piece, Text):
            return {"content": piece.text}
        if isinstance(piece, Thought):
            return {"reasoning_content": piece.text} if self.include_reasoning else {}
        return {"tool_calls": [{"index": next(choice.numbers), **self._call(piece)}]}

    def _call(self, call: ToolCall) -> Json:
        assert self.chats is not None
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": self.chats.new_call_id(), "type": "function", "function": function}

    def _whole_choice(self, index: int, completion: Completion) -> Json:
        choice = ChoiceParser(self._run.parser())
        pieces = choice.pieces(completion.text, last=True)
        calls = [self._call(piece) for piece in pieces if isinstance(piece, ToolCall)]
        text = "".join(piece.text for piece in pieces if isinstance(piece, Text))
        message: Json = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        thoughts = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
        if thoughts and self.include_reasoning:
            message["reasoning_content"] = thoughts
        if calls:
            message["tool_calls"] = calls
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(self.tokenizer, completion.logprobs),
            "finish_reason": choice.reason(completion.finish_reason),
            "stop_reason": completion.stop_reason,
        }


def add_chat(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await read_body(request, ChatBody)
        name = service.check_model(body.model)
        run = await service.chat(body.ask(service), name)
        return await answer(request, run.exchange, ChatShape(service, name, body, run), run.clock, body.stream)
