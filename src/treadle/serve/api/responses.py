"""POST /v1/responses: OpenAI's responses, of text and functions. Nothing is stored, so each request is complete."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import ConfigDict, Field

from treadle.config import Settings
from treadle.serve.api.chat import MAX_TOOLS, chosen_tools, read_arguments
from treadle.serve.api.errors import ApiError
from treadle.serve.api.protocol import FunctionName, read_body, schema_grammar
from treadle.serve.api.responses_shape import ResponsesShape
from treadle.serve.api.service import ChatAsk, Service
from treadle.serve.api.streams import Json, answer
from treadle.serve.request import MAX_LOGPROBS, Grammar, SamplingFields, SamplingSettings

LOGPROBS = "message.output_text.logprobs"


class Part(Settings):
    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]
    text: str = ""
    refusal: str = ""
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class Item(Settings):
    """A message, a call of a function, its result, or earlier reasoning."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None
    summary: list[Part] | None = None
    encrypted_content: str | None = None


class FunctionTool(Settings):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Settings):
    type: Literal["function"]
    name: str


class AllowedTools(Settings):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedFunction]


class TextFormat(Settings):
    model_config = ConfigDict(validate_by_alias=True)

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: Mapping[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None

    def grammar(self) -> Grammar | None:
        if self.type == "json_schema":
            if self.schema_ is None:
                raise ApiError(400, "text.format of type json_schema needs a schema", "text")
            return schema_grammar(self.schema_)
        return Grammar(kind="json_object") if self.type == "json_object" else None


class TextSettings(Settings):
    format: TextFormat = TextFormat()


class ReasoningSettings(Settings):
    effort: str | None = None
    summary: None = None


class ResponseStreamOptions(Settings):
    include_obfuscation: bool = False


class ResponsesBody(SamplingFields):
    """POST /v1/responses."""

    model: str | None = None
    input: str | list[Item]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    n: Literal[1] = 1
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    tools: list[FunctionTool] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedTools = "auto"
    parallel_tool_calls: bool = True
    text: TextSettings = TextSettings()
    reasoning: ReasoningSettings | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field(default_factory=list)
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    metadata: Mapping[str, str] = Field(default_factory=dict)
    user: str | None = None
    cache_salt: str = Field("", max_length=256)
    chat_template_kwargs: Mapping[str, Any] = Field(default_factory=dict, max_length=64)
    previous_response_id: str | None = None
    conversation: Any = None

    def settings(self) -> SamplingSettings:
        if self.max_tokens is not None:
            raise ApiError(400, "max_tokens is called max_output_tokens here", "max_tokens")
        given = {key: getattr(self, key) for key in SamplingFields.model_fields if key in self.model_fields_set}
        changes: Json = {"max_tokens": self.max_output_tokens, "cache_salt": self.cache_salt}
        changes["grammar"] = self.text.format.grammar()
        if LOGPROBS in self.include or self.top_logprobs:
            changes["logprobs"] = self.top_logprobs or 0
        return SamplingSettings.of(**{**given, **changes})

    def ask(self, service: Service) -> ChatAsk:
        """Return what is asked for. Raises ApiError."""
        for name in ("previous_response_id", "conversation"):
            if getattr(self, name) is not None:
                raise ApiError(
                    400,
                    f"{name} is not supported, as this server stores no responses; send the earlier items as input",
                    name,
                )
        tools, choice = [_plain_tool(tool) for tool in self.tools], self.tool_choice
        required, named = choice == "required", None
        if isinstance(choice, NamedFunction):
            required, named = True, choice.name
        elif isinstance(choice, AllowedTools):
            required = choice.mode == "required"
            tools = [chosen_tools(tools, one.name, none=False)[0] for one in choice.tools]
        if required and not tools:
            raise ApiError(400, "tool_choice wants a tool to be called, but there are no tools", "tool_choice")
        effort = None if self.reasoning is None else self.reasoning.effort
        return ChatAsk(
            self.messages(),
            self.settings(),
            chosen_tools(tools, named, none=choice == "none"),
            required,
            self.parallel_tool_calls and named is None,
            {**self.chat_template_kwargs, **service.effort(effort, "reasoning")},
            format_field="text",
        )

    def messages(self) -> list[Json]:
        """Return the input as chat messages. Raises ApiError naming the item that is wrong."""
        messages: list[Json] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        items = [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        if not items:
            raise ApiError(400, "the input is empty; give at least one message", "input")
        names: dict[str, str] = {}  # of the functions, by the ids of their calls
        thoughts = ""
        for number, item in enumerate(items):
            if item.type == "reasoning":
                thoughts = _text(item.content) or _text(item.summary)
                continue
            if item.type == "function_call_output":
                call = item.call_id or ""
                result = {
                    "role": "tool",
                    "tool_call_id": call,
                    "name": names.get(call, ""),
                    "content": _text(item.output),
                }
                messages.append(result)
            elif item.type == "function_call":
                if not item.name:
                    raise ApiError(400, f"the request: 'input.{number}' is a call without the function's name", "input")
                names[item.call_id or ""] = item.name
                arguments = read_arguments(item.arguments or "", f"input.{number}")
                called: Json = {"id": item.call_id or "", "type": "function"}
                called["function"] = {"name": item.name, "arguments": arguments}
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                messages[-1].setdefault("tool_calls", []).append(called)
            else:
                if item.role is None or item.content is None:
                    raise ApiError(400, f"the request: 'input.{number}' needs a role and content", "input")
                role = "system" if item.role == "developer" else item.role
                messages.append({"role": role, "content": _text(item.content)})
            if thoughts and messages[-1]["role"] == "assistant":
                messages[-1]["reasoning_content"] = thoughts
            thoughts = ""
        return messages


def _text(content: str | list[Part] | None) -> str:
    return content if isinstance(content, str) else "".join(part.text + part.refusal for part in content or ())


def _plain_tool(tool: FunctionTool) -> Json:
    return {"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"type"})}


def add_responses(app: FastAPI, service: Service) -> None:
    @app.post("/v1/responses")
    async def respond(request: Request) -> Response:
        body = await read_body(request, ResponsesBody)
        name = service.check_model(body.model)
        run = await service.chat(body.ask(service), name)
        given = body.model_dump(mode="json", by_alias=True, exclude_unset=True)
        return await answer(request, run.exchange, ResponsesShape(service, name, given, run), run.clock, body.stream)
