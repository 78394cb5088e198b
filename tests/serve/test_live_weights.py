"""New weights while requests run, and sleep: no request is lost, and no token comes of the wrong weights."""

from __future__ import annotations

import json
import queue
import random
import shutil
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.serve.test_core import Client, ask, core_of, greedy, prompts_of, run, whole
from tests.serve.tiny import CONFIG, TEXT, TOKENS, build, model_spec
from treadle.config import UserError
from treadle.model.families import read_spec
from treadle.model.lora import LoraSpec, adapters, attach_lora
from treadle.model.tokenizer import Tokenizer
from treadle.model.transformer import Transformer
from treadle.serve import changes
from treadle.serve.core import Core
from treadle.serve.engine import Engine
from treadle.serve.model import Model, load
from treadle.serve.request import Completion, Delta, Request, SamplingSettings
from treadle.serve.runner import LocalRunner
from treadle.serve.versions import Unavailable
from treadle.weights.adapter import load_adapter, save_adapter
from treadle.weights.identity import content_version

SPEC = model_spec()
NEW = build(SPEC, seed=77)
EngineOf = Callable[..., Engine]
WAYS = {"roomy": {}, "few blocks": {"blocks": 14, "seqs": 6}, "guesses, small pieces": {"drafts": 3, "step": 7}}


def switch(core: Core, module: Transformer, name: str = "new", restart: bool = False) -> None:
    runner = core.runner
    assert isinstance(runner, LocalRunner)
    core.switch_weights(name, Model(module), LocalRunner(module, runner.cache, terms=runner._terms), restart)


def versions_of(client: Client) -> list[str]:
    return list(dict.fromkeys(delta.weight_version for delta in client.deltas))


@pytest.mark.parametrize("more", WAYS.values(), ids=WAYS)
def test_requests_that_run_finish_on_the_old_weights(more: dict[str, Any]) -> None:
    core = core_of(SPEC, **more)
    old = core.model.module
    prompts = prompts_of(3, SPEC.vocabulary)
    before = [ask(core, prompt, max_tokens=10) for prompt in prompts[:6]]
    for _ in range(4):
        core.step()
    begun = {id(one) for one in before if one.request.phase.value == "running" or one.tokens}
    assert begun
    switch(core, NEW)
    after = [ask(core, prompt, max_tokens=10) for prompt in prompts]
    run(core)
    for prompt, client in zip(prompts[:6] + prompts, before + after, strict=True):
        module, name = (old, "in-memory") if id(client) in begun else (NEW, "new")
        assert client.tokens == greedy(module, prompt, 10)
        assert versions_of(client) == [name]
    assert [one.name for one in core.versions.all] == ["new"]


@pytest.mark.parametrize("more", WAYS.values(), ids=WAYS)
def test_requests_that_restart_keep_their_tokens(more: dict[str, Any]) -> None:
    core = core_of(SPEC, **more)
    old = core.model.module
    prompts = prompts_of(4, SPEC.vocabulary)
    clients = [ask(core, prompt, max_tokens=12) for prompt in prompts]
    for _ in range(5):
        core.step()
    kept = [list(client.tokens) for client in clients]
    assert any(kept)
    switch(core, NEW, restart=True)
    assert len(core.versions.all) == 1  # nobody needs the old ones
    run(core)
    for prompt, client, tokens in zip(prompts, clients, kept, strict=True):
        assert tokens == greedy(old, prompt, len(tokens))
        assert client.tokens == tokens + greedy(NEW, prompt + tokens, 12 - len(tokens))
        assert client.deltas[-1].weight_version == ("in-memory" if len(tokens) == 12 else "new")


def test_old_prefixes_are_never_found_even_under_the_same_name() -> None:
    core = core_of(SPEC)
    prompt = list(range(40))
    for module in (core.model.module, NEW, build(SPEC, seed=5), NEW):  # also where the same weights come again
        if module is not core.model.module:
            switch(core, module, "in-memory")
        clients = []
        for _ in range(2):
            clients.append(ask(core, prompt))
            run(core)
        assert [one.tokens for one in clients] == [greedy(module, prompt, 8)] * 2
        assert [one.deltas[-1].cached_tokens for one in clients] == [0, 36]


def test_prompt_logprobs_are_those_of_the_weights_that_answer() -> None:
    core = core_of(SPEC, step=6)
    prompt = list(range(20))
    client = ask(core, prompt, prompt_logprobs=0, max_tokens=3)
    core.step()
    core.step()
    assert 1 < len(client.request.prompt_logprobs) < 20
    switch(core, NEW, restart=True)
    run(core)
    expected = whole(NEW, prompt).log_softmax(-1)
    said = [one for delta in client.deltas for one in delta.prompt_logprobs]
    assert len(said) == 20
    for place, one in enumerate(said[1:], 1):
        assert one is not None and one.logprob == pytest.approx(float(expected[place - 1, prompt[place]]), abs=1e-4)


def test_choices_of_one_prompt_have_the_same_weights() -> None:
    core = core_of(SPEC, seqs=1)
    old = core.model.module
    settings = SamplingSettings(max_tokens=4, n=2, temperature=0)
    done = [Completion(), Completion()]
    leader = Request(list(range(20)), settings, 4, 0, frozenset(), done[0].add)
    follower = Request(list(range(20)), settings, 4, 1, frozenset(), done[1].add, 1, leader)
    core.add(leader)
    core.add(follower)
    while done[0].finish_reason is None:
        core.step()
    assert done[1].finish_reason is None
    switch(core, NEW)
    run(core)
    assert done[0].tokens == done[1].tokens == greedy(old, list(range(20)), 4)
    assert {one.weight_version for one in done} == {"in-memory"}


def test_old_weights_are_freed_with_the_last_request_that_needs_them() -> None:
    core = core_of(SPEC)
    client = ask(core, [1, 2, 3], max_tokens=5)
    core.step()
    old = weakref.ref(core.model.module)
    switch(core, NEW)
    core.step()
    assert old() is not None
    client.request.cancelled = True
    core.drop_cancelled()
    assert old() is None


@pytest.mark.parametrize("seed", range(4))
def test_any_mix_of_switches(seed: int) -> None:
    """Every token is the likeliest of the weights that its delta names, given all tokens before it."""
    dice = random.Random(seed)
    core = core_of(SPEC, blocks=16, seqs=5, step=9, drafts=dice.choice([0, 3]))
    modules = {"in-memory": core.model.module}
    clients, prompts = [], prompts_of(seed, SPEC.vocabulary, 14)
    for number, prompt in enumerate(prompts):
        clients.append(ask(core, prompt, max_tokens=9))
        for _ in range(dice.randrange(4)):
            core.step()
        if dice.random() < 0.4:
            modules[str(number)] = build(SPEC, seed=number)
            switch(core, modules[str(number)], str(number), restart=dice.random() < 0.5)
    run(core)
    for prompt, client in zip(prompts, clients, strict=True):
        tokens = list(prompt)
        for delta in client.deltas:
            for token in delta.tokens:
                assert token == int(whole(modules[delta.weight_version], tokens)[-1].argmax())
                tokens.append(token)
        assert len(tokens) == len(prompt) + 9 and client.deltas[-1].finish_reason == "length"
    assert len(core.versions.all) == 1
    assert core.tables.free == tuple(pool.count for pool in core.tables.pools)


# --- from disk


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two versions of a model, and models that are none."""
    root, found = tmp_path_factory.mktemp("weights"), {}
    tokenizer, other = Tokenizer.train([TEXT] * 4, TOKENS), Tokenizer.train(["abc abd xyz"] * 4, TOKENS)
    for name, seed, changed, words in (
        ("one", 1, {}, tokenizer),
        ("two", 2, {}, tokenizer),
        ("wider", 1, {"intermediate_size": 56}, tokenizer),
        ("turned", 1, {"rope_theta": 5000.0}, tokenizer),
        ("speaking otherwise", 2, {}, other),
    ):
        found[name] = root / name
        Model(build(read_spec({**CONFIG, **changed}), seed), words).save(found[name])
    return found


SETTINGS: dict[str, Any] = {"max_num_seqs": 4, "block_size": 4, "check_blocks": True}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
PROMPT = list(range(3, 40))


def tokens_of(path: Path, count: int = 8) -> list[int]:
    return greedy(load(path).module, PROMPT, count)


def test_a_running_engine_switches(disk: dict[str, Path]) -> None:
    with Engine(disk["one"], **SETTINGS) as engine:
        assert engine.weight_version == content_version(disk["one"]) != content_version(disk["two"])
        deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        hold(engine)
        engine.submit(PROMPT, SamplingSettings(temperature=0, max_tokens=60, ignore_eos=True), deltas.put)
        running = Completion()
        running.add(deltas.get(timeout=30))
        result = engine.command("load_weights", path=str(disk["two"]), version="second")
        assert result["previous"] == content_version(disk["one"]) and result["weight_version"] == "second"
        (after,) = engine.generate([PROMPT], **GREEDY)
        while running.finish_reason is None:
            running.add(deltas.get(timeout=30))
        assert running.tokens == tokens_of(disk["one"], 60) and running.weight_version == result["previous"]
        assert after.tokens == tokens_of(disk["two"]) and after.weight_version == "second"
        with pytest.raises(UserError, match="are called 'second' already"):
            engine.command("load_weights", path=str(disk["one"]), version="second")
        engine.command("load_weights", path=str(disk["one"]), restart=True)
        assert engine.generate([PROMPT], **GREEDY)[0].tokens == tokens_of(disk["one"])


def hold(engine: Engine) -> None:
    """Let the engine wait after its next step until a command reaches it: what runs then surely runs still."""
    step, changed = engine._core.step, engine._changed

    def step_once() -> None:
        engine._core.step = step  # pyrefly: ignore
        step()
        with changed:
            assert changed.wait_for(lambda: engine._calls, 60)

    engine._core.step = step_once  # pyrefly: ignore


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wider", r"layers\.0\.mlp\.width is 56 instead of 48"),
        ("turned", r"layers\.0\.attention\.rope\.theta is 5000\.0 instead of 10000\.0"),
        ("speaking otherwise", "another tokenizer"),
        ("nowhere", "does not exist"),
    ],
)
def test_what_is_no_version_of_the_model_changes_nothing(disk: dict[str, Path], name: str, words: str) -> None:
    with Engine(disk["one"], **SETTINGS) as engine:
        with pytest.raises(UserError, match=words):
            engine.command("load_weights", path=str(disk.get(name, disk["one"].parent / name)))
        assert engine.weight_version == content_version(disk["one"])
        assert engine.generate([PROMPT], **GREEDY)[0].tokens == tokens_of(disk["one"])
        with pytest.raises(UserError, match="no weights are loaded to switch to"):
            engine.command("switch_weights")


def test_two_versions_that_do_not_fit_are_refused_with_the_numbers(
    disk: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(disk["one"], **SETTINGS) as engine:
        runner, step = engine._core.runner, engine.capacity.step_bytes
        assert isinstance(runner, LocalRunner)
        # Of the cache, most has no memory yet: that is still to come.
        needed = engine.spec.parameters_count() * 4
        least = step + engine._core.reserve(step).cache_bytes(runner.cache) + needed
        monkeypatch.setattr("treadle.serve.room.available_memory", lambda _: least - 1)
        with pytest.raises(UserError, match=r"would take .* KiB beside what is loaded.* belong to the key-value cache"):
            engine.command("load_weights", path=str(disk["two"]))
        assert engine.weight_version == content_version(disk["one"])
        monkeypatch.setattr("treadle.serve.room.available_memory", lambda _: least)
        engine.command("load_weights", path=str(disk["two"]))
        assert engine.weight_version == content_version(disk["two"])


def test_adapters_go_with_the_new_weights(disk: dict[str, Path], tmp_path: Path) -> None:
    trained = load(disk["one"]).module
    attach_lora(trained, LoraSpec(4, 8.0))
    for adapter in adapters(trained).values():
        adapter.b.data = torch.randn(adapter.b.shape, generator=torch.Generator().manual_seed(1)) * 0.3
    save_adapter(tmp_path, trained)
    with Engine(disk["one"], lora_modules={"x": str(tmp_path)}, **SETTINGS) as engine:
        for path in (disk["one"], disk["two"]):
            engine.command("load_weights", path=str(path))
            merged = load(path).module
            load_adapter(merged, tmp_path, merge=True)
            expected = greedy(merged, PROMPT, 8)
            assert engine.generate([PROMPT], adapter="x", **GREEDY)[0].tokens == expected != tokens_of(path)
            engine.command("sleep")
            engine.command("wake")
            assert engine.generate([PROMPT], adapter="x", **GREEDY)[0].tokens == expected


def test_versions_are_named_by_content(disk: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = Path(shutil.copytree(disk["one"], tmp_path / "copy"))
    name = content_version(copied)
    assert name == content_version(disk["one"])
    file = copied / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert content_version(copied) != name
    # Of a large file only pieces are read, from its beginning to its very end.
    monkeypatch.setattr("treadle.weights.identity.HEAD_BYTES", 4096)
    monkeypatch.setattr("treadle.weights.identity.PIECES", 4)
    monkeypatch.setattr("treadle.weights.identity.PIECE_BYTES", 16)
    changed = content_version(copied)
    data[-1] ^= 1
    file.write_bytes(data)
    assert content_version(copied) != changed


# --- sleep


def test_asleep_it_refuses_and_awake_it_says_the_same(disk: dict[str, Path]) -> None:
    with Engine(disk["one"], **SETTINGS) as engine:
        before = engine.generate([PROMPT], **GREEDY)[0]
        result = engine.command("sleep")
        assert result["weights"] == "freed" and result["asleep"] and engine.asleep
        runner = engine._core.runner
        assert isinstance(runner, LocalRunner) and not runner.cache.allocated
        assert engine.model.device.type == "meta"
        with pytest.raises(Unavailable, match="the engine is asleep; wake it"):
            engine.generate([PROMPT], **GREEDY)
        for name, arguments in (
            ("sleep", {}),
            ("load_weights", {"path": str(disk["two"])}),
            ("add_adapter", {"name": "x", "path": "x"}),
        ):
            with pytest.raises(Unavailable, match="asleep"):
                engine.command(name, **arguments)
        state = {"weight_version": before.weight_version, "asleep": False, "adapters": []}
        assert engine.command("wake") == {"previous": before.weight_version, **state}
        after = engine.generate([PROMPT], **GREEDY)[0]
        assert (after.tokens, after.weight_version, after.cached_tokens) == (before.tokens, before.weight_version, 0)
        assert engine.command("wake") == state  # harmless


def test_it_wakes_with_the_weights_that_it_was_switched_to(disk: dict[str, Path]) -> None:
    with Engine(disk["one"], **SETTINGS) as engine:
        engine.command("load_weights", path=str(disk["two"]), version="second")
        engine.command("sleep")
        engine.command("wake")
        assert engine.weight_version == "second"
        assert engine.generate([PROMPT], **GREEDY)[0].tokens == tokens_of(disk["two"])


def test_files_that_changed_or_went_while_it_slept(disk: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(disk["one"], tmp_path / "model"))
    with Engine(folder, **SETTINGS) as engine:
        engine.command("sleep")
        folder.rename(tmp_path / "away")
        with pytest.raises(UserError, match="does not exist"):
            engine.command("wake")
        assert engine.asleep
        shutil.copytree(disk["two"], folder)
        assert engine.command("wake")["weight_version"] == content_version(disk["two"])
        assert engine.generate([PROMPT], **GREEDY)[0].tokens == tokens_of(disk["two"])


def _changed(model: Model) -> Model:
    with torch.no_grad():
        model.module.layers[0].mlp.up.weight.mul_(-1)  # pyrefly: ignore
    return model


@pytest.mark.parametrize(
    ("make", "level", "words"),
    [
        (lambda path: Model(load(path).module), 2, "made in memory"),
        (lambda path: _changed(load(path)), 2, "changed in memory"),
        (load, 1, "level 1"),
    ],
    ids=["made", "changed", "level 1"],
)
def test_weights_that_cannot_be_read_again_are_kept(
    disk: dict[str, Path], engine_of: EngineOf, make: Callable[[Path], Model], level: int, words: str
) -> None:
    model = make(disk["one"])
    expected = greedy(model.module, PROMPT, 8)
    engine = engine_of(model, **SETTINGS)
    engine.generate([PROMPT], **GREEDY)
    assert words in engine.command("sleep", level=level)["weights"]
    runner = engine._core.runner
    assert isinstance(runner, LocalRunner) and not runner.cache.allocated and engine.model is model
    engine.command("wake")
    (again,) = engine.generate([PROMPT], **GREEDY)
    assert again.tokens == expected and again.cached_tokens == 0


@pytest.mark.parametrize("mode", ["wait", "abort", "refuse"])
def test_requests_at_hand_when_it_is_put_to_sleep(disk: dict[str, Path], mode: str) -> None:
    with Engine(disk["one"], **SETTINGS) as engine:
        deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        hold(engine)
        engine.submit(PROMPT, SamplingSettings(max_tokens=80, ignore_eos=True), deltas.put)
        done = Completion()
        done.add(deltas.get(timeout=30))
        if mode == "refuse":
            with pytest.raises(UserError, match="1 requests are at hand"):
                engine.command("sleep", mode=mode)
            assert not engine.asleep
        else:
            engine.command("sleep", mode=mode)
            assert engine.asleep and engine.stats.running == 0
        while done.finish_reason is None:
            done.add(deltas.get(timeout=30))
        if mode == "abort":
            assert done.finish_reason == "error" and done.error is not None and "put to sleep" in done.error
        else:
            assert len(done.tokens) == 80
        engine.command("wake")
        assert engine.generate([PROMPT], **GREEDY)[0].tokens == tokens_of(disk["one"])


def test_one_change_at_a_time(disk: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    check = changes.check_same_model

    def slow(*arguments: Any) -> None:
        begun.set()
        assert go_on.wait(60)
        check(*arguments)

    monkeypatch.setattr(changes, "check_same_model", slow)
    with Engine(disk["one"], **SETTINGS) as engine:
        loading = threading.Thread(target=lambda: engine.command("load_weights", path=str(disk["two"])))
        loading.start()
        assert begun.wait(60)
        for name, arguments in (("sleep", {}), ("load_weights", {"path": str(disk["two"])})):
            with pytest.raises(UserError, match=r"the engine is loading .*; try again when that is done"):
                engine.command(name, **arguments)
        assert engine.generate([PROMPT], **GREEDY)[0].tokens == tokens_of(disk["one"])  # it serves meanwhile
        go_on.set()
        loading.join(60)
        assert engine.generate([PROMPT], **GREEDY)[0].tokens == tokens_of(disk["two"])


def test_sleep_gives_the_memory_back(tmp_path: Path) -> None:
    config = {**CONFIG, "vocab_size": 40_000, "hidden_size": 512, "tie_word_embeddings": True}
    module = Transformer(read_spec(config))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.01)
    Model(module).save(tmp_path / "model")
    del module
    with Engine(tmp_path / "model", max_num_seqs=2, max_num_batched_tokens=16) as engine:
        weights, process = engine.spec.parameters_count() * 4, psutil.Process()
        expected = engine.generate([PROMPT], **GREEDY)[0].tokens
        awake = process.memory_info().rss
        freed = engine.command("sleep")["freed_bytes"]
        asleep = process.memory_info().rss
        assert weights > 75 << 20 and freed > 0.9 * weights and awake - asleep > 0.9 * weights
        engine.command("wake")
        assert engine.generate([PROMPT], **GREEDY)[0].tokens == expected


def test_wrong_arguments_are_named(disk: dict[str, Path]) -> None:
    with Engine(disk["one"], **SETTINGS) as engine:
        for name, arguments, words in (
            ("sleep", {"level": 3}, "level"),
            ("sleep", {"mode": "gently"}, "mode"),
            ("load_weights", {}, "path"),
            ("load_weights", {"path": "x", "restrt": True}, "restrt"),
            ("load_weight", {"path": "x"}, "did you mean 'load_weights'"),
        ):
            with pytest.raises(UserError, match=words):
                engine.command(name, **arguments)
        state = {"weight_version": content_version(disk["one"]), "asleep": False, "adapters": []}
        assert json.loads(json.dumps(engine.command("state"))) == state
