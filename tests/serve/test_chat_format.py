"""What each family's template takes, and what is said in plain text instead."""

from __future__ import annotations

from typing import Any

import pytest

from tests.model.chat_templates import CHATML, TEMPLATES, make_tokenizers
from treadle.config import UserError
from treadle.model.tokenizer import Tokenizer
from treadle.serve.chat_format import ChatFormat, Opening
from treadle.serve.parsers import AnswerParser, Reasoning, ToolCall

TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells the weather.", "parameters": {"type": "object"}},
}
CALL: Any = {"id": "call_123456", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
ROUND: list[Any] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_123456", "name": "weather", "content": "sunny"},
    {"role": "tool", "tool_call_id": "call_123456", "name": "weather", "content": "and warm"},
]
FAMILIES = {"llama 3.1": "llama3", "mistral tools": "mistral", "qwen 2.5": "hermes", "qwen 3": "hermes"}


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    return make_tokenizers()


def shown(chats: ChatFormat, messages: list[Any], tools: Any = None, **more: Any) -> str:
    return chats.tokenizer.decode(chats.encode(messages, tools, **more), skip_special_tokens=False)


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_every_template_gets_tools_calls_and_results(tokenizers: dict[str, Tokenizer], name: str) -> None:
    """Whatever a template knows of tools, the model is told of them, of its call and of the results, in their order."""
    chats = ChatFormat(tokenizers[name])
    text = shown(chats, ROUND, [TOOL])
    places = [text.index(word) for word in ("Weather?", '"city"', "sunny", "and warm")]
    assert places == sorted(places) and "Tells the weather." in text
    assert name not in FAMILIES or chats.tools.name == FAMILIES[name]
    assert text.count("sunny") == 1 and "Tells the weather." not in shown(chats, ROUND)


def test_a_call_that_is_written_as_text_is_read_as_a_call(tokenizers: dict[str, Tokenizer]) -> None:
    for parser in ("hermes", "llama3", "mistral", "json"):
        chats = ChatFormat(tokenizers["chatml"], parser)
        reader = chats.parser(Opening(None), ["weather"])
        assert isinstance(reader, AnswerParser)
        written = chats.tools.write([ToolCall("weather", '{"city": "Köln"}'), ToolCall("weather", "{}")])
        found = [*reader.push(written), *reader.finish()]
        assert found == [ToolCall("weather", '{"city": "Köln"}'), ToolCall("weather", "{}")]
        assert written[:20] in shown(chats, [ROUND[0], {**ROUND[1], "tool_calls": [CALL, CALL]}])


def test_where_the_tools_are_described(tokenizers: dict[str, Tokenizer]) -> None:
    system = {"role": "system", "content": "Be kind."}
    text = shown(ChatFormat(tokenizers["chatml"]), [system, *ROUND], [TOOL])
    assert text.index("<|im_start|>system") < text.index("Be kind.") < text.index("Tells the weather.")
    assert text.index("Tells the weather.") < text.index("<|im_end|>"), "one system message"
    text = shown(ChatFormat(tokenizers["gemma"]), ROUND, [TOOL])  # knows no system message
    assert text.index("<start_of_turn>user") < text.index("Tells the weather.") < text.index("Weather?")


def test_a_template_that_wants_arguments_as_text(tokenizers: dict[str, Tokenizer]) -> None:
    template = CHATML.replace(
        "message['content'] +",
        "message['content'] + (message.tool_calls[0].function.name + ': ' + message.tool_calls[0].function.arguments "
        "if message.tool_calls else '') +",
    )
    chats = ChatFormat(Tokenizer(tokenizers["chatml"].backend, chat_templates={"default": template}))
    assert chats.calls_as == "text" and 'weather: {"city": ' in shown(chats, ROUND)
    assert ROUND[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Köln"}, "the caller's stay as they were"


def test_mistral_gets_ids_of_nine_characters(tokenizers: dict[str, Tokenizer]) -> None:
    template = TEMPLATES["mistral tools"][0].replace(
        "tool_call.function|tojson", "(tool_call.id ~ tool_call.function.name)"
    )
    chats = ChatFormat(Tokenizer(tokenizers["chatml"].backend, eos_token="</s>", bos_token="<s>",
                                 chat_templates={"default": template}), "mistral")  # fmt: skip
    messages = [ROUND[0], {**ROUND[1], "tool_calls": [{**CALL, "id": "abcdefgh1"}]}, *ROUND[2:]]
    assert "abcdefgh1weather" in shown(chats, messages)
    assert "call_123456" not in shown(chats, ROUND)
    assert len(chats.new_call_id()) == 9 and ChatFormat(tokenizers["qwen 3"]).new_call_id().startswith("call_")


def test_how_an_answer_begins(tokenizers: dict[str, Tokenizer]) -> None:
    chats = ChatFormat(tokenizers["qwen 3"])
    think = Reasoning("<think>", "</think>")
    assert chats.opening(chats.encode(ROUND)) == Opening(think)
    assert chats.opening(chats.encode(ROUND, variables={"enable_thinking": False})) == Opening(None)
    opens = CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}")
    chats = ChatFormat(Tokenizer(tokenizers["chatml"].backend, chat_templates={"default": opens + "{# </think> #}"}))
    assert chats.opening(chats.encode(ROUND)) == Opening(think, open=True)
    assert ChatFormat(tokenizers["chatml"]).reasoning is None
    assert ChatFormat(tokenizers["chatml"], reasoning_parser="qwen3").reasoning == think
    spelled = [{"role": "user", "content": "say <think>"}]
    assert not chats.opening(chats.encode(spelled, add_generation_prompt=False)).open


def test_efforts_and_thinking(tokenizers: dict[str, Tokenizer]) -> None:
    qwen, chatml = ChatFormat(tokenizers["qwen 3"]), ChatFormat(tokenizers["chatml"])
    assert qwen.effort("none") == qwen.thinking(False) == {"enable_thinking": False}
    assert qwen.thinking(True) == {"enable_thinking": True}
    assert chatml.effort("none") == chatml.thinking(False) == {}
    for wrong in (lambda: qwen.effort("high"), lambda: chatml.effort("low"), lambda: chatml.thinking(True)):
        with pytest.raises(UserError):
            wrong()


def test_the_summary_says_how_it_chats(tokenizers: dict[str, Tokenizer]) -> None:
    assert ChatFormat(tokenizers["qwen 2.5"]).notes() == ["tool calls hermes, reasoning none"]
    assert "put into the system message" in ChatFormat(tokenizers["chatml"]).notes()[0]
    assert "no chat template" in ChatFormat(Tokenizer(tokenizers["chatml"].backend)).notes()[0]
