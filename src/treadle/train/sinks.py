"""Where a run's metrics go: always metrics.jsonl; TensorBoard, MLflow or another package's sink when asked.

A sink of another package comes in through the entry-point group `treadle.sinks`. Only rank 0 opens sinks.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from treadle.config import Settings, UserError
from treadle.config.files import disk_errors, write_atomically
from treadle.config.plugins import Parts


class MetricsSettings(Settings):
    """Where metrics go besides metrics.jsonl: `sinks` lists tensorboard, mlflow or those of other packages.

    `mlflow_uri` left out is a folder of the run; `options` is for sinks of other packages.
    """

    sinks: list[str] = []
    mlflow_uri: str | None = None
    mlflow_experiment: str = "treadle"
    options: dict[str, Any] = {}


class Sink(Protocol):
    """Takes what was measured at a step (names to numbers, texts or lists), in the order of steps."""

    def write(self, step: int, record: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class SinkFactory(Protocol):
    """Opens a sink of the run in `folder`; `done` steps are finished, what was written of later ones is void.

    `run_settings` are the run's resolved settings, as plain data.
    """

    def __call__(self, settings: MetricsSettings, folder: Path, done: int, run_settings: Mapping[str, Any]) -> Sink: ...


sinks: Parts[SinkFactory] = Parts("sink")


def check_sinks(settings: MetricsSettings) -> None:
    """Raise UserError for an unknown sink, or one of ours whose package is missing, before a run has begun."""
    for name in settings.sinks:
        package = getattr(sinks.get(name), "package", None)
        if package is not None and not _installed(package):
            raise UserError(f"the sink {name} needs a package that is not installed; pip install treadle[{name}]")


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # it was put in place by hand
        return True


class Sinks:
    """All sinks of a run as one: metrics.jsonl first, so that it holds every record whatever happens to the others."""

    def __init__(
        self,
        settings: MetricsSettings,
        folder: str | Path,
        done: int = 0,
        run_settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises UserError for an unknown sink and for one whose package is missing."""
        check_sinks(settings)
        factories = [sinks.get(name) for name in dict.fromkeys(settings.sinks)]
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.members: list[Sink] = []
        try:
            for factory in factories:
                self.members.append(factory(settings, self.folder, done, run_settings or {}))
            self.members.insert(0, JsonLines(self.folder / "metrics.jsonl", done))
        except BaseException:
            self.close()
            raise

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        """Hand one record to every sink. Raises TreadleError where metrics.jsonl cannot be written (a full disk)."""
        for member in self.members:
            member.write(step, record)

    def close(self) -> None:
        """Finish every sink."""
        for member in self.members:
            member.close()


class JsonLines:
    """One JSON object a line, `step` first, appended and handed to the operating system at once.

    On resume every line after step `done` is cut off, and a last line that a crash left half written, so that the
    file holds one curve. A number that is not finite is written as null, because JSON has no other word for it.
    """

    def __init__(self, path: str | Path, done: int = 0) -> None:
        self.path = Path(path)
        with disk_errors(self.path):
            if self.path.exists():
                end = max((end for _, end, record in _lines(self.path) if record["step"] <= done), default=0)
                os.truncate(self.path, end)
            self.file = self.path.open("ab", buffering=0)

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        line = json.dumps({"step": step, **_finite(record)}, ensure_ascii=False) + "\n"
        left = memoryview(line.encode())
        with disk_errors(self.path):
            while left:
                left = left[self.file.write(left) :]

    def close(self) -> None:
        self.file.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl, without a last line that is still being written.

    Raises UserError naming the line that is no record.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path} is not a file; a run writes its metrics to metrics.jsonl in its folder")
    return [record for _, _, record in _lines(path)]


def _lines(path: Path) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield (first byte, byte after the end, record) of each whole line."""
    position = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            start, position = position, position + len(line)
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
                record["step"] += 0
            except (ValueError, TypeError, KeyError, IndexError) as error:
                raise UserError(
                    f"{path}, line {number}, is no record of metrics (a JSON object with a step); repair or remove it"
                ) from error
            yield start, position, record


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in record.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


@sinks.add("tensorboard")
class TensorBoard:
    """Event files in the run's folder tensorboard/; TensorBoard hides what was written after the resume point."""

    package = "tensorboard"

    def __init__(
        self, settings: MetricsSettings, folder: Path, done: int = 0, run_settings: Mapping[str, Any] | None = None
    ) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(f"TensorBoard does not import ({error}); pip install treadle[tensorboard] again") from error
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1 if done else None)
        if run_settings and not done:
            self.writer.add_text("settings", f"```json\n{json.dumps(run_settings, indent=2)}\n```", 0)

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        for name, number in _numbers(record).items():
            self.writer.add_scalar(name, number, step)

    def close(self) -> None:
        self.writer.close()


@sinks.add("mlflow")
class Mlflow:
    """One MLflow run a training run, in the run's folder mlflow/ or on the server that `mlflow_uri` names.

    A resumed run continues the same MLflow run, which keeps the values of repeated steps twice. A server that stops
    answering costs its records, not the training: said once on stderr.
    """

    package = "mlflow"

    def __init__(
        self, settings: MetricsSettings, folder: Path, done: int = 0, run_settings: Mapping[str, Any] | None = None
    ) -> None:
        # Without this MLflow reports its use to its makers, who are no address that the user named.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        uri = settings.mlflow_uri
        if uri is None:
            # mlflow-skinny has no other local store than files, which MLflow 3 wants to be asked for.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (folder / "mlflow").resolve().as_uri()
        try:
            from mlflow.entities import Metric, Param  # pyrefly: ignore[missing-import]
            from mlflow.tracking import MlflowClient  # pyrefly: ignore[missing-import]
        except ImportError as error:
            raise UserError(f"MLflow does not import ({error}); pip install treadle[mlflow] again") from error
        self.metric, self.failed = Metric, False
        note = folder / "mlflow-run.json"
        try:
            self.client = MlflowClient(tracking_uri=uri)
            self.run = self._known_run(note, uri) if done else None
            if self.run is None:
                experiment = self.client.get_experiment_by_name(settings.mlflow_experiment)
                number = (
                    experiment.experiment_id
                    if experiment
                    else self.client.create_experiment(settings.mlflow_experiment)
                )
                self.run = self.client.create_run(number, run_name=folder.resolve().name).info.run_id
                parameters = [Param(name, value[:6000]) for name, value in _flat(run_settings or {})]
                for start in range(0, len(parameters), 100):
                    self.client.log_batch(self.run, params=parameters[start : start + 100])
                write_atomically(note, json.dumps({"uri": uri, "run": self.run}).encode())
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"MLflow at {uri} does not answer: {' '.join(str(error).split())}") from error

    def _known_run(self, note: Path, uri: str) -> str | None:
        """Return the run that an earlier start of this training logged to, if it was at the same address."""
        if note.is_file():
            known = json.loads(note.read_text("utf-8"))
            if known.get("uri") == uri:
                self.client.update_run(known["run"], status="RUNNING")
                return known["run"]
        return None

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        now = int(time.time() * 1000)
        metrics = [self.metric(name, number, now, step) for name, number in _numbers(record).items()]
        self._try(lambda: self.client.log_batch(self.run, metrics=metrics))

    def close(self) -> None:
        self._try(lambda: self.client.set_terminated(self.run))

    def _try(self, call: Any) -> None:
        try:
            call()
        except Exception as error:
            if not self.failed:
                words = " ".join(str(error).split())
                print(f"warning: MLflow does not take metrics any more ({words}); metrics.jsonl does", file=sys.stderr)
            self.failed = True


def _flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted keys and values as text."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _flat(value, f"{prefix}{key}.")
    elif prefix:
        yield prefix[:-1], str(tree)
