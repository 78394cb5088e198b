"""Every family saved by us and loaded by Transformers, and the other way round: the same logits, no key left over."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers
from transformers import AutoModelForCausalLM, GenerationConfig

from tests.tiny_models import TINY, ours_of, packed, reference_of, some_tokens, tiny
from treadle.config import UserError
from treadle.model.families import family_of, read_spec
from treadle.model.tokenizer import Tokenizer
from treadle.model.transformer import Transformer
from treadle.weights.ledger import LoadReport
from treadle.weights.load import load_model, load_tokenizer, stream_model
from treadle.weights.save import plan_shards, save_model

LENGTH = 23
ONE_EACH = ["llama", "llama-odd", "smollm3", "mistral", "qwen2-window", "qwen3-odd", "gemma2", "gemma3_text-odd"]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}  # of the spread: a few roundings


def saved_by_us(folder: Path, name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Transformer:
    model = ours_of(reference_of(TINY[name]), TINY[name]).requires_grad_(False)
    folder.mkdir()
    save_model(folder, model.spec, dict(model.named_parameters()), dtype=dtype, **options)
    return model.to(dtype)


@pytest.mark.parametrize("name", TINY)
def test_what_we_save_transformers_loads(name: str, tmp_path: Path) -> None:
    ours = saved_by_us(tmp_path / "model", name)
    theirs, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", output_loading_info=True, attn_implementation="eager", dtype="auto"
    )
    assert not any(info.values()), info
    tokens = some_tokens(LENGTH)
    with torch.no_grad():
        expected, logits = theirs(tokens[None]).logits[0], ours(tokens, packed(LENGTH))
    assert expected.dtype == torch.float32
    assert (logits - expected).abs().max() <= 1e-5 * (expected.max() - expected.min())
    again = load_model(tmp_path / "model")
    assert again.spec == ours.spec
    for (our_name, one), (_, other) in zip(ours.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(one, other), our_name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ONE_EACH)
def test_other_dtypes(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    ours = saved_by_us(tmp_path / "model", name, dtype)
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {dtype}
    again = load_model(tmp_path / "model")
    assert all(torch.equal(*pair) for pair in zip(ours.parameters(), again.parameters(), strict=True))
    theirs, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", output_loading_info=True, attn_implementation="eager", dtype="auto"
    )
    assert not any(info.values()), info
    assert theirs.dtype == dtype
    tokens = some_tokens(LENGTH)
    with torch.no_grad():
        expected, logits = theirs(tokens[None]).logits[0].float(), again(tokens, packed(LENGTH)).float()
    assert (logits - expected).abs().max() <= TOLERANCE[dtype] * (expected.max() - expected.min())


@pytest.mark.parametrize("name", TINY)
def test_what_transformers_saves_we_load(name: str, tmp_path: Path) -> None:
    reference = reference_of(TINY[name])
    reference.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    reports: list[LoadReport] = []
    ours = load_model(tmp_path, report=reports.append)
    tokens = some_tokens(LENGTH)
    with torch.no_grad():
        expected, logits = reference(tokens[None]).logits[0], ours(tokens, packed(LENGTH))
    assert (logits - expected).abs().max() <= 1e-5 * (expected.max() - expected.min())
    assert reports[0].parameters == sum(parameter.numel() for parameter in reference.parameters())
    assert reports[0].bytes_read == 4 * reports[0].parameters
    assert not any(parameter.requires_grad for parameter in ours.parameters())


def test_shards_hold_what_the_index_says(tmp_path: Path) -> None:
    ours = saved_by_us(tmp_path / "model", "llama", shard_bytes=20_000)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    found: dict[str, str] = {}
    for file in sorted((tmp_path / "model").glob("*.safetensors")):
        tensors = load_file(file)
        found |= dict.fromkeys(tensors, file.name)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 20_000
    assert found == index["weight_map"]
    assert index["metadata"]["total_size"] == 4 * ours.spec.parameters_count()
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(info.values()), info
    again = load_model(tmp_path / "model")
    assert all(torch.equal(*pair) for pair in zip(ours.parameters(), again.parameters(), strict=True))


def test_plan_of_shards() -> None:
    shapes = {"a": (4,), "b": (100,), "c": (2,), "d": (3,)}
    assert [list(shard) for shard in plan_shards(shapes, 4, 24)] == [["a"], ["b"], ["c", "d"]]
    assert [list(shard) for shard in plan_shards(shapes, 4, 1 << 20)] == [["a", "b", "c", "d"]]


def test_state_may_come_one_by_one_in_any_order(tmp_path: Path) -> None:
    model = ours_of(reference_of(TINY["qwen2"]), TINY["qwen2"])
    pairs = list(model.named_parameters())
    save_model(tmp_path, model.spec, ((name, tensor) for name, tensor in reversed(pairs)), shard_bytes=30_000)
    again = load_model(tmp_path)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("change", ["missing", "extra", "twice", "shape"])
def test_a_state_that_is_not_the_specs(change: str, tmp_path: Path) -> None:
    model = ours_of(reference_of(TINY["llama"]), TINY["llama"])
    pairs = list(model.named_parameters())
    match change:
        case "missing":
            pairs.pop()
        case "extra":
            pairs.append(("layers.9.mlp.gate.weight", torch.zeros(2)))
        case "twice":
            pairs.append(pairs[0])
        case "shape":
            pairs[3] = (pairs[3][0], torch.zeros(2))
    with pytest.raises(ValueError, match=r"head\.weight|layers\.9|written twice|shape"):
        save_model(tmp_path, model.spec, pairs)


def test_a_model_of_integers_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="float32, bfloat16 or float16, not int8"):
        save_model(tmp_path, read_spec(TINY["llama"]), {"norm.weight": torch.zeros(3, dtype=torch.int8)})


def test_the_tokenizer_decides_the_special_tokens(tmp_path: Path) -> None:
    backend = Backend(models.WordLevel({"a": 0, "b": 1, "<s>": 2, "</s>": 3, "<end>": 4, "<u>": 5}, unk_token="<u>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>", "</s>", "<end>"])
    tokenizer = Tokenizer(backend, bos_token="<s>", eos_token="</s>", extra_eos_ids=[4])
    model = ours_of(reference_of(TINY["llama"]), TINY["llama"])
    save_model(tmp_path, model.spec, model.state_dict(), tokenizer=tokenizer, generation={"temperature": 0.6})
    generation = GenerationConfig.from_pretrained(tmp_path)
    assert (generation.bos_token_id, generation.eos_token_id, generation.temperature) == (2, [3, 4], 0.6)
    config = AutoModelForCausalLM.from_pretrained(tmp_path).config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (2, [3, 4], None)
    loaded = load_tokenizer(tmp_path, vocabulary=101)
    assert loaded is not None and loaded.eos_ids == (3, 4)
    assert loaded.encode("a b") == tokenizer.encode("a b")
    with pytest.raises(UserError, match="6 tokens but the embedding has 5 rows"):
        load_tokenizer(tmp_path, vocabulary=5)


@pytest.mark.parametrize("pad", [-1, 101, "2", [3, 500]])
def test_special_tokens_that_are_none(pad: Any, tmp_path: Path) -> None:
    spec = read_spec(tiny("llama", pad_token_id=pad))
    model = Transformer(spec)
    model.initialize(seed=0)
    save_model(tmp_path, spec, model.state_dict())
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.pad_token_id is None


def test_a_family_default_beyond_the_vocabulary_is_not_saved(tmp_path: Path) -> None:
    """SmolLM3's default padding token is 128004, which Transformers refuses for a smaller vocabulary."""
    config = tiny("smollm3")
    for role in ("pad_token_id", "bos_token_id", "eos_token_id"):
        del config[role]
    spec = read_spec(config)
    model = Transformer(spec)
    model.initialize(seed=0)
    save_model(tmp_path, spec, model.state_dict())
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info


def test_no_tokenizer_is_none(tmp_path: Path) -> None:
    saved_by_us(tmp_path / "model", "llama")
    assert load_tokenizer(tmp_path / "model") is None


def test_dtype_asked_for_and_dtype_of_most_bytes(tmp_path: Path) -> None:
    saved_by_us(tmp_path / "model", "llama", torch.bfloat16)
    assert load_model(tmp_path / "model", torch.float32).embedding.weight.dtype == torch.float32
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    mixed = {name: tensor.float() if "norm" in name else tensor for name, tensor in tensors.items()}
    save_file(mixed, file, {"format": "pt"})
    model = load_model(tmp_path / "model")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    with pytest.raises(UserError, match="cannot be computed in int8"):
        load_model(tmp_path / "model", torch.int8)


def test_values_that_fp16_cannot_hold(tmp_path: Path) -> None:
    saved_by_us(tmp_path / "model", "llama")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][2, 3] = 1e6
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj\.weight' has values too large for float16"):
        load_model(tmp_path / "model", torch.float16)


def test_stream_gives_every_parameter(tmp_path: Path) -> None:
    ours = saved_by_us(tmp_path / "model", "gemma2", generation={"top_k": 7})
    reports: list[LoadReport] = []
    stream = stream_model(tmp_path / "model", torch.float64, reports.append)
    assert (stream.spec, stream.dtype, stream.generation["top_k"]) == (ours.spec, torch.float64, 7)
    found = dict(stream.parameters)
    assert all(torch.equal(found.pop(name), tensor.double()) for name, tensor in ours.named_parameters())
    assert not found
    assert reports[0].parameters == ours.spec.parameters_count()


def test_gemma3_with_images_loads_as_text(tmp_path: Path) -> None:
    ours = saved_by_us(tmp_path / "model", "gemma3_text")
    file, config = tmp_path / "model" / "model.safetensors", tmp_path / "model" / "config.json"
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(file).items()}
    tensors["vision_tower.vision_model.post_layernorm.weight"] = torch.ones(3)
    tensors["multi_modal_projector.mm_soft_emb_norm.weight"] = torch.ones(3)
    save_file(tensors, file, {"format": "pt"})
    text = json.loads(config.read_text())
    config.write_text(json.dumps({"model_type": "gemma3", "text_config": text, "vision_config": {}}))
    reports: list[LoadReport] = []
    again = load_model(tmp_path / "model", report=reports.append)
    assert again.spec == ours.spec
    assert len(reports[0].unused) == 2
    assert all(torch.equal(*pair) for pair in zip(ours.parameters(), again.parameters(), strict=True))
    (tmp_path / "text").mkdir()
    save_model(tmp_path / "text", again.spec, again.state_dict())
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "text", output_loading_info=True)
    assert not any(info.values()), info


def test_a_checkpoint_without_its_prefix_and_with_old_leftovers(tmp_path: Path) -> None:
    ours = saved_by_us(tmp_path / "model", "qwen3-odd")
    file = tmp_path / "model" / "model.safetensors"
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(3)
    save_file(tensors, file, {"format": "pt"})
    again = load_model(tmp_path / "model")
    assert all(torch.equal(*pair) for pair in zip(ours.parameters(), again.parameters(), strict=True))


def test_names_of_the_reference_are_all_used() -> None:
    for config in TINY.values():
        spec = read_spec(config)
        assert set(family_of(config).names(spec)) == {name for name, _ in Transformer(spec, "meta").named_parameters()}


PEAK = """
import resource, sys, torch
from treadle.weights.load import load_model
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
load_model(sys.argv[1])
before = peak()
model = load_model(sys.argv[2])
print(before, peak(), sum(parameter.nbytes for parameter in model.parameters()))
"""


def test_peak_memory_is_about_the_models_size(tmp_path: Path) -> None:
    saved_by_us(tmp_path / "small", "llama")
    spec = read_spec(tiny("llama", hidden_size=1024, intermediate_size=4096, num_hidden_layers=12, vocab_size=8192))
    (tmp_path / "big").mkdir()
    shapes = Transformer(spec, "meta").named_parameters()
    save_model(tmp_path / "big", spec, ((name, torch.zeros(tensor.shape)) for name, tensor in shapes))
    out = subprocess.run(
        [sys.executable, "-c", PEAK, tmp_path / "small", tmp_path / "big"], capture_output=True, text=True, check=True
    )
    before, after, size = map(int, out.stdout.split())
    assert size > 600 << 20
    # Beside the model: the tensors that are being copied, at most 32 MiB on each of the few threads.
    assert after - before < 1.25 * size, (after - before) / size
