"""Several LoRA adapters in one batch, against PEFT on Transformers, and against weights into which they were merged."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from tests.serve.tiny import build, model_spec
from tests.tiny_models import TINY, ours_of, reference_of
from treadle.config import UserError
from treadle.model.context import PackedContext
from treadle.model.lora import LoraSpec, attach_lora
from treadle.model.transformer import Transformer
from treadle.serve import capacity
from treadle.serve.adapters import RowTerms
from treadle.serve.batch import StepBatch, StepOutput, layer_groups
from treadle.serve.block_tables import BlockTables
from treadle.serve.core import Core
from treadle.serve.engine import Engine
from treadle.serve.kv_cache import KVCache, KVFormat
from treadle.serve.model import Model
from treadle.serve.request import Completion, Delta, Request, SamplingSettings
from treadle.serve.runner import LocalRunner
from treadle.serve.scheduler import Limits
from treadle.serve.versions import Adapter
from treadle.weights.adapter import load_adapter

KINDS: dict[str, dict[str, Any]] = {
    "attention": {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    "mlp": {"r": 3, "lora_alpha": 9, "target_modules": ["gate_proj", "down_proj"], "use_rslora": True},
    "all": {"r": 2, "lora_alpha": 4, "target_modules": "all-linear", "rank_pattern": {"q_proj": 5}},
}
PROMPTS = [[7, 8, 9, 10], list(range(3, 40)), [50] * 11, [1, 2], [7, 8, 9, 10, 11, 12]]
LONG = {**TINY["llama"], "max_position_embeddings": 128}
NAMES = ["llama", "qwen3-odd", "gemma3_text"]
EngineOf = Callable[..., Engine]


def make_adapter(config: dict[str, Any], folder: Path, kind: str, seed: int = 0) -> Path:
    """Save an adapter with PEFT, of random values large enough to change what is said."""
    torch.manual_seed(seed)
    settings = LoraConfig(**KINDS[kind], init_lora_weights=False, task_type="CAUSAL_LM")
    theirs = get_peft_model(reference_of(config), settings)
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape) * 0.3
    theirs.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Path]]:
    """For each model the folder of each kind of adapter."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: {kind: make_adapter(TINY[name], root / name / kind, kind, seed) for seed, kind in enumerate(KINDS)}
        for name in NAMES
    }


class Recorder:
    """A runner that keeps what batches asked for."""

    def __init__(self, inner: LocalRunner) -> None:
        self.inner, self.mixes = inner, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self, batch: StepBatch) -> StepOutput:
        self.mixes.append(set(batch.adapters))
        return self.inner.step(batch)


def core_of(module: Transformer, **more: Any) -> Core:
    groups = layer_groups(module.spec)
    cache = KVCache(module.spec, groups, [101] * len(groups), 4, KVFormat.of("auto", torch.float32))
    runner = Recorder(LocalRunner(module, cache, **more))
    tables = BlockTables(groups, [100] * len(groups), 4)
    return Core(Model(module), runner, tables, Limits(8, 64, 4), check=True)  # pyrefly: ignore[bad-argument-type]


def add(core: Core, name: str, folder: Path, slot: int) -> None:
    rank, size = core.versions.current.runner.load_adapter(slot, str(folder), 64, core.reserve(0))
    core.versions.add_adapter(Adapter(name, str(folder), slot, rank, size))


def ask(core: Core, prompt: list[int], adapter: str = "", **sampling: Any) -> Completion:
    settings = SamplingSettings.of(None, **{"temperature": 0.0, "max_tokens": 6, "adapter": adapter, **sampling})
    done = Completion()
    core.add(Request(prompt, settings, settings.max_tokens or 0, 0, frozenset(), done.add))
    return done


def run(core: Core) -> None:
    for _ in range(1000):
        if core.idle:
            return
        core.step()
    raise AssertionError(core.decision.reason)


@pytest.mark.parametrize("name", NAMES)
def test_every_sequence_of_a_batch_gets_what_peft_computes(name: str, folders: dict[str, dict[str, Path]]) -> None:
    reference = reference_of(TINY[name])
    core = core_of(ours_of(reference, TINY[name]))
    for slot, (kind, folder) in enumerate(folders[name].items(), 1):
        add(core, kind, folder, slot)
    order = ["", "attention", "mlp", "", "all", "attention", "mlp"]
    asked = [(prompt, adapter) for prompt in PROMPTS for adapter in order]
    answers = [ask(core, prompt, adapter, prompt_logprobs=0, logprobs=0) for prompt, adapter in asked]
    run(core)
    assert {0, 1, 2, 3} in core.versions.current.runner.mixes  # pyrefly: ignore[missing-attribute]
    theirs = PeftModel.from_pretrained(reference, folders[name]["attention"], "attention").eval()
    for kind in ("mlp", "all"):
        theirs.load_adapter(folders[name][kind], kind)
    said: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for (prompt, adapter), answer in zip(asked, answers, strict=True):
        tokens = prompt + answer.tokens
        with torch.no_grad():
            if adapter:
                theirs.set_adapter(adapter)
                logits = theirs(torch.tensor([tokens])).logits[0]
            else:
                with theirs.disable_adapter():
                    logits = theirs(torch.tensor([tokens])).logits[0]
        expected = logits.float().log_softmax(-1)
        got = [one.logprob for one in (*answer.prompt_logprobs[1:], *answer.logprobs) if one is not None]
        wanted = [float(expected[place, token]) for place, token in enumerate(tokens[1:])]
        # fp32 against fp32: what differs is the order of sums.
        assert got == pytest.approx(wanted, abs=2e-4), (adapter, prompt)
        said.setdefault(tuple(prompt), set()).add(tuple(answer.tokens))
    assert sum(len(answers) for answers in said.values()) > 3 * len(PROMPTS), "the adapters say different things"


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_merged_weights(kind: str, folders: dict[str, dict[str, Path]]) -> None:
    reference = reference_of(TINY["llama"])
    merged = ours_of(reference, TINY["llama"])
    load_adapter(merged, folders["llama"][kind], merge=True)
    core, other = core_of(ours_of(reference, TINY["llama"])), core_of(merged)
    add(core, kind, folders["llama"][kind], 1)
    # Whole prompts, then decoding; all of a batch at once and mixed with the plain model.
    got = [ask(core, prompt, kind) for prompt in PROMPTS]
    run(core)
    got += [ask(core, prompt, name) for prompt in PROMPTS for name in (kind, "")][::2]
    run(core)
    expected = [ask(other, prompt) for prompt in PROMPTS]
    run(other)
    assert [one.tokens for one in got] == [one.tokens for one in expected] * 2


def test_a_step_without_adapters_runs_the_plain_layers(
    folders: dict[str, dict[str, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = core_of(ours_of(reference_of(TINY["llama"]), TINY["llama"]))
    add(core, "all", folders["llama"]["all"], 1)
    calls = []
    forward = RowTerms.forward
    monkeypatch.setattr(RowTerms, "forward", lambda self, x: calls.append(self.name) or forward(self, x))
    ask(core, PROMPTS[0])
    run(core)
    assert not calls
    ask(core, PROMPTS[0], "all", max_tokens=1)
    run(core)
    assert len(calls) == 3 * 7  # every linear layer, once
    # And the module is as it was: whoever else computes with it gets the plain model.
    assert not any(isinstance(module, RowTerms) for module in core.model.module.modules())
    assert all(getattr(module, "adapter", None) is None for module in core.model.module.modules())


def test_another_thread_computes_the_plain_model_meanwhile(folders: dict[str, dict[str, Path]]) -> None:
    """`model.logits` while an engine is in the middle of a step with an adapter."""
    module = ours_of(reference_of(TINY["llama"]), TINY["llama"])
    core = core_of(module)
    add(core, "all", folders["llama"]["all"], 1)
    model, expected = Model(module), Model(module).logits(PROMPTS[1])
    found: list[torch.Tensor] = []

    def meanwhile(*_: object) -> None:
        hook.remove()
        other = threading.Thread(target=lambda: found.append(model.logits(PROMPTS[1])))
        other.start()
        other.join()

    hook = module.layers[1].register_forward_pre_hook(meanwhile)
    answer = ask(core, PROMPTS[0], "all")
    run(core)
    assert torch.equal(found[0], expected)
    again = ask(core, PROMPTS[0], "all")
    run(core)
    assert again.tokens == answer.tokens


# --- at run time


@pytest.fixture
def model() -> Model:
    return Model(ours_of(reference_of(LONG), LONG))


SETTINGS: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 120, "block_size": 4, "check_blocks": True}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6}


def terms_of(engine: Engine) -> dict[int, Any]:
    runner = engine._core.versions.current.runner
    assert isinstance(runner, LocalRunner)
    return runner._terms


def test_adapters_come_and_go(model: Model, folders: dict[str, dict[str, Path]], engine_of: EngineOf) -> None:
    paths = {kind: str(folder) for kind, folder in folders["llama"].items()}
    engine = engine_of(model, lora_modules={"start": paths["all"]}, **SETTINGS)
    assert engine.adapters == ("start",)
    with pytest.raises(UserError, match="no adapter 'stat', did you mean 'start'"):
        engine.generate([PROMPTS[0]], adapter="stat")
    plain = engine.generate(PROMPTS, **GREEDY)
    added = engine.command("add_adapter", name="one", path=paths["attention"])
    assert added["rank"] == 4 and added["bytes"] > 0 and added["adapters"] == ["start", "one"]
    one = engine.generate(PROMPTS, adapter="one", **GREEDY)
    assert [a.tokens for a in one] != [a.tokens for a in plain]
    with pytest.raises(UserError, match="there is an adapter 'one' already"):
        engine.command("add_adapter", name="one", path=paths["mlp"])
    assert engine.command("remove_adapter", name="one")["adapters"] == ["start"]
    with pytest.raises(UserError, match="no adapter 'one'"):
        engine.generate(PROMPTS, adapter="one", **GREEDY)
    with pytest.raises(UserError, match="no adapter 'one'"):
        engine.command("remove_adapter", name="one")
    assert len(terms_of(engine)) == 1
    listed = engine.command("adapters")["adapters"]
    assert [(a["name"], a["path"]) for a in listed] == [("start", paths["all"])]
    assert [a.tokens for a in engine.generate(PROMPTS, **GREEDY)] == [a.tokens for a in plain]


@pytest.mark.parametrize("replace", [True, False])
def test_another_adapter_of_the_same_name_reuses_nothing(
    model: Model, folders: dict[str, dict[str, Path]], engine_of: EngineOf, replace: bool
) -> None:
    """Not even where one that is removed comes back: what is told apart is what was loaded, not its name."""
    engine = engine_of(model, **SETTINGS)
    prompt = list(range(40))
    answers = {}
    for kind in ("attention", "mlp", "attention"):
        engine.command("add_adapter", name="x", path=str(folders["llama"][kind]), replace=replace)
        first, second = (engine.generate([prompt], adapter="x", **GREEDY)[0] for _ in range(2))
        assert (first.cached_tokens, second.cached_tokens) == (0, 36)
        assert first.tokens == second.tokens == answers.setdefault(kind, first.tokens)
        if not replace:
            engine.command("remove_adapter", name="x")
    assert engine.generate([prompt], **GREEDY)[0].cached_tokens == 0
    merged = ours_of(reference_of(LONG), LONG)
    load_adapter(merged, folders["llama"]["mlp"], merge=True)
    assert answers["mlp"] == Model(merged).generate(prompt, **GREEDY).tokens != answers["attention"]
    assert len(terms_of(engine)) == (1 if replace else 0)


def test_running_requests_finish_on_an_adapter_that_is_removed(
    model: Model, folders: dict[str, dict[str, Path]], engine_of: EngineOf
) -> None:
    engine = engine_of(model, **SETTINGS)
    engine.command("add_adapter", name="x", path=str(folders["llama"]["all"]))
    expected = engine.generate([PROMPTS[0]], temperature=0.0, max_tokens=100, ignore_eos=True, adapter="x")[0].tokens
    deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
    settings = SamplingSettings(temperature=0.0, max_tokens=100, ignore_eos=True, adapter="x")
    engine.submit(PROMPTS[0], settings, deltas.put)
    done = Completion()
    done.add(deltas.get(timeout=30))
    # The engine takes the removal between two steps, long before the answer's end.
    engine.command("remove_adapter", name="x")
    with pytest.raises(UserError, match="no adapter 'x'"):
        engine.generate([PROMPTS[0]], adapter="x")
    while done.finish_reason is None:
        done.add(deltas.get(timeout=30))
    assert done.tokens == expected
    engine.command("forget_prefixes")  # the engine's thread has ended the request
    assert not terms_of(engine)


def test_limits(model: Model, folders: dict[str, dict[str, Path]], engine_of: EngineOf) -> None:
    engine = engine_of(model, max_loras=1, max_lora_rank=4, **SETTINGS)
    with pytest.raises(UserError, match=r"rank 5, more than max_lora_rank=4; start with a larger --max-lora-rank"):
        engine.command("add_adapter", name="x", path=str(folders["llama"]["all"]))
    engine.command("add_adapter", name="x", path=str(folders["llama"]["mlp"]))
    with pytest.raises(UserError, match=r"1 adapters are loaded, as many as max_loras=1 allows"):
        engine.command("add_adapter", name="y", path=str(folders["llama"]["mlp"]))
    assert engine.adapters == ("x",) and len(terms_of(engine)) == 1


def test_adapters_that_do_not_fit_leave_nothing(
    model: Model, folders: dict[str, dict[str, Path]], engine_of: EngineOf, tmp_path: Path
) -> None:
    engine = engine_of(model, **SETTINGS)
    before = engine.generate(PROMPTS, **GREEDY)
    good, config = load_file(folders["llama"]["all"] / "adapter_model.safetensors"), {}
    for name, change, words in (
        ("none match", lambda key: key.replace("layers", "blocks"), "belongs to no linear layer"),
        ("one does not", lambda key: key.replace("layers.2", "layers.3"), "layers.3"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        config = json.loads((folders["llama"]["all"] / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(config))
        save_file({change(key): tensor for key, tensor in good.items()}, folder / "adapter_model.safetensors")
        with pytest.raises(UserError, match=words):
            engine.command("add_adapter", name="x", path=str(folder))
    (tmp_path / "one does not" / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    for path, words in (
        (tmp_path / "one does not", "use_dora is not supported"),
        (tmp_path / "nowhere", "has no adapter_config.json"),
        (folders["gemma3_text"]["all"], "layers"),
    ):
        with pytest.raises(UserError, match=words):
            engine.command("add_adapter", name="x", path=str(path))
    infinite = dict(good)
    infinite[next(iter(infinite))] = torch.full_like(good[next(iter(good))], torch.inf)
    save_file(infinite, tmp_path / "none match" / "adapter_model.safetensors")
    with pytest.raises(UserError, match="no finite float32 numbers"):
        engine.command("add_adapter", name="x", path=str(tmp_path / "none match"))
    for arguments, words in (({"name": "", "path": "x"}, "name"), ({"name": "x"}, "path"), ({"nam": "x"}, "nam")):
        with pytest.raises(UserError, match=words):
            engine.command("add_adapter", **arguments)
    with pytest.raises(UserError, match="has no adapter_config"):
        engine_of(model, lora_modules={"x": str(tmp_path)}, **SETTINGS)
    assert engine.adapters == () and not terms_of(engine)
    assert [a.tokens for a in engine.generate(PROMPTS, **GREEDY)] == [a.tokens for a in before]


def test_a_model_with_an_adapter_of_its_own(folders: dict[str, dict[str, Path]], engine_of: EngineOf) -> None:
    module = ours_of(reference_of(LONG), LONG)
    attach_lora(module, LoraSpec(2, 4.0))
    engine = engine_of(Model(module), **SETTINGS)
    with pytest.raises(UserError, match="has an adapter attached already"):
        engine.command("add_adapter", name="x", path=str(folders["llama"]["all"]))


def test_memory_is_set_aside_at_the_start(engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = Model(build(model_spec())), []
    monkeypatch.setattr("treadle.serve.assembly.available_memory", lambda _: 1 << 30)
    monkeypatch.setattr(
        "treadle.serve.assembly.fit_capacity", lambda *all: given.append(all[3]) or capacity.fit_capacity(*all)
    )
    engine_of(model)
    engine_of(model, enable_lora=True, max_loras=3, max_lora_rank=10)
    matrices = [w.shape for name, w in model.module.named_parameters() if name.startswith("layers") and w.dim() == 2]
    assert given == [1 << 30, (1 << 30) - 3 * sum(10 * (outputs + inputs) * 4 for outputs, inputs in matrices)]


def test_an_adapter_that_does_not_fit_is_refused_with_the_numbers(
    model: Model, folders: dict[str, dict[str, Path]], engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(model, **SETTINGS)
    monkeypatch.setattr("treadle.serve.room.available_memory", lambda _: engine.capacity.step_bytes + 1000)
    with pytest.raises(UserError, match=r"the adapter .* would take .* KiB beside what is loaded, but of the"):
        engine.command("add_adapter", name="x", path=str(folders["llama"]["all"]))
    assert engine.adapters == () and not terms_of(engine)


def test_a_logits_call_between_steps_sees_no_adapter(model: Model, folders: dict[str, dict[str, Path]]) -> None:
    expected = model.logits(PROMPTS[1])
    with Engine(model, lora_modules={"x": str(folders["llama"]["all"])}, **SETTINGS) as engine:
        engine.generate(PROMPTS, adapter="x", **GREEDY)
        with torch.inference_mode():
            context = PackedContext.of_lengths([len(PROMPTS[1])])
            assert torch.equal(model.module(torch.tensor(PROMPTS[1]), context).float(), expected)
