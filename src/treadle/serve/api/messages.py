"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's messages, of text and tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import Field

from treadle.config import Settings, UserError
from treadle.serve.api.chat import MAX_TOOLS, chosen_tools
from treadle.serve.api.errors import ApiError, as_api_error
from treadle.serve.api.messages_shape import MessagesShape
from treadle.serve.api.protocol import FunctionName, read_body, schema_grammar
from treadle.serve.api.service import ChatAsk, Service
from treadle.serve.api.streams import Json, JsonAnswer, answer
from treadle.serve.request import SamplingSettings, StopText


class Block(Settings):
    """A part of a message: text, a call of a tool, its result, or earlier thinking."""

    type: Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str | None = None
    citations: list[Any] | None = None
    id: str | None = None
    name: str | None = None
    input: Mapping[str, Any] | None = None
    caller: Any = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool = False
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    cache_control: Any = None  # prefixes are cached whatever it says


class AnthropicMessage(Settings):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class AnthropicTool(Settings):
    name: FunctionName
    input_schema: Mapping[str, Any]
    description: str = ""
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = None
    input_examples: list[Any] | None = None


class ToolChoice(Settings):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Settings):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(None, ge=1)  # an aim; what bounds an answer is max_tokens
    display: str | None = None


class OutputFormat(Settings):
    type: Literal["json_schema"]
    schema_: Mapping[str, Any] | bool = Field(alias="schema")


class OutputConfig(Settings):
    format: OutputFormat | None = None
    effort: str | None = None


class PromptBody(Settings):
    """What a message's prompt is made of: also all that counting its tokens needs."""

    model: str | None = None
    messages: list[AnthropicMessage] = Field(min_length=1)
    system: str | list[Block] = ""
    tools: list[AnthropicTool] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: ToolChoice = ToolChoice(type="auto")
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    cache_control: Any = None

    def plain_messages(self) -> list[Json]:
        """Return the messages in OpenAI's form. Raises ApiError naming the one that is wrong."""
        system = self.system if isinstance(self.system, str) else "".join(block.text or "" for block in self.system)
        plain: list[Json] = [{"role": "system", "content": system}] if system else []
        names: dict[str, str] = {}  # of the tools, by the ids of their calls
        for number, message in enumerate(self.messages):
            plain += _plain(message, f"messages.{number}", names)
        return plain

    def plain_tools(self) -> list[Json]:
        """Return the tools that may be called, in OpenAI's form. Raises ApiError."""
        tools = []
        for tool in self.tools:
            function: Json = {"name": tool.name, "description": tool.description, "parameters": dict(tool.input_schema)}
            tools.append({"type": "function", "function": function | ({"strict": True} if tool.strict else {})})
        if self.tool_choice.type == "tool" and self.tool_choice.name is None:
            raise ApiError(400, "tool_choice of type tool needs the tool's name", "tool_choice")
        named = self.tool_choice.name if self.tool_choice.type == "tool" else None
        return chosen_tools(tools, named, none=self.tool_choice.type == "none")

    def variables(self, service: Service) -> Json:
        """Return the template's variables. Raises ApiError for a model that does not reason as it is asked to."""
        found = service.effort(self.output_config.effort, "output_config")
        if self.thinking is not None and service.chats is not None:
            try:
                found |= service.chats.thinking(self.thinking.type != "disabled")
            except UserError as error:
                raise as_api_error(error, "thinking") from error
        return found

    def continues(self) -> bool:
        """Whether the last message is the beginning of the answer."""
        return self.messages[-1].role == "assistant"


class MessagesBody(PromptBody):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1)
    stop_sequences: tuple[StopText, ...] = Field((), max_length=64)
    temperature: float = Field(1.0, ge=0, le=1, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    stream: bool = False
    metadata: Any = None
    service_tier: Any = None

    def ask(self, service: Service) -> ChatAsk:
        """Return what is asked for. Raises ApiError."""
        form = self.output_config.format
        settings = SamplingSettings.of(
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            grammar=None if form is None else schema_grammar(form.schema_),
        )
        tools, choice = self.plain_tools(), self.tool_choice
        required = choice.type in ("any", "tool")
        if required and not tools:
            raise ApiError(400, "tool_choice wants a tool to be called, but there are no tools", "tool_choice")
        return ChatAsk(
            self.plain_messages(),
            settings,
            tools,
            required,
            parallel=not choice.disable_parallel_tool_use and choice.type != "tool",
            variables=self.variables(service),
            format_field="output_config",
            continue_final=self.continues(),
        )


def _plain(message: AnthropicMessage, where: str, names: dict[str, str]) -> list[Json]:
    """Return a message as OpenAI's: results of tools are messages of their own there, before what else is said."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    before: list[Json] = []
    plain: Json = {"role": message.role, "content": ""}
    said = False
    for number, block in enumerate(message.content):
        if block.type == "tool_result":
            if message.role != "user":
                raise ApiError(
                    400, f"{where}.content.{number}: a tool_result belongs to the user's messages", "messages"
                )
            result = block.tool_use_id or ""
            content = ("Error: " if block.is_error else "") + _text(block.content)
            before.append({"role": "tool", "tool_call_id": result, "name": names.get(result, ""), "content": content})
        elif block.type == "tool_use":
            if message.role != "assistant" or not block.name:
                raise ApiError(
                    400, f"{where}.content.{number}: a tool_use belongs to the assistant and names its tool", "messages"
                )
            names[block.id or ""] = block.name
            call: Json = {"id": block.id or "", "type": "function"}
            call["function"] = {"name": block.name, "arguments": dict(block.input or {})}
            plain.setdefault("tool_calls", []).append(call)
        elif block.type == "thinking":
            plain["reasoning_content"] = plain.get("reasoning_content", "") + (block.thinking or "")
        elif block.type == "text":
            said = True
            plain["content"] += block.text or ""
    return before + ([plain] if said or not before or len(plain) > 2 else [])


def _text(content: str | list[Block] | None) -> str:
    return content if isinstance(content, str) else "".join(block.text or "" for block in content or ())


def add_messages(app: FastAPI, service: Service) -> None:
    @app.post("/v1/messages")
    async def message(request: Request) -> Response:
        body = await read_body(request, MessagesBody)
        name = service.check_model(body.model)
        run = await service.chat(body.ask(service), name)
        return await answer(request, run.exchange, MessagesShape(service, name, run), run.clock, body.stream)

    @app.post("/v1/messages/count_tokens")
    async def count(request: Request) -> Response:
        body = await read_body(request, PromptBody)
        service.check_model(body.model)
        tokens = await service.encode_chat(
            body.plain_messages(),
            body.plain_tools(),
            variables=body.variables(service),
            continue_final=body.continues(),
        )
        return JsonAnswer({"input_tokens": len(tokens)})
