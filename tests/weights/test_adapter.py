"""LoRA adapters against PEFT, both ways: saved by us and by PEFT, attached and merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from tests.tiny_models import TINY, ours_of, packed, reference_of, some_tokens
from treadle.config import UserError
from treadle.model.lora import (
    LoraSpec,
    MergedState,
    adapters,
    attach_lora,
    initial_adapter_value,
    lora_state,
    merge_lora,
    target_names,
)
from treadle.model.transformer import Transformer
from treadle.weights.adapter import load_adapter, save_adapter

TOKENS = some_tokens(23)
NAMES = ["llama-odd", "qwen2", "qwen3-odd", "gemma3_text"]


def logits(model: Transformer) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS, packed(23))


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).abs().max() <= 1e-5 * (other.max() - other.min()))


def trained(model: Transformer, lora: LoraSpec) -> list[str]:
    """Attach adapters and give b values, as training would."""
    names = attach_lora(model, lora, seed=5)
    generator = torch.Generator().manual_seed(1)
    for adapter in adapters(model).values():
        adapter.b.data = torch.randn(adapter.b.shape, generator=generator) * 0.3
    return names


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "lora",
    [
        LoraSpec(4, 8.0),
        LoraSpec(3, 5.5, ("q", "v_proj"), rank_stabilized=True),
        LoraSpec(2, 4.0, ("layers.[01].mlp.*", "o")),
    ],
)
def test_peft_loads_what_we_save(name: str, lora: LoraSpec, tmp_path: Path) -> None:
    reference = reference_of(TINY[name])
    ours = ours_of(reference, TINY[name])
    before = logits(ours)
    trained(ours, lora)
    after = logits(ours)
    assert not close(before, after)
    save_adapter(tmp_path, ours, base="the/base")
    theirs = PeftModel.from_pretrained(reference, tmp_path).eval()
    with torch.no_grad():
        assert close(after, theirs(TOKENS[None]).logits[0])
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == "the/base"
    again = ours_of(reference_of(TINY[name]), TINY[name])
    assert set(load_adapter(again, tmp_path)) == set(adapters(ours))
    assert torch.equal(logits(again), after)


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_we_load_what_peft_saves(name: str, rslora: bool, tmp_path: Path) -> None:
    reference = reference_of(TINY[name])
    ours = ours_of(reference, TINY[name])
    config = LoraConfig(
        r=4,
        lora_alpha=6,
        lora_dropout=0.1,
        target_modules=["q_proj", "o_proj", "down_proj"],
        rank_pattern={"layers.1.self_attn.q_proj": 2, "down_proj": 3},
        alpha_pattern={"o_proj": 9},
        use_rslora=rslora,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    theirs = get_peft_model(reference, config).eval()
    theirs.save_pretrained(tmp_path)
    load_adapter(ours, tmp_path)
    with torch.no_grad():
        expected = theirs(TOKENS[None]).logits[0]
    assert close(logits(ours), expected)
    # And saved once more, patterns included.
    (tmp_path / "again").mkdir()
    save_adapter(tmp_path / "again", ours)
    with torch.no_grad():
        other = PeftModel.from_pretrained(reference_of(TINY[name]), tmp_path / "again").eval()(TOKENS[None]).logits[0]
    assert close(other, expected)


@pytest.mark.parametrize("name", NAMES)
def test_merged_equals_attached(name: str) -> None:
    ours = ours_of(reference_of(TINY[name]), TINY[name])
    trained(ours, LoraSpec(4, 8.0, dropout=0.5))
    ours.eval()  # dropout is for training alone
    attached = logits(ours)
    other = Transformer(ours.spec)
    other.load_state_dict(dict(MergedState(ours)))
    assert close(logits(other), attached)
    merge_lora(ours)
    assert not adapters(ours)
    assert all(torch.equal(*pair) for pair in zip(ours.state_dict().values(), other.state_dict().values(), strict=True))


def test_training_reaches_the_adapters_alone() -> None:
    ours = ours_of(reference_of(TINY["llama"]), TINY["llama"])
    trained(ours, LoraSpec(4, 8.0, ("gate", "k")))
    loss, _ = ours(TOKENS, packed(23), some_tokens(23, seed=2))
    loss.backward()
    for name, parameter in ours.named_parameters():
        assert (parameter.grad is not None) == (name in lora_state(ours)), name
    assert all(parameter.grad.abs().max() > 0 for parameter in lora_state(ours).values() if parameter.grad is not None)


def test_adapters_start_without_effect_and_the_same_everywhere() -> None:
    ours = ours_of(reference_of(TINY["llama"]), TINY["llama"])
    before = logits(ours)
    attach_lora(ours, LoraSpec(4, 8.0), seed=9)
    assert torch.equal(logits(ours), before)
    meta = Transformer(ours.spec, "meta")
    attach_lora(meta, LoraSpec(4, 8.0), seed=9)
    for name, parameter in lora_state(meta).items():
        assert parameter.is_meta
        assert torch.equal(meta.initial_value(name, parameter.shape, 9), lora_state(ours)[name])
    a = initial_adapter_value("layers.0.attention.q.adapter.a", torch.Size((64, 256)), 0)
    assert a.abs().max() <= 1 / 16 and a.std() == pytest.approx(1 / 16 / 3**0.5, rel=0.05)


def test_an_adapter_of_another_precision() -> None:
    ours = ours_of(reference_of(TINY["llama"]), TINY["llama"]).bfloat16()
    attach_lora(ours, LoraSpec(4, 8.0), dtype=torch.float32)
    assert {parameter.dtype for parameter in lora_state(ours).values()} == {torch.float32}
    assert logits(ours).dtype == torch.bfloat16


def test_targets() -> None:
    model = Transformer(ours_of(reference_of(TINY["llama"]), TINY["llama"]).spec, "meta")
    assert len(target_names(model, ("all",))) == 3 * 7
    assert target_names(model, ("layers.1.attention.*",)) == [f"layers.1.attention.{part}" for part in "qkvo"]
    assert target_names(model, ("q_proj", "q")) == [f"layers.{layer}.attention.q" for layer in range(3)]
    for target, words in (
        ("gat", "did you mean 'gate'"),
        ("head", "matches no linear layer"),
        ("lm_head", "matches no"),
    ):
        with pytest.raises(UserError, match=words):
            target_names(model, (target,))
    with pytest.raises(UserError, match="at least one"):
        target_names(model, ())
    attach_lora(model, LoraSpec())
    with pytest.raises(UserError, match="already has an adapter"):
        attach_lora(model, LoraSpec())
    for wrong in ({"rank": 0}, {"alpha": -1.0}, {"dropout": 1.0}):
        with pytest.raises(UserError, match="positive rank and alpha"):
            LoraSpec(**wrong)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    ours = ours_of(reference_of(TINY["llama"]), TINY["llama"])
    trained(ours, LoraSpec(4, 8.0, ("q",)))
    save_adapter(tmp_path, ours)
    return tmp_path


def refused(folder: Path, words: str, name: str = "llama") -> None:
    model = ours_of(reference_of(TINY[name]), TINY[name])
    with pytest.raises(UserError) as error:
        load_adapter(model, folder)
    assert words in str(error.value) and "\n" not in str(error.value), error.value
    assert not adapters(model)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"use_dora": True}, "use_dora is not supported"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
        ({"r": 0}, "r must be a positive number"),
        ({"r": 5}, "instead of [5, 48]"),
        ({"lora_alpha": "8"}, "lora_alpha must be"),
        ({"rank_pattern": {"(": 3}}, "invalid pattern"),
        ({"future_switch": 1}, "future_switch is not supported"),
    ],
)
def test_adapter_configs_that_mean_something_else(changes: dict[str, Any], words: str, saved: Path) -> None:
    path = saved / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    refused(saved, words)


def test_adapters_that_do_not_fit(saved: Path) -> None:
    refused(saved, "instead of [4, 45]", name="llama-odd")
    file = saved / "adapter_model.safetensors"
    good = load_file(file)
    save_file({key.replace("layers", "blocks"): tensor for key, tensor in good.items()}, file)
    refused(saved, "belongs to no linear layer of this llama model")
    save_file({key: tensor for key, tensor in good.items() if "1.self_attn.q_proj.lora_B" not in key}, file)
    refused(saved, "model.layers.1.self_attn.q_proj lacks one of")
    save_file({}, file)
    refused(saved, "it would change nothing")
    file.unlink()
    refused(saved, "has no adapter_model.safetensors")
    (saved / "adapter_config.json").unlink()
    refused(saved, "has no adapter_config.json")
    with pytest.raises(UserError, match="no LoRA adapter to save"):
        save_adapter(saved, ours_of(reference_of(TINY["llama"]), TINY["llama"]))
