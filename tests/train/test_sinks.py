"""Metrics: whole lines only, one curve after a resume; TensorBoard and MLflow read back by their own readers."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.config import TreadleError, UserError
from treadle.train.sinks import JsonLines, MetricsSettings, Sinks, read_metrics


def test_records_come_back_in_order(tmp_path: Path) -> None:
    sink = Sinks(MetricsSettings(), tmp_path)
    sink.write(1, {"loss": 2.5, "note": "ümlaut", "inner": {"rates": [1.0, float("nan")]}})
    sink.write(2, {"loss": float("inf")})
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 1, "loss": 2.5, "note": "ümlaut", "inner": {"rates": [1.0, None]}},
        {"step": 2, "loss": None},
    ]  # before closing: a reader that follows the run sees every step
    sink.close()


@given(steps=st.lists(st.integers(0, 30), max_size=20), cut=st.integers(0, 400), done=st.integers(0, 30))
def test_a_crash_anywhere_and_a_resume_leave_one_curve(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], cut: int, done: int
) -> None:
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    steps = sorted(steps)
    first = JsonLines(path)
    for step in steps:
        first.write(step, {"loss": step / 3})
    first.close()
    content = path.read_bytes()
    path.write_bytes(content[:cut])
    whole = content[:cut].count(b"\n")
    assert [record["step"] for record in read_metrics(path)] == steps[:whole]

    second = JsonLines(path, done)
    second.write(done + 1, {"loss": 0.0})
    second.close()
    assert [record["step"] for record in read_metrics(path)] == [s for s in steps[:whole] if s <= done] + [done + 1]


@pytest.mark.parametrize("line", ["{}", "[1]", "loss 3", '{"step": "x"}', "\x00"])
def test_a_line_that_is_no_record_is_named_and_the_file_kept(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + line + '\n{"step": 2}\n')
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2, is no record"):
        JsonLines(path, 2)
    assert path.read_bytes() == before


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "metrics.jsonl")
    sink.file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    with pytest.raises(TreadleError, match=r"disk is full: could not write .*metrics\.jsonl"):
        sink.write(1, {"loss": 1.0})
    sink.close()


@pytest.mark.parametrize(
    ("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("mlflow", "mlflow.entities")]
)
def test_a_missing_package_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"pip install treadle\[{name}\]"):
        Sinks(MetricsSettings(sinks=[name]), tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_an_unknown_sink_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown sink 'tensorbord', did you mean 'tensorboard'"):
        Sinks(MetricsSettings(sinks=["tensorbord"]), tmp_path)


def test_tensorboard_shows_one_value_a_step_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = MetricsSettings(sinks=["tensorboard"])
    first = Sinks(settings, tmp_path, run_settings={"lr": 1})
    for step in (1, 2, 3):
        first.write(step, {"loss": 1.0 / step, "note": "text"})
    first.close()
    second = Sinks(settings, tmp_path, done=2)
    second.write(3, {"loss": 9.0})
    second.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.0), (2, 0.5), (3, 9.0)]


class FakeMlflow:
    """Stands in for MLflow's client where the package is not installed."""

    runs: dict[str, Any] = {}
    broken = False

    def __init__(self, tracking_uri: str) -> None:
        if FakeMlflow.broken:
            raise ConnectionError("refused")
        self.uri = tracking_uri

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        return "1"

    def create_run(self, experiment_id: str, run_name: str) -> Any:
        name = f"run{len(FakeMlflow.runs)}"
        FakeMlflow.runs[name] = {"metrics": [], "params": [], "status": "RUNNING"}
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=name))

    def update_run(self, run_id: str, status: str) -> None:
        FakeMlflow.runs[run_id]["status"] = status

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        if FakeMlflow.broken:
            raise ConnectionError("gone")
        FakeMlflow.runs[run_id]["metrics"] += metrics
        FakeMlflow.runs[run_id]["params"] += params

    def set_terminated(self, run_id: str) -> None:
        FakeMlflow.runs[run_id]["status"] = "FINISHED"


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> type[FakeMlflow]:
    entities, tracking = types.ModuleType("mlflow.entities"), types.ModuleType("mlflow.tracking")
    entities.Metric = entities.Param = lambda *values: values
    tracking.MlflowClient = FakeMlflow
    for module in (types.ModuleType("mlflow"), entities, tracking):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    FakeMlflow.runs, FakeMlflow.broken = {}, False
    return FakeMlflow


def test_mlflow_run_is_continued_and_a_lost_server_costs_only_its_records(
    tmp_path: Path, mlflow: type[FakeMlflow], capsys: pytest.CaptureFixture
) -> None:
    settings = MetricsSettings(sinks=["mlflow"])
    first = Sinks(settings, tmp_path, run_settings={"optimizer": {"lr": 0.1}})
    first.write(1, {"loss": 2.0, "note": "text", "done": True})
    first.close()
    second = Sinks(settings, tmp_path, done=1)
    second.write(2, {"loss": 1.0})
    assert list(mlflow.runs) == ["run0"]
    assert mlflow.runs["run0"]["status"] == "RUNNING"
    assert [(name, value, step) for name, value, _, step in mlflow.runs["run0"]["metrics"]] == [
        ("loss", 2.0, 1),
        ("loss", 1.0, 2),
    ]
    assert mlflow.runs["run0"]["params"] == [("optimizer.lr", "0.1")]
    mlflow.broken = True
    second.write(3, {"loss": 0.5})
    second.write(4, {"loss": 0.25})
    second.close()
    assert capsys.readouterr().err.count("MLflow does not take metrics any more (gone)") == 1
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 4
    with pytest.raises(UserError, match=r"MLflow at http://nowhere does not answer: refused"):
        Sinks(MetricsSettings(sinks=["mlflow"], mlflow_uri="http://nowhere"), tmp_path)


def test_mlflow_itself_holds_the_run(tmp_path: Path) -> None:
    """The same against the package, where the extra is installed."""
    tracking = pytest.importorskip("mlflow.tracking")
    sink = Sinks(MetricsSettings(sinks=["mlflow"]), tmp_path, run_settings={"optimizer": {"lr": 0.1}})
    sink.write(1, {"loss": 2.0})
    sink.close()
    sink = Sinks(MetricsSettings(sinks=["mlflow"]), tmp_path, done=1)
    sink.write(2, {"loss": 1.0})
    sink.close()
    note = json.loads((tmp_path / "mlflow-run.json").read_text())
    client = tracking.MlflowClient(note["uri"])
    run = client.get_run(note["run"])
    assert run.data.params == {"optimizer.lr": "0.1"}
    assert run.info.status == "FINISHED"
    assert [(metric.step, metric.value) for metric in client.get_metric_history(note["run"], "loss")] == [
        (1, 2),
        (2, 1),
    ]
