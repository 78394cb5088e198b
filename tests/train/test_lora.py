"""Low-rank fine-tuning: only adapters move, the checkpoint is the merged model, PEFT reads the adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.train.runs import go, metrics, run_settings, tensors
from treadle.config import UserError, parse_settings
from treadle.train.build import check_run
from treadle.train.feed import open_feed
from treadle.train.settings import RunSettings


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, run_corpus: Path) -> Path:
    """A model to fine-tune: the checkpoint of a short run."""
    return go(run_settings(tmp_path_factory.mktemp("base") / "run", run_corpus)).checkpoint.resolve()


def tuned(run: Path, corpus: Path, base: Path, **changes: Any) -> dict[str, Any]:
    lora = {"rank": 3, "alpha": 12, "targets": ["q", "v", "down"], "dropout": 0.1}
    tree = run_settings(run, corpus, **changes)
    tree["model"] = {"from": str(base), "lora": lora}
    return tree


def test_only_adapters_move_and_the_merged_checkpoint_is_what_peft_computes(
    tmp_path: Path, run_corpus: Path, base: Path
) -> None:
    folder = go(tuned(tmp_path / "run", run_corpus, base, data={"seed": 3})).checkpoint
    before, after = load_file(base / "model.safetensors"), load_file(folder / "model.safetensors")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {
        f"model.layers.{layer}.{part}.weight"
        for layer in range(2)
        for part in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
    }
    tokens = torch.arange(3, 43)[None]
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(base)
        theirs = PeftModel.from_pretrained(plain, folder / "adapter")(input_ids=tokens).logits
        merged = AutoModelForCausalLM.from_pretrained(folder)(input_ids=tokens).logits
    # The same product, added before or after the multiplication with the input: fp32 rounding.
    assert torch.allclose(theirs, merged, atol=1e-5 * float(merged.std()))


def test_a_resumed_adapter_run_is_the_whole_one_bit_for_bit(tmp_path: Path, run_corpus: Path, base: Path) -> None:
    go(tuned(tmp_path / "whole", run_corpus, base))
    go(tuned(tmp_path / "halves", run_corpus, base), interrupt_at=3)
    go(tuned(tmp_path / "halves", run_corpus, base))
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "halves")
    last = Path("checkpoints") / "step-00000006"
    whole, halves = tensors(tmp_path / "whole" / last), tensors(tmp_path / "halves" / last)
    assert whole.keys() == halves.keys() and any("adapter_model" in name for name in whole)
    assert all(torch.equal(whole[name], halves[name]) for name in whole)


def _go(tree: dict[str, Any]) -> None:
    go(tree)


def test_two_ranks_train_the_adapter_that_one_would(tmp_path: Path, run_corpus: Path, base: Path, ranks) -> None:
    quiet = {"train": {"precision": "fp32"}}
    trees = [tuned(tmp_path / name, run_corpus, base, **quiet) for name in ("one", "two")]
    for tree in trees:
        tree["model"]["lora"]["dropout"] = 0.0  # each rank drops what it likes
    go(trees[0])
    ranks(2).run(_go, trees[1])
    for a, b in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        if "loss" in a:
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
            assert a["gradient_norm"] == pytest.approx(b["gradient_norm"], rel=1e-4)
    one, two = (tensors(tmp_path / name / "checkpoints" / "latest") for name in ("one", "two"))
    for name in one:
        if name.startswith("model.safetensors"):
            assert (one[name] - two[name]).abs().max() < 1e-4


def test_full_fine_tuning_starts_from_the_model(tmp_path: Path, run_corpus: Path, base: Path) -> None:
    tree = run_settings(tmp_path / "run", run_corpus, train={"steps": 2})
    scratch = run_settings(tmp_path / "scratch", run_corpus, train={"steps": 2})
    tree["model"] = {"from": str(base)}
    go(tree)
    go(scratch)
    assert metrics(tmp_path / "run")[0]["loss"] < metrics(tmp_path / "scratch")[0]["loss"] - 0.1


def test_other_adapter_settings_on_resume_are_refused(tmp_path: Path, run_corpus: Path, base: Path) -> None:
    go(tuned(tmp_path / "run", run_corpus, base))
    tree = tuned(tmp_path / "run", run_corpus, base)
    tree["model"]["lora"]["rank"] = 4
    with pytest.raises(UserError, match=r"other model.lora settings \(rank differ"):
        go(tree)


def test_mistakes_are_named_before_anything_is_started(tmp_path: Path, run_corpus: Path, base: Path) -> None:
    tree = tuned(tmp_path / "run", run_corpus, base)
    tree["model"]["lora"]["targets"] = ["qq"]
    settings = parse_settings(RunSettings, tree)
    with pytest.raises(UserError, match="'qq' matches no linear layer"):
        check_run(settings, open_feed(settings.data), 1)
    with pytest.raises(UserError, match="lora adapts a model that is there; set from"):
        parse_settings(RunSettings, {**tree, "model": {"depth": 2, "lora": {}}})
    with pytest.raises(UserError, match="does not exist"):
        tree["model"] = {"from": "nowhere"}
        settings = parse_settings(RunSettings, tree)
        check_run(settings, open_feed(settings.data), 1)
