"""Runs from beginning to end: exact resume, policies in action, evaluation, what is left in the folder."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.train.runs import go, metrics, run_settings, tensors, write_run_corpus
from treadle.config import TreadleError, UserError
from treadle.train import precision
from treadle.train.feed import Feed, open_feed
from treadle.train.report import Reporter
from treadle.train.settings import DataSettings
from treadle.train.state import TrainState


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(
    ("optimizer", "dtype"), [("adamw", "fp32"), ("muon", "bf16"), ("adamw", "fp16")], ids=lambda value: str(value)
)
def test_half_the_steps_and_a_resume_are_all_the_steps_bit_for_bit(
    tmp_path: Path, run_corpus: Path, optimizer: str, dtype: str
) -> None:
    changes: dict[str, Any] = {
        "optimizer": {"name": optimizer},
        "train": {"precision": dtype, "microbatch_tokens": 192},
        "evaluation": {"every": 2},
    }
    whole = run_settings(tmp_path / "whole", run_corpus, **changes)
    halves = run_settings(tmp_path / "halves", run_corpus, **changes)
    assert go(whole).step == 6
    assert go(halves, interrupt_at=4).reason == "interrupted"
    halted = (tmp_path / "halves" / "checkpoints" / "latest").resolve().name
    assert 0 < int(halted.removeprefix("step-")) < 6
    assert go(halves).step == 6
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "halves")
    last = Path("checkpoints") / "step-00000006"
    assert same(tensors(tmp_path / "whole" / last), tensors(tmp_path / "halves" / last))


def _resumed_on(run: Path, corpus: Path) -> None:
    go(run_settings(run, corpus))


def test_a_run_continues_on_another_number_of_ranks(tmp_path: Path, run_corpus: Path, ranks) -> None:
    go(run_settings(tmp_path / "one", run_corpus))
    go(run_settings(tmp_path / "many", run_corpus), interrupt_at=3)
    ranks(2).run(_resumed_on, tmp_path / "many", run_corpus)
    one, many = ([r for r in metrics(tmp_path / name) if "loss" in r] for name in ("one", "many"))
    assert [record["step"] for record in many] == [record["step"] for record in one]
    for a, b in zip(one, many, strict=True):
        # The same samples in the same steps; two ranks add up in another order.
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["tokens"] == b["tokens"]


def test_two_processes_repeat_themselves_bit_for_bit(tmp_path: Path, run_corpus: Path, ranks) -> None:
    for name in ("a", "b"):
        ranks(2).run(_resumed_on, tmp_path / name, run_corpus)
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")
    last = Path("checkpoints") / "step-00000006"
    assert same(tensors(tmp_path / "a" / last), tensors(tmp_path / "b" / last))


def test_the_model_learns_and_transformers_loads_the_checkpoint(tmp_path: Path, run_corpus: Path) -> None:
    outcome = go(run_settings(tmp_path / "run", run_corpus, train={"steps": 60, "batch_tokens": 1024}))
    records = metrics(tmp_path / "run")
    assert records[0]["loss"] == pytest.approx(math.log(512), rel=0.02)
    assert outcome.validation_loss is not None and outcome.validation_loss < records[0]["loss"] - 0.5
    model, info = AutoModelForCausalLM.from_pretrained(outcome.checkpoint, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    feed = open_feed(DataSettings(train=[{"path": run_corpus}], sequence_length=32))
    batch = next(iter(feed.mixture.sample(i) for i in range(5)))
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(batch.tokens)[None, : batch.starts[1]]).logits
    loss = torch.nn.functional.cross_entropy(logits[0], torch.from_numpy(batch.targets)[: batch.starts[1]])
    assert float(loss) < records[0]["loss"] - 0.5


def test_a_finished_run_is_found_finished_and_goes_on_with_more_steps(tmp_path: Path, run_corpus: Path) -> None:
    run = tmp_path / "run"
    go(run_settings(run, run_corpus))
    before = (run / "metrics.jsonl").read_bytes()
    assert go(run_settings(run, run_corpus)).step == 6
    assert (run / "metrics.jsonl").read_bytes() == before
    assert go(run_settings(run, run_corpus, train={"steps": 8})).step == 8
    assert [record["step"] for record in metrics(run) if "loss" in record] == list(range(1, 9))


@pytest.mark.parametrize(
    ("stop", "reason"),
    [
        ({"tokens": 1000}, "1,152 tokens were trained on"),
        ({"minutes": 1e-9}, "minutes have passed"),
        ({"target_loss": 100.0}, "reached stop.target_loss 100"),
        ({"patience": 1, "patience_gain": 50.0}, "1 evaluations in a row did not improve"),
    ],
)
def test_a_condition_ends_the_run_with_a_checkpoint(
    tmp_path: Path, run_corpus: Path, stop: dict[str, Any], reason: str
) -> None:
    outcome = go(run_settings(tmp_path / "run", run_corpus, stop=stop, evaluation={"every": 1}))
    assert reason in outcome.reason
    assert 0 < outcome.step < 6
    assert outcome.checkpoint.resolve().name == f"step-{outcome.step:08d}"


@dataclasses.dataclass(frozen=True)
class Poisoned(Feed):
    """Data in which the losses of some global samples are not numbers."""

    bad: range = range(0)
    poison = math.inf

    def steps(self, cursor: int, cut: Any, mesh: Any) -> Iterator[Any]:
        for batch in super().steps(cursor, cut, mesh):
            if cursor in self.bad:
                batch[0].token_weights[:] = self.poison
            yield batch
            cursor += cut.global_samples


def poisoned(corpus: Path, bad: range) -> Poisoned:
    feed = open_feed(DataSettings(train=[{"path": corpus}], sequence_length=32))
    return Poisoned(feed.mixture, feed.validation, feed.sequence_length, feed.tokenizer, bad)


def test_a_spike_is_skipped(tmp_path: Path, run_corpus: Path) -> None:
    # 12 samples a step: the third step is bad.
    outcome = go(run_settings(tmp_path / "run", run_corpus), feed=poisoned(run_corpus, range(24, 36)))
    records = metrics(tmp_path / "run")
    assert outcome.step == 6
    assert "the loss is nan" in records[2]["skipped"]
    assert [record["step"] for record in records if "skipped" in record] == [3]
    assert all(math.isfinite(record["loss"]) for record in records if record["step"] != 3 and "loss" in record)
    state = json.loads((outcome.checkpoint / "training" / "state.json").read_text())["run"]["counters"]
    assert (state["skipped_steps"], state["cursor"]) == (1, 72)


def test_a_spike_rewinds_to_the_last_checkpoint_and_past_the_data(tmp_path: Path, run_corpus: Path) -> None:
    changes = {"spikes": {"policy": "rewind"}, "checkpoint": {"every": 2}}
    feed = poisoned(run_corpus, range(36, 48))
    outcome = go(run_settings(tmp_path / "run", run_corpus, **changes), feed=feed)
    assert outcome.step == 6
    records = [record for record in metrics(tmp_path / "run") if "loss" in record]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert all(math.isfinite(record["loss"]) for record in records)
    state = json.loads((outcome.checkpoint / "training" / "state.json").read_text())["run"]["counters"]
    # Steps 3 and 4 used the samples 24 to 48, which are left out: 6 steps of 12 samples, and 24 more.
    assert state["cursor"] == 72 + 24
    # What came after the rewind is what the same run would be that never saw those samples.
    assert records[2]["loss"] != pytest.approx(records[1]["loss"])


def test_steps_taken_again_after_a_rewind_are_evaluated_again(tmp_path: Path, run_corpus: Path) -> None:
    changes = {"spikes": {"policy": "rewind"}, "checkpoint": {"every": 2}, "evaluation": {"every": 3, "tokens": 64}}
    # Step 3 is evaluated, step 4 is bad: the run goes back to step 2.
    go(run_settings(tmp_path / "run", run_corpus, **changes), feed=poisoned(run_corpus, range(36, 48)))
    evaluated = [record["step"] for record in metrics(tmp_path / "run") if "validation_loss" in record]
    assert evaluated == [3, 6]


def test_kernels_that_do_not_run_are_said_at_the_start(
    tmp_path: Path, run_corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TREADLE_KERNELS", "reference")
    go(run_settings(tmp_path / "run", run_corpus, train={"steps": 1}, schedule={"warmup_steps": 0}))
    assert "operators run on their references: TREADLE_KERNELS=reference leaves it out" in capsys.readouterr().err


@pytest.mark.parametrize("checkpoints", [0, 2])
def test_time_that_a_rewind_discards_has_passed(
    tmp_path: Path, run_corpus: Path, monkeypatch: pytest.MonkeyPatch, checkpoints: int
) -> None:
    seen: list[float] = []
    step = Reporter.step

    def note(self: Reporter, state: TrainState, *given: Any) -> None:
        seen.append(state.counters.seconds)
        step(self, state, *given)

    monkeypatch.setattr(Reporter, "step", note)
    started = time.perf_counter()
    tree = run_settings(tmp_path / "run", run_corpus, spikes={"policy": "rewind"}, checkpoint={"every": checkpoints})
    go(tree, feed=poisoned(run_corpus, range(36, 48)))
    # Steps 1 to 4, then those after the rewind: the clock never goes back, and is that of the wall.
    assert len(seen) == 4 + 6 - checkpoints
    assert seen == sorted(seen)
    assert seen[-1] <= time.perf_counter() - started


@pytest.mark.parametrize("why", ["overflow", "no weight"])
def test_a_run_that_applied_no_update_is_an_error(
    tmp_path: Path, run_corpus: Path, monkeypatch: pytest.MonkeyPatch, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    feed = None
    if why == "overflow":
        monkeypatch.setattr(precision, "FIRST_SCALE", 2.0**120)
        says = r"every update of its 6 steps was skipped, the last because the gradients overflowed .*precision=bf16"
    else:
        feed = poisoned(run_corpus, range(100))
        monkeypatch.setattr(Poisoned, "poison", 0.0)
        says = r"was skipped, the last because no token of the batch has a weight; prepare data in which something"
    tree = run_settings(tmp_path / "run", run_corpus, train={"precision": "fp16" if why == "overflow" else "fp32"})
    with pytest.raises(TreadleError, match=says) as caught:
        go(tree, feed=feed)
    assert caught.value.exit_code == 1
    assert "warning  6 of 6 updates were skipped" in capsys.readouterr().err
    # Found finished, it is no better; with more steps it goes on, and one update is enough.
    with pytest.raises(TreadleError, match=r"every update of its 6 steps was skipped; metrics.jsonl says why"):
        go(tree)
    if why == "no weight":
        assert go({**tree, "train": {**tree["train"], "steps": 7}}).step == 7
        assert "warning  6 of 7 updates were skipped" in capsys.readouterr().err


def test_an_interrupted_run_may_have_applied_none(tmp_path: Path, run_corpus: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(precision, "FIRST_SCALE", 2.0**120)
    tree = run_settings(tmp_path / "run", run_corpus, train={"precision": "fp16"})
    assert go(tree, interrupt_at=2).reason == "interrupted"


def test_a_spike_before_any_checkpoint_rewinds_to_the_beginning(tmp_path: Path, run_corpus: Path) -> None:
    tree = run_settings(tmp_path / "run", run_corpus, spikes={"policy": "rewind"})
    outcome = go(tree, feed=poisoned(run_corpus, range(12, 24)))
    assert outcome.step == 6
    first = metrics(tmp_path / "run")[0]
    assert first["step"] == 1 and first["tokens"] == 384


def test_endless_spikes_end_the_run(tmp_path: Path, run_corpus: Path) -> None:
    tree = run_settings(tmp_path / "run", run_corpus, spikes={"policy": "rewind", "rewinds": 2})
    with pytest.raises(TreadleError, match="the loss is nan, after 2 rewinds without getting past it"):
        go(tree, feed=poisoned(run_corpus, range(12, 10_000)))


def test_the_stop_policy_stops_and_names_the_step(tmp_path: Path, run_corpus: Path) -> None:
    tree = run_settings(tmp_path / "run", run_corpus, spikes={"policy": "stop"}, checkpoint={"every": 1})
    with pytest.raises(TreadleError, match="stopped at step 3, the loss is nan"):
        go(tree, feed=poisoned(run_corpus, range(24, 36)))
    # The checkpoint before it is whole, and the run goes on from there with other settings.
    assert go(run_settings(tmp_path / "run", run_corpus)).step == 6


def test_other_data_on_resume_is_said_and_read_from_its_beginning(
    tmp_path: Path, run_corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    go(run_settings(run, run_corpus), interrupt_at=3)
    outcome = go(run_settings(run, run_corpus, data={"seed": 5}))
    assert "the data is not that of the checkpoint" in capsys.readouterr().err
    state = json.loads((outcome.checkpoint / "training" / "state.json").read_text())["run"]["counters"]
    assert state["step"] == 6 and state["cursor"] < 72


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, run_corpus: Path) -> None:
    run = tmp_path / "run"
    go(run_settings(run, run_corpus))
    other = run_settings(run, run_corpus)
    other["model"] = {"config": {**other["model"]["config"], "num_hidden_layers": 3}}
    with pytest.raises(UserError, match=r"another model.*num_hidden_layers"):
        go(other)


def test_only_answers_count_where_the_corpus_says_so(tmp_path: Path) -> None:
    corpus = write_run_corpus(tmp_path / "masked", masked=True)
    feed = open_feed(DataSettings(train=[{"path": corpus}], sequence_length=32))
    shares = [feed.mixture.sample(index).token_weights.mean() for index in range(200)]
    assert 0.4 < sum(shares) / len(shares) < 0.6
    assert go(run_settings(tmp_path / "run", corpus)).step == 6


def test_the_folder_holds_the_curve_and_metrics(tmp_path: Path, run_corpus: Path) -> None:
    go(run_settings(tmp_path / "run", run_corpus, log={"every": 2, "sinks": ["tensorboard"]}))
    run = tmp_path / "run"
    assert [record["step"] for record in metrics(run) if "loss" in record] == [2, 4, 6]
    assert (run / "loss.svg").read_text().startswith("<svg")
    assert list((run / "tensorboard").iterdir())
