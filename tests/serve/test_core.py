"""The core under every mix of paging, chunks, prefix hits, guesses and preemption, against the model run whole."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.serve.tiny import attention, build, model_spec
from treadle.model.context import PackedContext
from treadle.model.spec import ModelSpec, RopeSpec
from treadle.serve.batch import StepBatch, StepOutput, layer_groups
from treadle.serve.block_tables import BlockTables
from treadle.serve.core import Core
from treadle.serve.kv_cache import KVCache, KVFormat
from treadle.serve.model import Model
from treadle.serve.request import Delta, Request, SamplingSettings
from treadle.serve.runner import LocalRunner
from treadle.serve.scheduler import Limits

SPECS = {
    "plain": model_spec(),
    "windows": model_spec(attention(window=7), attention(), attention(window=20)),
    "every layer has a window": model_spec(attention(window=9), attention(window=9)),
    "dynamic rope": model_spec(attention(rope=RopeSpec(10000.0, 8, 24, "dynamic", (("factor", 2.0),)))),
}


def core_of(
    spec: ModelSpec,
    blocks: int = 40,
    block_size: int = 4,
    seqs: int = 4,
    step: int = 32,
    deterministic: bool = False,
    dtype: torch.dtype = torch.float32,
    **more: Any,
) -> Core:
    groups = layer_groups(spec)
    counts = [blocks] * len(groups)
    module = build(spec, seed=5).to(dtype)
    format = KVFormat.of("auto", dtype)
    cache = KVCache(spec, groups, [count + 1 for count in counts], block_size, format)
    tables = BlockTables(groups, counts, block_size)
    return Core(
        Model(module),
        LocalRunner(module, cache, deterministic),
        tables,
        Limits(seqs, step, block_size),
        check=True,
        **more,
    )


@dataclass
class Client:
    request: Request
    deltas: list[Delta] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.tokens]


def ask(core: Core, prompt: list[int], seed: int = 0, **sampling: Any) -> Client:
    settings = SamplingSettings.of(None, **{"temperature": 0.0, "max_tokens": 8, **sampling})
    assert settings.max_tokens is not None
    deltas: list[Delta] = []
    request = Request(prompt, settings, settings.max_tokens, seed, frozenset(), deltas.append)
    core.add(request)
    return Client(request, deltas)


def run(core: Core) -> None:
    for _ in range(5000):
        if core.idle:
            return
        core.step()
    raise AssertionError(f"not finished: {core.decision.reason}")


def whole(module: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return module(torch.tensor(tokens), PackedContext.of_lengths([len(tokens)])).float()


def greedy(module: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(whole(module, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def prompts_of(seed: int, vocabulary: int, count: int = 12) -> list[list[int]]:
    """Prompts of which many begin alike, and that repeat themselves, so that prefixes are found and guesses hold."""
    rng = random.Random(seed)
    stems = [[rng.randrange(vocabulary) for _ in range(rng.randint(5, 25))] for _ in range(3)]
    prompts = []
    for _ in range(count):
        stem = rng.choice(stems)
        prompts.append(stem[: rng.randint(1, len(stem))] + stem[: rng.randint(0, 9)] + [rng.randrange(vocabulary)])
    return prompts


SETTINGS = {
    "roomy": {},
    "one sequence": {"seqs": 1},
    "prompts in small pieces": {"step": 5, "seqs": 4},
    "few blocks, so that sequences are preempted": {"blocks": 14, "seqs": 6},
    "few blocks, small pieces": {"blocks": 13, "step": 7, "seqs": 6},
    "no prefixes": {"reuse_prefixes": False, "blocks": 14},
    "guesses": {"drafts": 4},
    "guesses, few blocks, small pieces": {"drafts": 3, "blocks": 14, "step": 9, "seqs": 5},
    "blocks of one token": {"block_size": 1, "blocks": 120},
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("more", SETTINGS.values(), ids=SETTINGS.keys())
def test_tokens_equal_those_of_the_model_run_whole(spec: ModelSpec, more: dict[str, Any]) -> None:
    core = core_of(spec, **more)
    prompts = prompts_of(1, spec.vocabulary)
    clients = []
    for index, prompt in enumerate(prompts):  # they arrive while others run
        clients.append(ask(core, prompt, max_tokens=10))
        if index % 3 == 2:
            core.step()
    run(core)
    for prompt, client in zip(prompts, clients, strict=True):
        assert client.tokens == greedy(core.model.module, prompt, 10)
        assert [delta.finish_reason for delta in client.deltas if delta.finish_reason] == ["length"]
    assert core.tables.free == tuple(pool.count for pool in core.tables.pools)
    if more.get("blocks", 40) < 20 and spec is SPECS["plain"]:
        assert core.stats.preemptions > 0
    if more.get("drafts") and spec is SPECS["plain"]:
        assert core.stats.drafted_tokens > 0
    if more.get("reuse_prefixes", True) and (spec is SPECS["plain"] or (not more and spec is SPECS["windows"])):
        assert core.stats.cached_tokens > 0


@pytest.mark.parametrize("more", [{}, {"drafts": 4}, {"blocks": 12, "seqs": 5}, {"step": 4}], ids=str)
def test_a_seeded_request_draws_the_same_among_any_neighbours(more: dict[str, Any]) -> None:
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4, 1, 5]
    sampling = {"temperature": 1.0, "top_p": 0.9, "max_tokens": 12, "repetition_penalty": 1.1, "presence_penalty": 0.5}
    alone = core_of(SPECS["plain"])
    expected = ask(alone, prompt, seed=77, **sampling)
    run(alone)
    core = core_of(SPECS["plain"], **more)
    neighbours = [ask(core, [9] * n, seed=n, temperature=1.0, max_tokens=9) for n in range(1, 9)]
    client = ask(core, prompt, seed=77, **sampling)
    neighbours += [ask(core, [8] * n, temperature=2.0, seed=n) for n in range(1, 5)]
    run(core)
    assert client.tokens == expected.tokens and all(one.tokens for one in neighbours)


def test_drafted_sampling_keeps_the_distribution() -> None:
    """With the random number of its place, a token is the same whether it was guessed before or not."""
    prompt = [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2]
    for seed in range(30):
        plain, drafting = core_of(SPECS["plain"]), core_of(SPECS["plain"], drafts=6)
        one = ask(plain, prompt, seed=seed, temperature=0.2, max_tokens=16)
        two = ask(drafting, prompt, seed=seed, temperature=0.2, max_tokens=16)
        run(plain)
        run(drafting)
        assert one.tokens == two.tokens


def test_prompt_logprobs_are_the_models_own_however_they_are_computed() -> None:
    spec = SPECS["plain"]
    prompt = prompts_of(3, spec.vocabulary, 1)[0] * 2
    for more in ({}, {"step": 3, "seqs": 2}, {"drafts": 4}, {"reuse_prefixes": False}):
        core = core_of(spec, **more)
        first = ask(core, prompt, max_tokens=2)
        run(core)  # its blocks are there to be found
        client = ask(core, prompt, prompt_logprobs=3, max_tokens=3)
        run(core)
        assert client.tokens[:2] == first.tokens
        got = client.deltas[0].prompt_logprobs
        expected = whole(core.model.module, prompt).log_softmax(-1)
        assert got[0] is None and len(got) == len(prompt)
        for place, entry in enumerate(got[1:], start=1):
            assert entry is not None and entry.token == prompt[place]
            # fp32 sums in another order; log probabilities are about 5.
            assert entry.logprob == pytest.approx(float(expected[place - 1, prompt[place]]), abs=1e-4)
            best = expected[place - 1].topk(3)
            assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_an_embedding_is_the_last_hidden_state() -> None:
    core = core_of(SPECS["plain"], step=4)
    prompt = [5, 6, 7, 8, 9, 10, 11]
    deltas: list[Delta] = []
    core.add(Request(prompt, SamplingSettings(), 0, 0, frozenset(), deltas.append, embeds=True))
    run(core)
    module = core.model.module
    with torch.inference_mode():
        hidden = module.norm(module.hidden(torch.tensor(prompt), PackedContext.of_lengths([len(prompt)])))[-1]
    expected = torch.nn.functional.normalize(hidden, dim=0)
    torch.testing.assert_close(torch.tensor(deltas[0].embedding), expected, atol=1e-5, rtol=1e-5)
    assert deltas[0].finish_reason == "stop" and len(deltas) == 1


def test_cancelling_in_any_phase_gives_all_blocks_back() -> None:
    rng = random.Random(4)
    core = core_of(SPECS["windows"], blocks=30, step=6, seqs=3, drafts=2)
    for round_ in range(40):
        clients = [ask(core, prompt, max_tokens=6) for prompt in prompts_of(round_, 50, 5)]
        for _ in range(rng.randint(0, 8)):
            core.step()
        for client in clients:
            client.request.cancelled = True
        core.drop_cancelled()
        assert core.idle and core.stats.blocks_held == 0
        core.tables.check()
        assert all(client.deltas[-1].finish_reason is not None for client in clients)


def test_prefixes_churned_out_of_the_pool_change_nothing() -> None:
    core = core_of(SPECS["plain"], blocks=16)
    prompt = list(range(1, 30))
    first = ask(core, prompt)
    run(core)
    for start in range(30, 45):
        ask(core, [start + n % 7 for n in range(25)])
        run(core)
    evicted = core.stats.evictions
    again, hit = ask(core, prompt), ask(core, prompt)
    run(core)
    assert evicted > 0 and again.tokens == first.tokens == hit.tokens


def test_choices_of_one_prompt_share_its_blocks() -> None:
    core = core_of(SPECS["plain"], seqs=4)
    settings = SamplingSettings(max_tokens=4, n=3)
    deltas: list[Delta] = []
    prompt = list(range(20))
    requests: list[Request] = []
    for index in range(3):
        leader = requests[0] if requests else None
        requests.append(Request(prompt, settings, 4, index, frozenset(), deltas.append, index, leader))
        core.add(requests[-1])
    run(core)
    assert [request.cached_tokens for request in requests] == [0, 16, 16]


def test_a_leader_that_goes_does_not_keep_its_followers_waiting() -> None:
    core = core_of(SPECS["plain"], step=4)
    settings = SamplingSettings(max_tokens=4, n=2)
    deltas: list[Delta] = []
    leader = Request(list(range(20)), settings, 4, 0, frozenset(), deltas.append)
    follower = Request(list(range(20)), settings, 4, 1, frozenset(), deltas.append, 1, leader)
    core.add(leader)
    core.add(follower)
    core.step()
    leader.cancelled = True
    core.drop_cancelled()
    run(core)
    assert follower.completion_tokens == 4


class Recorder:
    """Keeps the logits of every token that was chosen, by the tokens before it."""

    def __init__(self, core: Core) -> None:
        self.logits: dict[tuple[int, ...], list[torch.Tensor]] = {}
        self.inner, core.versions.current.runner = core.versions.current.runner, self  # pyrefly: ignore
        self.core = core

    def step(self, batch: StepBatch) -> StepOutput:
        output = self.inner.step(batch)
        ends = [sum(batch.counts[: i + 1]) - 1 for i in range(len(batch.counts))]
        for row, logits in zip(batch.rows, output.logits.clone(), strict=True):
            if row in ends:
                past, count = batch.pasts[ends.index(row)], batch.counts[ends.index(row)]
                content = tuple(batch.tokens[row - count + 1 : row + 1])
                known = next(
                    tuple(one.tokens[: past + count])
                    for one in self.core._running
                    if one.computed == past and tuple(one.tokens[past : past + count]) == content
                )
                self.logits.setdefault(known, []).append(logits)
        return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", [SPECS["plain"], SPECS["windows"]], ids=["plain", "windows"])
def test_deterministic_logits_have_the_same_bits_in_any_batch_chunk_and_after_any_hit(
    spec: ModelSpec, dtype: torch.dtype
) -> None:
    prompt = [7, 3, 7, 3, 9, 9, 1, 250, 17, 4, 4, 8, 200, 3]
    seen: dict[tuple[int, ...], torch.Tensor] = {}
    for others, more in ((0, {}), (6, {"seqs": 7}), (6, {"seqs": 7, "step": 9}), (30, {"seqs": 31, "blocks": 400})):
        core = core_of(spec, deterministic=True, dtype=dtype, **more)
        recorder = Recorder(core)
        tokens = []
        for _ in range(2):  # the second time its prefix is found
            for other in range(others):
                ask(core, [other + 1] * (other % 7 + 1), max_tokens=12)
            client = ask(core, prompt, max_tokens=10)
            run(core)
            tokens.append(client.tokens)
        assert client.request.cached_tokens > 0
        assert tokens[0] == tokens[1]
        compared = 0
        for known, all_logits in recorder.logits.items():
            if list(known[: len(prompt)]) == prompt:
                for logits in all_logits:
                    assert torch.equal(seen.setdefault(known, logits), logits)
                    compared += 1
        assert compared >= 20
