"""A model of random weights, made by the engine to keep to grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from treadle.config import UserError
from treadle.model.tokenizer import Tokenizer
from treadle.serve.engine import Engine
from treadle.serve.request import FinishReason, Grammar

SCHEMA = {
    "type": "object",
    "properties": {
        "on": {"type": "boolean"},
        "size": {"enum": ["S", "M"]},
        "count": {"type": "integer", "maximum": 99},
    },
    "required": ["on", "size", "count"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("settings", [{}, {"num_speculative_tokens": 4}, {"max_num_batched_tokens": 8}])
def test_answers_keep_to_the_grammar_whatever_runs_beside_them(
    engine_of: Callable[..., Engine], tokenizer: Tokenizer, settings: dict[str, Any]
) -> None:
    engine = engine_of(**settings)
    # A model of random weights would fill its short context with blanks.
    bias = {index: -100.0 for text in (" ", "\n", "\t", "\r") for index in tokenizer.encode(text, special_tokens=False)}
    grammar = Grammar(kind="json_schema", text=json.dumps(SCHEMA))
    regex = Grammar(kind="regex", text="(ab|cd){1,4}")
    for temperature in (0, 1.5):
        answers = engine.generate(
            ["def"], grammar=grammar, n=4, temperature=temperature, seed=1, max_tokens=120, logit_bias=bias
        )
        for one in answers:
            assert set(json.loads(one.text)) == {"on", "size", "count"} and one.finish_reason is FinishReason.STOP
        (one,) = engine.generate(["def def def"], grammar=regex, temperature=temperature, seed=1, min_tokens=20)
        assert re.fullmatch("(ab|cd){1,4}", one.text) and one.finish_reason is FinishReason.STOP
    (one,) = engine.generate(["x"], grammar=Grammar(kind="choice", text='["yes", "no"]'), ignore_eos=True, seed=2)
    assert one.text in ("yes", "no")
    (one,) = engine.generate(["x"], grammar=Grammar(kind="choice", text='["abc"]'), max_tokens=3)
    assert (one.text, one.finish_reason) == ("abc", FinishReason.STOP)


def test_what_is_impossible_is_refused_and_what_becomes_too_much_ends_alone(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of()
    with pytest.raises(UserError, match="schema is false"):
        engine.generate(["x"], grammar=Grammar(kind="json_schema", text="false"))
    # More alternatives than the library follows at once: found out only when the first token is chosen.
    many = "start: " + " | ".join(f'x "{number}"' for number in range(3000)) + '\nx: "a"'
    errors = []
    engine.submit("x", _with(Grammar(kind="grammar", text=many)), lambda delta: errors.append(delta.error))
    assert engine.generate(["x"], max_tokens=3, ignore_eos=True)[0].finish_reason is FinishReason.LENGTH
    assert errors == [errors[0]] and "grammar" in errors[0] and not engine.failure


def _with(grammar: Grammar) -> Any:
    from treadle.serve.request import SamplingSettings

    return SamplingSettings(grammar=grammar, max_tokens=9)


def test_special_tokens_can_be_shown(engine_of: Callable[..., Engine], tokenizer: Tokenizer) -> None:
    shown, hidden = tokenizer.token_to_id("<|im_start|>"), tokenizer.bos_id
    assert shown is not None and hidden is not None
    grammar = Grammar(kind="grammar", text=f'start: <[{hidden}]> "a" <[{shown}]> "b"')
    engine = engine_of()
    assert engine.generate(["x"], grammar=grammar)[0].text == "ab"
    assert engine.generate(["x"], grammar=grammar, shown_tokens=(shown,))[0].text == "a<|im_start|>b"
