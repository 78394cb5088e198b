"""The Python face: load, look, generate, save."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import treadle
from tests.weights.gguf_files import smollm2
from treadle.config import UserError
from treadle.model.context import PackedContext
from treadle.serve.model import Model, parse_dtype
from treadle.train.held_out import HeldOut
from treadle.weights import gguf
from treadle.weights.safetensors_file import SafetensorsFile


def test_what_is_saved_loads_again_and_is_the_same(model: Model, tmp_path: Path) -> None:
    model.save(tmp_path / "saved")
    again = treadle.load(tmp_path / "saved")
    assert again.spec == model.spec and again.dtype == torch.float32 and again.tokenizer is not None
    assert model.tokenizer is not None and again.tokenizer.fingerprint == model.tokenizer.fingerprint
    tokens = again.tokenizer.encode("def read")
    assert torch.equal(again.logits(tokens), model.logits(tokens))
    assert str(again.generate("def", temperature=0, max_tokens=9)) == str(
        model.generate("def", temperature=0, max_tokens=9)
    )
    assert treadle.load(tmp_path / "saved", dtype="bf16").dtype == torch.bfloat16
    with pytest.raises(UserError, match="already exists"):
        model.save(tmp_path / "saved")


def test_a_model_on_disk_is_opened_once(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model.save(tmp_path / "saved")
    opened: list[Path] = []
    open_file, open_gguf = SafetensorsFile.__init__, gguf._open_one

    def noted(self: SafetensorsFile, path: Path) -> None:
        opened.append(path)
        open_file(self, path)

    monkeypatch.setattr(SafetensorsFile, "__init__", noted)
    monkeypatch.setattr(gguf, "_open_one", lambda path, *rest: opened.append(path) or open_gguf(path, *rest))
    treadle.load(tmp_path / "saved")
    HeldOut(tmp_path / "saved")
    treadle.load(smollm2())
    assert opened == [tmp_path / "saved" / "model.safetensors"] * 2 + [smollm2()]


def test_transformers_loads_what_is_saved(model: Model, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model.save(tmp_path / "saved")
    theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokens = AutoTokenizer.from_pretrained(tmp_path / "saved")("def read(path)")["input_ids"]
    assert model.tokenizer is not None and tokens == model.tokenizer.encode("def read(path)")
    expected = theirs(torch.tensor([tokens])).logits[0]
    # fp32, other order of sums; the logits' spread is about 1.
    torch.testing.assert_close(model.logits(tokens), expected, atol=1e-5, rtol=1e-5)


def test_logits_take_lists_and_tensors_of_one_sequence(model: Model) -> None:
    expected = model.module(torch.tensor([3, 1, 4]), PackedContext.of_lengths([3]))
    for tokens in ([3, 1, 4], torch.tensor([3, 1, 4]), torch.tensor([3, 1, 4], dtype=torch.int32)):
        logits = model.logits(tokens)
        assert torch.equal(logits, expected) and logits.shape == (3, 300) and not logits.requires_grad
    for wrong in ([], [300], [-1], torch.tensor([[1, 2]]), [0.5], torch.tensor([1.0])):
        with pytest.raises(UserError):
            model.logits(wrong)


def test_generate_follows_the_modules_weights(model: Model) -> None:
    """Nothing of an earlier call is kept: a module that was trained on in between is what generates."""
    import copy

    changed = Model(copy.deepcopy(model.module), model.tokenizer)
    before = changed.generate([1, 2, 3], temperature=0, max_tokens=8, ignore_eos=True).tokens
    assert before == model.generate(torch.tensor([1, 2, 3]), temperature=0, max_tokens=8, ignore_eos=True).tokens
    with torch.no_grad():
        for parameter in changed.module.parameters():
            parameter.copy_(parameter.flip(0))
    assert changed.generate([1, 2, 3], temperature=0, max_tokens=8, ignore_eos=True).tokens != before


def test_generate_takes_seeds_and_says_what_it_cannot_do(model: Model) -> None:
    once, again, other = (model.generate("def", seed=seed, max_tokens=16, ignore_eos=True) for seed in (1, 1, 2))
    assert once == again != other
    with pytest.raises(UserError, match="did you mean 'max_tokens'"):
        model.generate("def", max_token=3)
    with pytest.raises(UserError, match="Engine"):
        model.generate("def", n=2)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("float32", torch.float32), ("auto", None)])
def test_dtypes_by_name(name: str, dtype: torch.dtype | None) -> None:
    assert parse_dtype(name) is dtype and parse_dtype(dtype) is dtype


def test_wrong_dtypes_devices_and_paths_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'bfloat16'"):
        treadle.load(tmp_path, dtype="bfloat")
    with pytest.raises(UserError, match="int8"):
        treadle.load(tmp_path, dtype=torch.int8)
    with pytest.raises(UserError, match="'qpu'"):
        treadle.load(tmp_path, device="qpu")
    with pytest.raises(UserError, match="nothing-here"):
        treadle.load(tmp_path / "nothing-here")
