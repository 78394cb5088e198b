"""Completions by OpenAI's client: echo, scoring, log probabilities of prompts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.serving import Served
from treadle.model.tokenizer import Tokenizer
from treadle.serve.model import Model

TEXT = "def read(path)"


def ask(server: Served, **more: Any) -> Any:
    return server.client.completions.create(model="tiny", **{"prompt": TEXT, "max_tokens": 4, "temperature": 0, **more})


def test_echo_and_scores(served: Served, model: Model, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    expected = model.logits(ids).log_softmax(-1)
    wanted = [float(expected[place, token]) for place, token in enumerate(ids[1:])]
    plain = ask(served, logprobs=1).choices[0]
    answer = ask(served, echo=True, logprobs=2)
    choice = answer.choices[0]
    assert choice.text == TEXT + plain.text
    assert choice.logprobs.token_logprobs[0] is None and choice.logprobs.top_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1 : len(ids)] == pytest.approx(wanted, abs=1e-4)
    assert choice.logprobs.token_logprobs[len(ids) :] == pytest.approx(plain.logprobs.token_logprobs, abs=1e-4)
    assert choice.logprobs.tokens[: len(ids)] == [tokenizer.decode([one], skip_special_tokens=False) for one in ids]
    assert len(choice.logprobs.text_offset) == len(ids) + 4
    assert all(2 <= len(one) <= 3 for one in choice.logprobs.top_logprobs[1 : len(ids)])

    scored = ask(served, prompt=ids, echo=True, logprobs=0, max_tokens=0)
    (only,) = scored.choices
    assert only.text == tokenizer.decode(ids, skip_special_tokens=False) and only.finish_reason == "length"
    assert only.logprobs.token_logprobs[1:] == pytest.approx(wanted, abs=1e-4)
    assert scored.usage.completion_tokens == 0 and scored.usage.prompt_tokens == len(ids)

    listed = ask(served, max_tokens=0, extra_body={"prompt_logprobs": 0}).choices[0].model_extra["prompt_logprobs"]
    assert listed[0] is None and len(listed) == len(ids)
    found = [one[str(token)]["logprob"] for one, token in zip(listed[1:], ids[1:], strict=True)]
    assert found == pytest.approx(wanted, abs=1e-4)


def test_streams_begin_with_the_echo(served: Served) -> None:
    whole = ask(served, prompt=[TEXT, "fox"], echo=True, logprobs=1, n=2)
    texts, scores = [""] * 4, [[], [], [], []]
    for chunk in ask(served, prompt=[TEXT, "fox"], echo=True, logprobs=1, n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            scores[choice.index] += choice.logprobs.token_logprobs if choice.logprobs else []
    assert texts == [choice.text for choice in whole.choices]
    assert scores == [choice.logprobs.token_logprobs for choice in whole.choices]
    assert [text[:3] for text in texts] == ["def", "def", "fox", "fox"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0"),
        ({"max_tokens": -1}, "max_tokens", "-1"),
        ({"max_tokens": 100_000}, None, "max_tokens=100000"),
        ({"suffix": "end"}, "suffix", "'suffix' is not supported"),
        ({"best_of": 3}, "best_of", "not supported"),
        ({"tools": [{}]}, "tools", "not supported"),
        ({"prompt_logprobs": 100}, "prompt_logprobs", "100"),
        ({"guided_regex": "("}, "guided_regex", "unclosed"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": [1, 99999]}, None, "99999"),
    ],
)
def test_what_is_wrong_is_named(served: Served, body: dict[str, Any], param: str | None, words: str) -> None:
    error = served.error("/v1/completions", 400, **{"prompt": "x", **body})
    assert words in error["message"] and error["param"] == param, error
