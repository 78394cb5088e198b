"""What the trainer does with checkpoints: resuming, refusing, finishing what it began."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.train.runs import TINY, run_settings, write_run_corpus
from treadle.config import TreadleError, UserError, parse_settings
from treadle.train.api import train
from treadle.train.checkpoints import latest_good, open_checkpoint, writer
from treadle.train.checkpoints.format import steps_in
from treadle.train.settings import RunSettings
from treadle.train.sinks import read_metrics


def short(run: Path, corpus: Path, steps: int = 6, **changes: Any) -> dict[str, Any]:
    return run_settings(run, corpus, train={"steps": steps}, schedule={"warmup_steps": 0}, **changes)


def test_a_checkpoint_that_was_begun_is_finished_when_the_run_fails(
    tmp_path: Path, run_corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, write = threading.Event(), writer.write_checkpoint

    def slow(folder: Path, content: writer.Content) -> None:
        gate.wait(20)
        write(folder, content)

    def steps_then_fail(run: Any) -> None:
        run.keeper.save(run.state)
        threading.Timer(0.2, gate.set).start()
        raise TreadleError("spike")

    monkeypatch.setattr(writer, "write_checkpoint", slow)
    monkeypatch.setattr("treadle.train.loop.Run._steps", steps_then_fail)
    tree = short(tmp_path, run_corpus, checkpoint={"asynchronous": True})
    with pytest.raises(TreadleError, match="spike"):
        train(tree)
    assert steps_in(tmp_path / "checkpoints") == [0]
    assert latest_good(tmp_path) is not None


def test_a_damaged_newest_costs_its_steps_and_no_more(
    tmp_path: Path, run_corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, harmed = (short(tmp_path / name, run_corpus, checkpoint={"every": 2}) for name in ("whole", "harmed"))
    train(whole)
    train(harmed, ["train.steps=4"])  # the schedule is another one, so these steps must be made again
    weights = tmp_path / "harmed" / "checkpoints" / "step-00000004" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    train(harmed)
    assert "step-00000004 is damaged: the content of model.safetensors" in capsys.readouterr().err
    assert steps_in(tmp_path / "harmed" / "checkpoints") == [4, 6]
    assert open_checkpoint(weights.parent).step == 4  # written anew
    steps = [record["step"] for record in read_metrics(tmp_path / "harmed" / "metrics.jsonl")]
    assert sorted(set(steps)) == [1, 2, 3, 4, 5, 6]


def test_another_model_in_the_same_folder_is_refused_before_anything_changes(tmp_path: Path, run_corpus: Path) -> None:
    train(short(tmp_path, run_corpus, steps=1))
    metrics = (tmp_path / "metrics.jsonl").read_bytes()
    other = short(tmp_path, run_corpus, model={"config": {**TINY, "intermediate_size": 96}}, steps=2)
    with pytest.raises(UserError, match=r"another model .intermediate_size 64 there, 96 here"):
        train(other)
    assert (tmp_path / "metrics.jsonl").read_bytes() == metrics
    assert steps_in(tmp_path / "checkpoints") == [1]


def test_another_tokenizer_in_the_same_folder_is_refused(tmp_path: Path, run_corpus: Path) -> None:
    config = {**TINY, "vocab_size": 512}
    train(short(tmp_path / "run", run_corpus, model={"config": config}, steps=1))
    smaller = write_run_corpus(tmp_path / "corpus", vocabulary_size=400)
    with pytest.raises(UserError, match="another tokenizer"):
        train(short(tmp_path / "run", smaller, model={"config": config}, steps=2))


def test_another_optimizer_in_the_same_folder_is_refused(tmp_path: Path, run_corpus: Path) -> None:
    train(short(tmp_path, run_corpus, steps=1, optimizer={"name": "muon"}))
    with pytest.raises(UserError, match="trained with the optimizer Muon, this run has AdamW; continue with that one"):
        train(short(tmp_path, run_corpus, steps=2))


def test_a_run_that_reached_its_target_is_found_finished(tmp_path: Path, run_corpus: Path) -> None:
    tree = short(tmp_path, run_corpus, evaluation={"every": 2}, stop={"target_loss": 100.0})
    for _ in range(2):
        train(tree)
        assert steps_in(tmp_path / "checkpoints") == [2]


def test_a_checkpoint_records_what_it_was_made_with(tmp_path: Path, run_corpus: Path) -> None:
    tree = short(tmp_path, run_corpus, steps=1)
    train(tree)
    state = open_checkpoint(tmp_path / "checkpoints" / "latest").state
    assert state["plan"] == {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "tp": 1}
    assert parse_settings(RunSettings, state["settings"]) == parse_settings(RunSettings, tree)


def test_the_cost_of_a_checkpoint_is_in_the_metrics(tmp_path: Path, run_corpus: Path) -> None:
    train(short(tmp_path, run_corpus, steps=4, checkpoint={"every": 2}))
    costs = [
        record.get("checkpoint_seconds") for record in read_metrics(tmp_path / "metrics.jsonl") if "loss" in record
    ]
    assert [cost is not None and cost > 0 for cost in costs] == [False, False, True, False]


@pytest.mark.parametrize("state", [{}, {"counters": {"steps": 1}}])
def test_state_of_another_version_is_named(
    tmp_path: Path, run_corpus: Path, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treadle.train.state.TrainState.scalars", lambda self: state)
    train(short(tmp_path, run_corpus, steps=1))
    with pytest.raises(TreadleError, match="made by another version"):
        train(short(tmp_path, run_corpus, steps=2))
