"""Metrics: whole lines only, one curve after a resume; TensorBoard and MLflow read back by their own readers."""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import treadle
from tests.train import mlflow_stub
from tests.train.mlflow_stub import Server
from tests.train.runs import go, run_settings
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


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_a_missing_package_is_named_before_anything_is_written(
    tmp_path: Path, run_corpus: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf"the sink {name} needs a package .* pip install treadle\[{name}\]"):
        Sinks(MetricsSettings(sinks=[name]), tmp_path)
    with pytest.raises(UserError, match=rf"pip install treadle\[{name}\]"):
        treadle.train(run_settings(tmp_path / "run", run_corpus, log={"sinks": [name]}))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("mlflow", "mlflow.entities")]
)
def test_a_package_that_does_not_import_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mlflow: Server, name: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"does not import \(.*\); pip install treadle\[{name}\] again"):
        Sinks(MetricsSettings(sinks=[name]), tmp_path)


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


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Server:
    """A server, and the client's modules in place of those of the package."""
    server = Server()
    for name, module in mlflow_stub.modules(server).items():
        monkeypatch.setitem(sys.modules, name, module)
    return server


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


def test_mlflow_run_is_continued_and_a_lost_server_costs_only_its_records(
    tmp_path: Path, mlflow: Server, capsys: pytest.CaptureFixture
) -> None:
    settings = MetricsSettings(sinks=["mlflow"])
    first = Sinks(settings, tmp_path, run_settings={"optimizer": {"lr": 0.1}, "long": "x" * 9000})
    first.write(1, {"loss": 2.0, "note": "text", "done": True})
    first.close()
    assert mlflow.runs["run0"].status == "FINISHED"
    second = Sinks(settings, tmp_path, done=1)
    second.write(2, {"loss": 1.0})
    (run,) = mlflow.runs.values()
    assert run.status == "RUNNING" and run.name == tmp_path.name
    assert [(metric.key, metric.value, metric.step) for metric in run.metrics] == [("loss", 2.0, 1), ("loss", 1.0, 2)]
    assert run.params == {"optimizer.lr": "0.1", "long": "x" * 6000}
    mlflow.down = "gone"
    second.write(3, {"loss": 0.5})
    second.write(4, {"loss": 0.25})
    second.close()
    assert capsys.readouterr().err.count("MLflow does not take metrics any more (gone)") == 1
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 4
    mlflow.down = "refused"
    with pytest.raises(UserError, match=r"MLflow at http://nowhere does not answer: refused"):
        Sinks(MetricsSettings(sinks=["mlflow"], mlflow_uri="http://nowhere"), tmp_path)
    assert mlflow.addresses[-1] == "http://nowhere"


def test_a_run_gives_mlflow_its_settings_and_every_step(tmp_path: Path, run_corpus: Path, mlflow: Server) -> None:
    tree = run_settings(tmp_path / "run", run_corpus, log={"sinks": ["mlflow"], "mlflow_experiment": "tiny"})
    go(tree, interrupt_at=3)
    go(tree)
    (run,) = mlflow.runs.values()
    assert (run.experiment, run.status) == (mlflow.experiments["tiny"], "FINISHED")
    assert run.params["train.steps"] == "6" and run.params["model.config.hidden_size"] == "32"
    assert [metric.step for metric in run.metrics if metric.key == "loss"] == [1, 2, 3, 4, 5, 6]
    assert any(metric.key == "validation_loss" and metric.step == 6 for metric in run.metrics)


@pytest.mark.parametrize("kind", ["stub", *(["package"] if importlib.util.find_spec("mlflow") else [])])
def test_mlflow_itself_holds_the_run(tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> None:
    """The same, read back by the client; against the package too where it is installed, which the stub must match."""
    if kind == "stub":
        request.getfixturevalue("mlflow")
    tracking = importlib.import_module("mlflow.tracking")
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
    history = [(metric.step, metric.value) for metric in client.get_metric_history(note["run"], "loss")]
    assert history == [(1, 2), (2, 1)]
    for name, method in vars(mlflow_stub.client_of(Server())).items():
        if callable(method):
            taken = inspect.signature(getattr(tracking.MlflowClient, name)).parameters
            assert set(inspect.signature(method).parameters) <= set(taken), name
