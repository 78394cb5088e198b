"""The engine: batches equal single runs, every end of a request, cancelling, failing, closing."""

from __future__ import annotations

import asyncio
import gc
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serve.tiny import build, model_spec
from treadle.config import TreadleError, UserError
from treadle.model.tokenizer import Tokenizer
from treadle.serve.engine import Engine
from treadle.serve.model import Model
from treadle.serve.request import Delta, FinishReason, SamplingSettings

EngineOf = Callable[..., Engine]
PROMPTS = ["def read", "the quick brown fox", "caf\u00e9", "open(path)", "x", "jumps over", "return"]


def recomputed(model: Model, tokens: list[int], count: int) -> list[int]:
    """Greedy decoding without any cache."""
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(int(model.logits(tokens)[-1].argmax()))
    return tokens[-count:]


def test_a_batch_equals_single_runs_and_recomputing(model: Model, engine_of: EngineOf) -> None:
    engine = engine_of(max_num_seqs=3)
    together = engine.generate(PROMPTS, temperature=0, max_tokens=24, ignore_eos=True)
    for prompt, completion in zip(PROMPTS, together, strict=True):
        tokens = engine.encode(prompt)
        assert completion.tokens == recomputed(model, tokens, 24)
        assert engine.generate([tokens], temperature=0, max_tokens=24, ignore_eos=True)[0].tokens == completion.tokens
        assert completion.prompt_tokens == len(tokens)
    assert engine.stats.generated_tokens == 2 * 7 * 24
    assert engine.stats.steps < 7 * 24 + 3 * 24 + 7, "sequences shared steps"


def test_a_seed_fixes_a_request_among_any_neighbours(engine_of: EngineOf) -> None:
    engine = engine_of(max_num_seqs=4)
    alone = engine.generate(["fox"], seed=11, max_tokens=20, ignore_eos=True)[0]
    crowd = engine.generate(["a", "fox", "bc"], seed=11, max_tokens=20, ignore_eos=True)[1]
    assert alone.tokens == crowd.tokens
    assert engine.generate(["fox"], seed=12, max_tokens=20, ignore_eos=True)[0].tokens != alone.tokens
    choices = engine.generate(["fox"], seed=11, n=3, max_tokens=20, ignore_eos=True)
    assert choices[0].tokens == alone.tokens
    assert len({tuple(choice.tokens) for choice in choices}) == 3


def test_the_engines_seed_fixes_requests_without_one(engine_of: EngineOf) -> None:
    def run(seed: int | None) -> list[list[int]]:
        with engine_of(seed=seed) as engine:
            return [engine.generate(["fox"], max_tokens=12, ignore_eos=True)[0].tokens for _ in range(2)]

    assert run(3) == run(3) != run(4)
    assert run(3)[0] != run(3)[1], "each request has a seed of its own"
    assert run(None) != run(None)


def test_ends(model: Model, engine_of: EngineOf, tokenizer: Tokenizer) -> None:
    engine = engine_of()
    prompt = engine.encode("def read")
    greedy = recomputed(model, prompt, 30)

    def run(**sampling: Any) -> Any:
        return engine.generate([prompt], temperature=0, **sampling)[0]

    ended = run(max_tokens=30, ignore_eos=True)
    assert (ended.finish_reason, ended.tokens, ended.stop_reason) == (FinishReason.LENGTH, greedy, None)
    assert ended.text == tokenizer.decode(greedy).rstrip("\ufffd")

    stop_id = greedy[7]
    first = greedy.index(stop_id)
    ended = run(max_tokens=30, stop_token_ids=[stop_id], ignore_eos=True)
    assert (ended.finish_reason, ended.tokens, ended.stop_reason) == (FinishReason.STOP, greedy[: first + 1], stop_id)
    assert ended.text == tokenizer.decode(greedy[:first]).rstrip("\ufffd"), "the stop token is no text"

    ended = run(max_tokens=30, min_tokens=first + 5, stop_token_ids=[stop_id], ignore_eos=True)
    assert len(ended.tokens) >= first + 5 and stop_id not in ended.tokens[: first + 4]

    assert run(ignore_eos=True).finish_reason is FinishReason.LENGTH, "without max_tokens, the context's end"
    assert len(run(ignore_eos=True).tokens) == engine.max_model_len - len(prompt)


def test_the_end_token_ends(engine_of: EngineOf, tokenizer: Tokenizer) -> None:
    engine = engine_of()
    end = tokenizer.eos_ids[0]
    ended = engine.generate(["x"], logit_bias={end: 100}, max_tokens=9)[0]
    assert (ended.text, ended.tokens, ended.finish_reason, ended.stop_reason) == ("", [end], FinishReason.STOP, None)
    ended = engine.generate(["x"], logit_bias={end: 100}, max_tokens=9, ignore_eos=True)[0]
    assert ended.tokens == [end] * 9 and ended.text == "", "special tokens are not shown"
    ended = engine.generate(["x"], logit_bias={end: 100}, max_tokens=2, ignore_eos=True, skip_special_tokens=False)[0]
    assert ended.text == "<|eos|><|eos|>"


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(begin=st.integers(0, 30), length=st.integers(1, 12), seed=st.integers(0, 5))
def test_stop_strings_cut_the_text_that_would_have_come(
    engine_of: EngineOf, shared: dict[str, Engine], begin: int, length: int, seed: int
) -> None:
    engine = shared.setdefault("engine", engine_of()) if not shared else shared["engine"]
    free = engine.generate(["the"], seed=seed, max_tokens=40, ignore_eos=True)[0].text
    stop = free[begin : begin + length]
    if not stop:
        return
    shown = []
    for delta in engine.deltas("the", seed=seed, max_tokens=40, ignore_eos=True, stop=[stop]):
        shown.append(delta.text)
        assert stop not in "".join(shown)
    assert "".join(shown) == free[: free.index(stop)]
    assert (delta.finish_reason, delta.stop_reason) == (FinishReason.STOP, stop)


@pytest.fixture
def shared() -> dict[str, Engine]:
    return {}


class Script(torch.nn.Module):
    """A model whose next token is scripted: row t of the table for a sequence of t tokens; raises where it says so."""

    def __init__(self, model: Model, next_token: Callable[[int], int]) -> None:
        super().__init__()
        self.embedding, self.spec, self.layout = model.module.embedding, model.spec, None
        self.dtype, self.device = model.dtype, model.device
        self.next_token = next_token

    def hidden(self, tokens: torch.Tensor, context: Any) -> torch.Tensor:
        return context.rope.positions[:, None].float()

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def logits(self, positions: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(len(positions), self.spec.vocabulary)
        for row, position in enumerate(positions[:, 0].tolist()):
            logits[row, self.next_token(int(position) + 1)] = 50.0
        return logits


def test_a_stream_never_shows_half_a_character(model: Model, tokenizer: Tokenizer, engine_of: EngineOf) -> None:
    text = "\U0001f600 \u6771\u4eac caf\u00e9 \U0001f468\u200d\U0001f469\u200d\U0001f467"
    tokens = tokenizer.encode(text, special_tokens=False)
    assert len(tokens) > len(text), "characters take several tokens"
    engine = engine_of(Model(Script(model, lambda length: tokens[length - 1]), tokenizer))  # pyrefly: ignore
    pieces = [delta.text for delta in engine.deltas([0], temperature=0, max_tokens=len(tokens))]
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)


def test_cancelling_frees_the_slot(engine_of: EngineOf) -> None:
    engine = engine_of(max_num_seqs=1)
    deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
    endless = SamplingSettings(ignore_eos=True)
    running = engine.submit("a", endless, deltas.put)
    assert deltas.get(timeout=30).text is not None
    waiting = engine.submit("b", endless, deltas.put)
    waiting.cancel()
    running.cancel()
    reasons = []
    while len(reasons) < 2:
        delta = deltas.get(timeout=30)
        reasons += [delta.finish_reason] if delta.finish_reason else []
    assert reasons == [FinishReason.CANCELLED] * 2
    assert engine.generate(["c"], max_tokens=3, ignore_eos=True)[0].finish_reason is FinishReason.LENGTH
    running.cancel()
    assert engine.stats.finished == {"cancelled": 2, "length": 1}
    assert (engine.stats.running, engine.stats.waiting, engine.stats.blocks_held) == (0, 0, 0)


def test_leaving_an_async_stream_cancels(engine_of: EngineOf) -> None:
    engine = engine_of(max_num_seqs=1)

    async def take_two() -> list[Delta]:
        taken = []
        async for delta in engine.stream("a", ignore_eos=True):
            taken.append(delta)
            if len(taken) == 2:
                break
        return taken

    async def all_of(prompt: str) -> str:
        return "".join([delta.text async for delta in engine.stream(prompt, seed=1, max_tokens=5, ignore_eos=True)])

    async def main() -> None:
        assert len(await take_two()) == 2
        gc.collect()
        texts = await asyncio.gather(*(all_of("b") for _ in range(5)))
        assert len(set(texts)) == 1
        with pytest.raises(UserError, match="empty"):
            engine.stream([], max_tokens=1)

    asyncio.run(main())
    assert engine.stats.finished == {"cancelled": 1, "length": 5}


def test_an_error_fails_those_concerned_and_nobody_else(
    model: Model, tokenizer: Tokenizer, engine_of: EngineOf
) -> None:
    def next_token(length: int) -> int:
        if length == 7:
            raise RuntimeError("no memory for seven tokens")
        return 5

    engine = engine_of(Model(Script(model, next_token), tokenizer), max_num_seqs=4)  # pyrefly: ignore
    with pytest.raises(TreadleError, match="could not compute this request: RuntimeError: no memory for seven"):
        engine.generate([[1]], max_tokens=20, ignore_eos=True)
    ends: queue.SimpleQueue[tuple[str, Delta]] = queue.SimpleQueue()
    for name, prompt in {"good": [1] * 8, "bad": [1] * 4, "also good": [1] * 10}.items():
        engine.submit(prompt, SamplingSettings(max_tokens=9, ignore_eos=True), lambda d, name=name: ends.put((name, d)))
    reasons = {}
    while len(reasons) < 3:
        name, delta = ends.get(timeout=30)
        if delta.finish_reason:
            reasons[name] = delta.finish_reason.value
    assert reasons == {"good": "length", "also good": "length", "bad": "error"}
    assert engine.failure == ""


def test_a_receiver_that_raises_loses_its_request_only(engine_of: EngineOf) -> None:
    engine = engine_of(max_num_seqs=2)

    def gone(delta: Delta) -> None:
        raise RuntimeError("event loop is closed")

    engine.submit("a", SamplingSettings(ignore_eos=True), gone)
    assert engine.generate(["b"], max_tokens=100, ignore_eos=True)[0].finish_reason is FinishReason.LENGTH
    assert engine.stats.finished == {"cancelled": 1, "length": 1}


def test_a_defect_of_the_engine_is_told_to_all(engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("defect")

    monkeypatch.setattr("treadle.serve.core.decide", broken)
    with pytest.raises(TreadleError, match="failed and must be started again: ZeroDivisionError: defect"):
        engine.generate(["a", "b"], max_tokens=3)
    assert "ZeroDivisionError" in engine.failure
    with pytest.raises(TreadleError, match="must be started again"):
        engine.generate(["a"])


def test_closing_refuses_new_requests_and_lets_running_ones_end(engine_of: EngineOf) -> None:
    engine = engine_of()
    first = threading.Event()
    deltas: list[Delta] = []

    def deliver(delta: Delta) -> None:
        deltas.append(delta)
        first.set()

    engine.submit("a", SamplingSettings(max_tokens=60, ignore_eos=True), deliver)
    assert first.wait(30)
    engine.close(timeout=30)
    assert deltas[-1].finish_reason is FinishReason.LENGTH and deltas[-1].completion_tokens == 60
    with pytest.raises(TreadleError, match="closed"):
        engine.generate(["b"])
    engine.close()


def test_closing_without_patience_ends_what_runs(engine_of: EngineOf) -> None:
    engine = engine_of(max_num_seqs=1)
    deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
    for _ in range(2):
        engine.submit("a", SamplingSettings(ignore_eos=True), deltas.put)
    deltas.get(timeout=30)
    started = time.monotonic()
    engine.close()
    assert time.monotonic() - started < 10
    ends = [delta for delta in (deltas.get_nowait() for _ in range(deltas.qsize())) if delta.finish_reason]
    assert len(ends) == 2 and all(delta.error and "closed" in delta.error for delta in ends)


@pytest.mark.parametrize(
    ("prompt", "sampling", "words"),
    [
        ([], {}, ["empty"]),
        ([300], {}, ["300", "0 to 299"]),
        ([-1], {}, ["-1"]),
        ([1.5], {}, ["whole numbers"]),
        ([1] * 128, {}, ["128 tokens", "shorten"]),
        ([1] * 100, {"max_tokens": 29}, ["100", "max_tokens=29", "128", "at most 28"]),
        ([1], {"max_tokens": 0}, ["max_tokens"]),
        ([1], {"max_tokens": -5}, ["max_tokens"]),
        ([1], {"temperature": -1}, ["temperature"]),
        ([1], {"temperature": float("nan")}, ["temperature"]),
        ([1], {"top_p": 0}, ["top_p"]),
        ([1], {"top_p": float("nan")}, ["top_p"]),
        ([1], {"min_tokens": 9, "max_tokens": 3}, ["min_tokens=9", "max_tokens=3"]),
        ([1], {"stop": ""}, ["stop"]),
        ([1], {"stop_token_ids": [300]}, ["stop_token_ids", "300"]),
        ([1], {"logit_bias": {300: 1}}, ["logit_bias", "300"]),
        ([1], {"logit_bias": {3: 101}}, ["logit_bias"]),
        ([1], {"logprobs": 21}, ["logprobs"]),
        ([1], {"n": 0}, ["n"]),
        ([1], {"temprature": 1}, ["temprature", "temperature"]),
    ],
)
def test_what_cannot_be_done_is_said_at_once(
    engine_of: EngineOf, prompt: list[Any], sampling: dict[str, Any], words: list[str]
) -> None:
    engine = engine_of()
    with pytest.raises(UserError) as refused:
        engine.generate([prompt], **sampling)
    assert all(word in str(refused.value) for word in words), refused.value
    assert engine.stats.requests == 0


def test_wrong_settings_and_prompts_are_named(model: Model, engine_of: EngineOf) -> None:
    with pytest.raises(UserError, match="did you mean 'max_num_seqs'"):
        Engine(model, max_seqs=3)
    with pytest.raises(UserError, match="put the token ids of one prompt into a list"):
        engine_of().generate([1, 2, 3])  # pyrefly: ignore
    assert engine_of().generate([]) == []


def test_a_reused_prefix_gives_the_same_tokens(engine_of: EngineOf) -> None:
    plain, reusing = engine_of(), engine_of(max_num_seqs=2, enable_prefix_caching=True)
    history: list[int] = plain.encode("the quick brown fox")
    for turn in range(3):
        history += plain.encode(f"turn {turn}")
        expected = plain.generate([history], temperature=0, max_tokens=8, ignore_eos=True)[0]
        last = list(reusing.deltas(history, temperature=0, max_tokens=8, ignore_eos=True))[-1]
        got = reusing.generate([history], temperature=0, max_tokens=8, ignore_eos=True)[0]
        assert got.tokens == expected.tokens
        if turn:
            assert last.cached_tokens >= len(history) - 20
        history += expected.tokens


def test_a_model_without_tokenizer_takes_and_gives_tokens(engine_of: EngineOf) -> None:
    engine = engine_of(Model(build(model_spec())))
    completion = engine.generate([[1, 2, 3]], max_tokens=4, temperature=0)[0]
    assert len(completion.tokens) == 4 and completion.text == ""
    for wrong in ({"stop": "x"}, {}):
        with pytest.raises(UserError, match="no tokenizer"):
            engine.generate(["text"] if not wrong else [[1]], **wrong)
