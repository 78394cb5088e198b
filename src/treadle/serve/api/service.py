"""What the routes share: the engine, the model's names and its chats, and the way of a request into the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from treadle.config import TreadleError, UserError
from treadle.serve.api.errors import ApiError, as_api_error
from treadle.serve.api.exchange import Exchange
from treadle.serve.api.metrics import RequestClock, ServerMetrics
from treadle.serve.chat_format import ChatFormat, Opening
from treadle.serve.grammars import tools_text
from treadle.serve.interface import EngineInterface
from treadle.serve.parsers import AnswerParser
from treadle.serve.parsers.tools import Tool
from treadle.serve.request import Grammar, SamplingSettings

MAX_WAITING = 1024
SHORT_PROMPT = 2048  # characters or tokens that are encoded sooner than another thread would take over
Json = dict[str, Any]


def is_short(prompts: Sequence[str | list[int]]) -> bool:
    """Whether encoding the prompts would hold up nothing."""
    return sum(map(len, prompts)) <= SHORT_PROMPT


@dataclass(frozen=True)
class ChatAsk:
    """A chat that any of the APIs was asked for."""

    messages: Sequence[Json]  # in OpenAI's form, the arguments of calls as objects
    settings: SamplingSettings  # its grammar: that of a text; calls of tools may come instead
    tools: Sequence[Json] = ()  # in OpenAI's form; none where none may be called
    required: bool = False  # whether a tool must be called
    parallel: bool = True
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the chat template
    format_field: str = ""  # of the request, that the settings' grammar comes from
    add_generation_prompt: bool = True
    continue_final: bool = False  # go on with the last message, which is the assistant's


@dataclass(frozen=True)
class ChatRun:
    """A chat that was handed to the engine."""

    exchange: Exchange
    clock: RequestClock
    parser: Callable[[], AnswerParser | None]  # a new one for each choice; None: the answer is text


class Service:
    """What the routes share."""

    def __init__(
        self, engine: EngineInterface, names: Sequence[str], tool_parser: str = "auto", reasoning_parser: str = "auto"
    ) -> None:
        """Raises UserError for a parser that there is not, or an adapter that has the model's name."""
        for name in names:
            if name in engine.adapters:
                raise UserError(f"the model and an adapter are both called '{name}'; give one of them another name")
        self.engine, self.names = engine, list(names)
        self.metrics = ServerMetrics(engine, self.names[0])
        self.started = int(time.time())
        tokenizer = engine.tokenizer
        self.chats = None if tokenizer is None else ChatFormat(tokenizer, tool_parser, reasoning_parser)

    @property
    def all_names(self) -> list[str]:
        """What a request may call for: the model by each of its names, and its adapters by theirs."""
        return [*self.names, *(name for name in self.engine.adapters if name not in self.names)]

    def check_model(self, name: str | None) -> str:
        """Return the model's name for the answer. Raises ApiError (404) for one that is not served."""
        if name is not None and name not in self.all_names:
            known = ", ".join(self.all_names)
            raise ApiError(404, f"the model '{name}' is not served here, only {known}", "model", "model_not_found")
        return name or self.names[0]

    def describe(self, name: str) -> Json:
        """Return a served model as OpenAI's lists show it."""
        return {
            "id": name,
            "object": "model",
            "created": self.started,
            "owned_by": "treadle",
            "max_model_len": self.engine.max_model_len,
        } | ({} if name in self.names else {"parent": self.names[0]})

    async def encode(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """Return the ids of prompts. Raises UserError for one that is empty, too long, or not of this model."""

        def encode() -> list[list[int]]:
            return [self.engine.encode(prompt) for prompt in prompts]

        return encode() if is_short(prompts) else await asyncio.to_thread(encode)

    async def encode_chat(
        self,
        messages: Sequence[Json],
        tools: Sequence[Json] = (),
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        continue_final: bool = False,
    ) -> list[int]:
        """Return the ids of a chat. Raises ApiError where the model does not chat, UserError for what it refuses."""
        chats = self.chats
        if chats is None:
            raise ApiError(400, "the model has no tokenizer; use /v1/completions with token ids", "messages")
        self.engine.check_length(sum(len(message.get("content") or "") for message in messages))
        try:
            return await asyncio.to_thread(
                chats.encode, messages, tools, add_generation_prompt, variables, continue_final
            )
        except UserError as error:
            raise as_api_error(error, "messages") from error

    def effort(self, effort: str | None, param: str) -> Json:
        """Return the template's variables for an effort of reasoning. Raises ApiError where it knows none."""
        try:
            return {} if effort is None or self.chats is None else self.chats.effort(effort)
        except UserError as error:
            raise as_api_error(error, param) from error

    async def open(
        self, prompts: Sequence[Sequence[int]], settings: SamplingSettings, param: str = "", model: str = ""
    ) -> Exchange:
        """Hand the prompts to the engine. Raises ApiError where it refuses them or too many wait already.

        `param` is the field that a grammar comes from, `model` what was asked for: the name of an adapter, or another.
        """
        if self.engine.failure or self.engine.asleep:
            raise ApiError(503, self.engine.failure or self.engine.asleep)
        if model and model not in self.names:
            settings = SamplingSettings.of(settings, adapter=model)
        choices, waiting = len(prompts) * settings.n, self.engine.stats.waiting
        if choices > MAX_WAITING:
            raise ApiError(400, f"{choices} answers in one request; at most {MAX_WAITING}", "n")
        if waiting + choices > MAX_WAITING:
            raise ApiError(503, f"{waiting} requests wait already; try again later")
        if settings.grammar is not None:
            try:  # compiling may take long: not in the event loop
                await asyncio.to_thread(self.engine.matcher, settings)
            except UserError as error:
                raise as_api_error(error, param or None) from error
        try:
            return Exchange(self.engine, prompts, settings)
        except TreadleError as error:
            raise as_api_error(error) from error

    async def chat(self, ask: ChatAsk, model: str = "") -> ChatRun:
        """Hand a chat to the engine, for the model or adapter of that name. Raises ApiError."""
        prompt = await self.encode_chat(
            ask.messages, ask.tools, ask.add_generation_prompt, ask.variables, ask.continue_final
        )
        chats = self.chats
        assert chats is not None
        opening = Opening(None) if ask.continue_final else chats.opening(prompt)
        shown = chats.shown_tokens(opening, bool(ask.tools))
        changes: Json = {"shown_tokens": shown} if shown else {}
        grammar = _grammar(chats, ask)
        if grammar is not None:
            changes["grammar"] = _after_reasoning(grammar, opening)
        param = "tools" if grammar is not None and grammar.kind == "tools" else ask.format_field
        exchange = await self.open([prompt], SamplingSettings.of(ask.settings, **changes), param, model)
        names = [tool["function"]["name"] for tool in ask.tools]
        return ChatRun(exchange, self.metrics.watch(), lambda: chats.parser(opening, names))


def _grammar(chats: ChatFormat, ask: ChatAsk) -> Grammar | None:
    """Return the grammar of an answer that may call tools: where it must, or where a call has to keep to something."""
    if not ask.tools:
        return ask.settings.grammar
    functions = [tool["function"] for tool in ask.tools]
    tools = [Tool(one["name"], one.get("parameters"), bool(one.get("strict"))) for one in functions]
    text = ask.settings.grammar
    if not ask.required and ask.parallel and text is None and not any(tool.strict for tool in tools):
        return None
    if ask.required and text is not None:
        raise ApiError(400, "the answer must call a tool, so it cannot also keep to a format; ask for one of the two")
    written = tools_text(tools, chats.tools.name, ask.required, ask.parallel, text)
    if len(written) > 1 << 20:
        raise ApiError(400, "the tools' schemas are larger than 1 MiB; shorten them", "tools")
    return Grammar(kind="tools", text=written)


def _after_reasoning(grammar: Grammar, opening: Opening) -> Grammar:
    """Return the grammar behind the reasoning that the answer may begin with."""
    if opening.reasoning is None:
        return grammar
    start = "" if opening.open else opening.reasoning.start
    return grammar.model_copy(update={"reasoning_start": start, "reasoning_end": opening.reasoning.end})
