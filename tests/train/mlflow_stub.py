"""MLflow's client, as far as its documentation promises it: what a sink may call, and what the server then holds.

It stands in where the package is not installed (`modules`). A call that MLflow does not have, an argument that it does
not take, or a value that its server refuses is an error here as it is there.
"""

from __future__ import annotations

import re
import time
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

MOST_METRICS, MOST_PARAMS, LONGEST_VALUE, LONGEST_NAME = 1000, 100, 6000, 250
STATES = ("RUNNING", "SCHEDULED", "FINISHED", "FAILED", "KILLED")
NAME = re.compile(r"[/\w.\- :]*")


class MlflowException(Exception):
    """What MLflow raises."""


@dataclass(frozen=True)
class Metric:
    key: str
    value: float
    timestamp: int
    step: int


@dataclass(frozen=True)
class Param:
    key: str
    value: str


@dataclass
class Stored:
    """A run on the server."""

    experiment: str
    name: str | None
    status: str = "RUNNING"
    metrics: list[Metric] = field(default_factory=list)
    params: dict[str, str] = field(default_factory=dict)


class Server:
    """What lies behind every client; `down` says why it does not answer."""

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, Stored] = {}
        self.addresses: list[str | None] = []
        self.down = ""

    def run(self, run_id: str) -> Stored:
        if self.down:
            raise MlflowException(self.down)
        if run_id not in self.runs:
            raise MlflowException(f"Run with id={run_id} not found")
        return self.runs[run_id]


def client_of(server: Server) -> type:
    """Return the class MlflowClient whose instances talk to `server`."""

    class MlflowClient:
        def __init__(self, tracking_uri: str | None = None, registry_uri: str | None = None) -> None:
            server.addresses.append(tracking_uri)

        def get_experiment_by_name(self, name: str) -> Any:
            if server.down:
                raise MlflowException(server.down)
            number = server.experiments.get(name)
            return None if number is None else types.SimpleNamespace(experiment_id=number, name=name)

        def create_experiment(self, name: str, artifact_location: str | None = None, tags: Any = None) -> str:
            if name in server.experiments:
                raise MlflowException(f"Experiment(name={name}) already exists")
            return server.experiments.setdefault(name, str(len(server.experiments) + 1))

        def create_run(
            self, experiment_id: str, start_time: int | None = None, tags: Any = None, run_name: str | None = None
        ) -> Any:
            if experiment_id not in server.experiments.values():
                raise MlflowException(f"No Experiment with id={experiment_id} exists")
            number = f"run{len(server.runs)}"
            server.runs[number] = Stored(experiment_id, run_name)
            return self.get_run(number)

        def get_run(self, run_id: str) -> Any:
            stored = server.run(run_id)
            info = types.SimpleNamespace(run_id=run_id, status=stored.status, run_name=stored.name)
            newest = {metric.key: metric.value for metric in stored.metrics}
            return types.SimpleNamespace(
                info=info, data=types.SimpleNamespace(params=dict(stored.params), metrics=newest)
            )

        def get_metric_history(self, run_id: str, key: str) -> list[Metric]:
            return [metric for metric in server.run(run_id).metrics if metric.key == key]

        def update_run(self, run_id: str, status: str | None = None, name: str | None = None) -> None:
            if status is not None and status not in STATES:
                raise MlflowException(f"Could not get run status corresponding to string {status}")
            stored = server.run(run_id)
            stored.status, stored.name = status or stored.status, name or stored.name

        def set_terminated(self, run_id: str, status: str | None = None, end_time: int | None = None) -> None:
            self.update_run(run_id, status or "FINISHED")

        def log_batch(
            self,
            run_id: str,
            metrics: Sequence[Metric] = (),
            params: Sequence[Param] = (),
            tags: Sequence[Any] = (),
            synchronous: bool | None = None,
        ) -> None:
            stored = server.run(run_id)
            if len(metrics) > MOST_METRICS or len(params) > MOST_PARAMS:
                raise MlflowException("A batch logging request can contain at most 1000 metrics and 100 params")
            for metric in metrics:
                _check_name(metric.key)
                if isinstance(metric.value, bool) or not isinstance(metric.value, float | int):
                    raise MlflowException(f"Got invalid value {metric.value} for metric '{metric.key}'")
                if type(metric.timestamp) is not int or metric.timestamp > 1000 * (time.time() + 60):
                    raise MlflowException(f"Got invalid timestamp {metric.timestamp}: milliseconds since 1970")
                if type(metric.step) is not int:
                    raise MlflowException(f"Got invalid step {metric.step}")
            for param in params:
                _check_name(param.key)
                if not isinstance(param.value, str) or len(param.value) > LONGEST_VALUE:
                    raise MlflowException(f"Param value of '{param.key}' exceeded the limit of {LONGEST_VALUE}")
                if stored.params.setdefault(param.key, param.value) != param.value:
                    raise MlflowException(f"Changing param values is not allowed: '{param.key}'")
            stored.metrics += metrics

    return MlflowClient


def _check_name(name: str) -> None:
    if not name or len(name) > LONGEST_NAME or not NAME.fullmatch(name):
        raise MlflowException(f"Invalid name '{name}'")


def modules(server: Server) -> dict[str, types.ModuleType]:
    """Return the modules of the package by name, to be put into `sys.modules`."""
    whole, entities, tracking = (types.ModuleType(name) for name in ("mlflow", "mlflow.entities", "mlflow.tracking"))
    entities.Metric, entities.Param = Metric, Param
    tracking.MlflowClient = client_of(server)
    whole.entities, whole.tracking = entities, tracking
    return {module.__name__: module for module in (whole, entities, tracking)}
