"""Chats of several turns: what the model is shown, what is forgotten, what is saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serve.tiny import build, model_spec
from treadle.config import UserError
from treadle.model.chat import encode_chat
from treadle.model.tokenizer import Tokenizer
from treadle.serve.conversation import Conversation, check_chat_template
from treadle.serve.engine import Engine
from treadle.serve.model import Model
from treadle.serve.request import SamplingSettings

EngineOf = Callable[..., Engine]
GREEDY = SamplingSettings(temperature=0, ignore_eos=True, max_tokens=6)


def texts(conversation: Conversation, message: str) -> str:
    return "".join(delta.text for delta in conversation.ask(message))


def test_each_turn_shows_the_model_the_whole_conversation(engine_of: EngineOf, tokenizer: Tokenizer) -> None:
    engine = engine_of(max_num_seqs=1, enable_prefix_caching=True)
    conversation = Conversation(engine, GREEDY, system="brief")
    expected: list[dict[str, str]] = [{"role": "system", "content": "brief"}]
    for message in ("def", "read"):
        expected.append({"role": "user", "content": message})
        tokens = encode_chat(tokenizer, expected, add_generation_prompt=True)
        alone = engine_of().generate([tokens], GREEDY)[0].text
        assert texts(conversation, message) == alone
        expected.append({"role": "assistant", "content": alone})
        assert conversation.messages == expected
    assert engine.stats.cached_tokens > 0, "the second turn went on from the first"
    conversation.reset()
    assert conversation.messages == []


def test_what_was_said_before_a_stop_is_remembered(engine_of: EngineOf) -> None:
    conversation = Conversation(engine_of(), SamplingSettings(temperature=0, ignore_eos=True))
    deltas = conversation.ask("def")
    said = next(deltas).text + next(deltas).text
    deltas.close()  # pyrefly: ignore
    assert conversation.messages[-1] == {"role": "assistant", "content": said}
    assert texts(conversation, "go on") is not None


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=st.lists(st.text("abc ", min_size=1, max_size=60), min_size=1, max_size=6), system=st.booleans())
def test_the_oldest_exchanges_are_forgotten_when_the_context_is_full(
    model: Model, messages: list[str], system: bool
) -> None:
    assert model.tokenizer is not None
    with Engine(model, max_num_seqs=1) as engine:
        conversation = Conversation(engine, GREEDY, "s" if system else None)
        asked = 0
        for message in messages:
            answer = texts(conversation, message)
            asked += 2
            kept = conversation.messages
            assert kept[-2:] == [{"role": "user", "content": message}, {"role": "assistant", "content": answer}]
            assert (kept[0]["role"] == "system") == system
            assert kept[int(system)]["role"] == "user", "an exchange is forgotten whole"
            assert len(kept) - int(system) + conversation.forgotten == asked
            assert len(encode_chat(model.tokenizer, kept[:-1])) <= engine.max_model_len


def test_a_message_too_long_for_the_context_is_refused_and_not_kept(engine_of: EngineOf) -> None:
    conversation = Conversation(engine_of(), GREEDY)
    with pytest.raises(UserError, match=r"takes \d+ of the context's 128 tokens"):
        texts(conversation, "ab" * 200)
    assert conversation.messages == []
    assert texts(conversation, "ab") is not None


def test_saved_conversations_are_chat_data(engine_of: EngineOf, tmp_path: Path) -> None:
    conversation = Conversation(engine_of(), GREEDY)
    texts(conversation, "caf\u00e9")
    conversation.save(tmp_path / "chat.jsonl")
    (line,) = (tmp_path / "chat.jsonl").read_text("utf-8").splitlines()
    assert json.loads(line) == {"messages": conversation.messages}
    with pytest.raises(UserError, match="already exists"):
        conversation.save(tmp_path / "chat.jsonl")


def test_a_model_without_chat_template_is_pointed_to_generate(tokenizer: Tokenizer) -> None:
    plain: Any = Tokenizer(tokenizer.backend, bos_token="<|bos|>", eos_token="<|eos|>")
    for missing in (None, plain):
        with pytest.raises(UserError, match="treadle generate"):
            check_chat_template(missing)
    with Engine(Model(build(model_spec()))) as engine, pytest.raises(UserError, match="no chat template"):
        Conversation(engine, GREEDY)
