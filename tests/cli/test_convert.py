"""`treadle convert` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_models import TINY, ours_of, packed, reference_of, some_tokens
from treadle.cli import main
from treadle.model.lora import LoraSpec, adapters, attach_lora
from treadle.weights.adapter import save_adapter
from treadle.weights.load import load_model
from treadle.weights.save import save_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    ours = ours_of(reference_of(TINY["qwen3"]), TINY["qwen3"])
    folder = tmp_path / "model"
    folder.mkdir()
    save_model(folder, ours.spec, ours.state_dict(), generation={"temperature": 0.4})
    return folder


def treadle(*words: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return ended.value.code if isinstance(ended.value.code, int) else 1


def test_another_dtype_and_sharding(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert treadle("convert", model, out, "--dtype", "bf16", "--shard-gib", "0.001", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["family"], said["dtype"], said["folder"]) == ("qwen3", "bfloat16", str(out))
    theirs, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, dtype="auto")
    assert not any(info.values()), info
    assert theirs.dtype == torch.bfloat16
    assert theirs.generation_config.temperature == 0.4
    original = load_model(model)
    for one, other in zip(original.parameters(), load_model(out).parameters(), strict=True):
        assert torch.equal(one.bfloat16(), other)


def test_a_merged_adapter(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapted = load_model(model)
    attach_lora(adapted, LoraSpec(2, 4.0, ("q", "down")))
    for adapter in adapters(adapted).values():
        torch.nn.init.normal_(adapter.b, generator=torch.Generator().manual_seed(0))
    (tmp_path / "adapter").mkdir()
    save_adapter(tmp_path / "adapter", adapted)
    assert treadle("convert", model, tmp_path / "out", "--adapter", tmp_path / "adapter", "-v") == 0
    said = capsys.readouterr()
    assert "adapter merged into 6 layers" in said.out and "no tokenizer" in said.out
    assert "each consumed once" in said.err
    tokens = some_tokens(9)
    with torch.no_grad():
        expected, merged = adapted(tokens, packed(9)), load_model(tmp_path / "out")(tokens, packed(9))
    assert (merged - expected).abs().max() <= 1e-5 * (expected.max() - expected.min())


def test_mistakes_leave_nothing_behind(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    cases = [
        (("convert", model, tmp_path / "full"), "already exists"),
        (("convert", model, model), "already exists"),
        (("convert", tmp_path / "absent", tmp_path / "out"), "does not exist"),
        (("convert", model, tmp_path / "out", "--dtype", "int4"), "unknown dtype 'int4'"),
        (("convert", model, tmp_path / "out", "--adapter", model), "has no adapter_config.json"),
    ]
    for words, message in cases:
        assert treadle(*words) == 2
        said = capsys.readouterr().err
        assert message in said and said.count("\n") == 1, said
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    assert treadle("convert", model, tmp_path / "out") == 2
    assert "is cut short" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "model"]
