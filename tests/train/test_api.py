"""Training as a function and as a verb, in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist
import yaml

import treadle
from tests.train.runs import metrics, run_settings
from treadle.cli import main
from treadle.config import UserError, parse_settings
from treadle.train.settings import RunSettings


def test_the_function_takes_a_file_nested_data_or_settings(tmp_path: Path, run_corpus: Path) -> None:
    tree = run_settings(tmp_path / "a", run_corpus, train={"steps": 2}, schedule={"warmup_steps": 0})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**tree, "run": str(tmp_path / "b")}))
    folders = [
        treadle.train(tree),
        treadle.train(tmp_path / "run.yaml"),
        treadle.train(parse_settings(RunSettings, {**tree, "run": str(tmp_path / "c")})),
    ]
    assert [folder.resolve().name for folder in folders] == ["step-00000002"] * 3
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b") == metrics(tmp_path / "c")
    assert treadle.train(tree, ["train.steps=3"]).resolve().name == "step-00000003"
    assert tree["train"]["steps"] == 2
    # The process group that a run makes for itself ends with it.
    assert not dist.is_initialized()
    model = treadle.load(folders[0])
    assert model.tokenizer is not None and len(model.generate("import", max_tokens=3).tokens) <= 3


def test_the_verb_tells_how_it_ended(tmp_path: Path, run_corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = run_settings(tmp_path / "run", run_corpus, train={"steps": 2}, schedule={"warmup_steps": 0})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(SystemExit) as end:
        main(["train", str(tmp_path / "run.yaml"), "optimizer.lr=0.02", "--json"])
    assert end.value.code == 0
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["step"] == 2 and "all 2 steps" in outcome["reason"] and outcome["tokens_per_second"] > 0
    assert outcome["validation_loss"] == pytest.approx(metrics(tmp_path / "run")[-1]["validation_loss"])
    saved = yaml.safe_load((tmp_path / "run" / "settings.yaml").read_text())
    assert saved["optimizer"]["lr"] == 0.02 and saved["optimizer"]["eps"] == 1e-8


def test_a_launchers_ranks_and_nproc_must_agree(
    tmp_path: Path, run_corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="nproc=2, but the launcher started 4 ranks"):
        treadle.train(run_settings(tmp_path / "run", run_corpus, nproc=2))
    for name, value, says in (
        ("RANK", "node-3", "RANK=node-3, which is no whole number; start it through a launcher such as torchrun"),
        ("WORLD_SIZE", "-1", "WORLD_SIZE=-1, which is no whole number"),
        ("LOCAL_RANK", "", "LOCAL_RANK=, which is no whole number"),
        ("RANK", "4", "RANK=4 of WORLD_SIZE=4, but ranks count from 0"),
    ):
        with monkeypatch.context() as patch, pytest.raises(UserError, match=says):
            patch.setenv(name, value)
            treadle.train(run_settings(tmp_path / "run", run_corpus))
    assert not (tmp_path / "run").exists()
