"""The account of tensors: what is missing, unexpected, twice, of a wrong shape or tied is named before anything is
read, and a broken model directory ends in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny_models import TINY, tiny
from treadle.config import UserError
from treadle.model.families import read_spec
from treadle.model.transformer import Transformer
from treadle.weights.ledger import LoadReport
from treadle.weights.load import load_model
from treadle.weights.save import save_model

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tied Llama, untied by nothing yet."""
    return model_in(tmp_path / "model", "llama-odd")


def model_in(folder: Path, name: str, shard_bytes: int = 1 << 30) -> Path:
    spec = read_spec(TINY[name])
    model = Transformer(spec)
    model.initialize(seed=3)
    folder.mkdir()
    save_model(folder, spec, model.state_dict(), shard_bytes=shard_bytes)
    return folder


def edit(folder: Path, change: Callable[[dict[str, Tensor]], None], file: str = "model.safetensors") -> None:
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file, {"format": "pt"})


def configure(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(UserError) as error:
        load_model(folder)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_a_missing_tensor_is_named(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.pop(UP))
    refused(folder, "1 tensor is missing", UP, str(folder))


def test_an_unexpected_tensor_is_named(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"model.layers.1.mlp.extra.weight": torch.ones(3)}))
    refused(folder, "1 tensor is unexpected", "model.layers.1.mlp.extra.weight")


def test_a_layer_too_many_and_one_too_few(folder: Path) -> None:
    configure(folder, num_hidden_layers=2)
    refused(folder, "16 tensors are unexpected", "model.layers.2.input_layernorm.weight", "and 12 more")
    configure(folder, num_hidden_layers=4)
    refused(folder, "16 tensors are missing", "model.layers.3.")


def test_a_wrong_shape_is_shown_with_the_right_one(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({UP: torch.ones(5, 45)}))
    refused(folder, "1 tensor is of a wrong shape", f"{UP}: [5, 45] instead of [76, 45]")
    edit(folder, lambda tensors: tensors.update({UP: torch.ones(45, 76)}))
    refused(folder, f"{UP}: [45, 76] instead of [76, 45]")


def test_a_vocabulary_that_is_not_the_embeddings(folder: Path) -> None:
    configure(folder, vocab_size=102)
    refused(folder, "model.embed_tokens.weight: [101, 45] instead of [102, 45]")


def test_another_familys_config(folder: Path) -> None:
    configure(folder, model_type="qwen3", mlp_bias=None)
    refused(folder, "mlp_bias")


def test_tied_head_stored_and_equal(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    reports: list[LoadReport] = []
    model = load_model(folder, report=reports.append)
    assert model.head is None
    assert "stored too, and equal" in str(reports[0])


def test_tied_head_stored_and_different(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}))
    refused(folder, "'lm_head.weight' and 'model.embed_tokens.weight' differ", "set tie_word_embeddings to false")
    configure(folder, tie_word_embeddings=False)
    assert load_model(folder).head is not None


def test_tied_head_in_place_of_the_embedding(folder: Path) -> None:
    expected = load_model(folder).embedding.weight
    edit(folder, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    assert torch.equal(load_model(folder).embedding.weight, expected)


def test_untied_without_a_head(folder: Path) -> None:
    configure(folder, tie_word_embeddings=False)
    refused(folder, "lm_head.weight", "tie_word_embeddings true")


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    folder = model_in(tmp_path / "model", "llama", shard_bytes=30_000)
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    name = next(iter(load_file(first)))
    edit(folder, lambda tensors: tensors.update({name: torch.ones(2)}), second.name)
    refused(folder, f"holds tensor '{name}' twice", first.name, second.name)


def test_a_tensor_that_the_index_does_not_know(tmp_path: Path) -> None:
    folder = model_in(tmp_path / "model", "llama", shard_bytes=30_000)
    last = sorted(folder.glob("*.safetensors"))[-1]
    edit(folder, lambda tensors: tensors.update({"stray": torch.ones(2)}), last.name)
    refused(folder, "1 tensor is unexpected (stray)")


def test_an_index_that_lies(tmp_path: Path) -> None:
    folder = model_in(tmp_path / "model", "llama", shard_bytes=30_000)
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    for map_, words in (
        ({"a": "../x.safetensors"}, "leads out of the folder"),
        ({"a": "/etc/x.safetensors"}, "leads out of the folder"),
        ({"a": "..\\x.safetensors"}, "leads out of the folder"),
        ({"a": "x.bin"}, "not a safetensors file"),
        ({"a": "absent.safetensors"}, "absent.safetensors is missing"),
        ({"a": 3}, "no weight_map"),
        ({}, "no weight_map"),
        ({**good["weight_map"], "ghost": next(iter(good["weight_map"].values()))}, "lacks tensor 'ghost'"),
    ):
        index.write_text(json.dumps({"weight_map": map_}))
        refused(folder, words)
    index.write_text("{")
    refused(folder, "index.json is not valid JSON")
    index.unlink()
    refused(folder, "neither model.safetensors nor model.safetensors.index.json", "download the index too")


def test_links_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    folder = model_in(tmp_path / "blobs", "llama", shard_bytes=30_000)
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in folder.iterdir():
        (snapshot / file.name).symlink_to(file)
    load_model(snapshot)


def test_folders_that_hold_no_model(tmp_path: Path) -> None:
    refused(tmp_path, "has no config.json", "give a Hugging Face directory")
    refused(tmp_path / "absent", "does not exist")
    (tmp_path / "m.gguf").touch()
    refused(tmp_path, "m.gguf")
    (tmp_path / "m.gguf").unlink()
    (tmp_path / "adapter_config.json").write_text("{}")
    refused(tmp_path, "LoRA adapter")
    folder = model_in(tmp_path / "model", "llama")
    refused(folder / "model.safetensors", "give the folder")
    (folder / "model.safetensors").unlink()
    refused(folder, "download the model's weights")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    refused(folder, "pytorch_model.bin is a pickle", "never is")


def test_config_files_that_cannot_be_read(folder: Path) -> None:
    path = folder / "config.json"
    for content, words in (
        (b"", "not valid JSON"),
        (b"{'a': 1}", "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b"[]", "must hold a JSON object"),
        (b"[" * 100_000, "not valid JSON"),
        (b"{}", "no model_type"),
        (b'{"model_type": "lama"}', "did you mean 'llama'"),
        (b'{"model_type": "llama", "num_hidden_layers": 1000000000000}', "num_hidden_layers"),
    ):
        path.write_bytes(content)
        refused(folder, words)
    with path.open("wb") as file:
        file.truncate(65 << 20)
    refused(folder, "too large")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantized_tensors_are_refused(dtype: torch.dtype, folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({UP: tensors[UP].to(dtype)}))
    refused(folder, UP, "which is not supported", "float32, bfloat16 or float16")


def test_a_file_cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for length in (0, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        refused(folder, "model.safetensors")


def test_report_in_words(folder: Path) -> None:
    reports: list[LoadReport] = []
    load_model(folder, torch.bfloat16, report=reports.append)
    text = str(reports[0])
    assert "llama" in text and "computed in bfloat16" in text and "F32" in text and "each consumed once" in text
    assert tiny("llama")["vocab_size"] == 101
