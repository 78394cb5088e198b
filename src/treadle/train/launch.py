"""Starting the ranks of a run on this machine, through torch elastic's local agent, and ending them for certain."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Generator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from treadle.config import TreadleError, UserError
from treadle.train.signals import LAUNCHED, heard, silence, terminals
from treadle.train.worker import FAILURE_FILE

# How long workers may take to end once one of them has failed; then they are killed.
SECONDS_TO_END = 5


def launch(settings_file: Path, processes: int) -> None:
    """Run the settings in `settings_file` on so many local processes and return when all have ended well.

    SIGTERM, SIGHUP and Ctrl-C are passed on, so that the workers finish their step and save; a second Ctrl-C ends them.
    Raises UserError or TreadleError with the sentence of the first worker that failed.
    """
    with _passing_on() as signals, tempfile.TemporaryDirectory(prefix="treadle-run-") as scratch, _quiet():
        print(f"starting {processes} processes", file=sys.stderr, flush=True)
        from torch.distributed.elastic.agent.server.api import WorkerState
        from torch.distributed.elastic.multiprocessing import SignalException

        agent = _agent(settings_file, processes, scratch, signals)
        failures = Path(scratch) / "failure"
        with _environment({FAILURE_FILE: str(failures), LAUNCHED: str(os.getpid()), **_loopback()}):
            try:
                result = agent.run()
            except SignalException as error:
                raise TreadleError(f"ended by {error.sigval.name}; run it again to go on") from error
        if result.state != WorkerState.SUCCEEDED or result.is_failed():
            _raise_first(Path(scratch), result.failures, signals.asked)


class Signals:
    """The signals that asked the launcher to stop, and the workers to which they are passed on."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.pids: list[int] = []
        self.listening = threading.current_thread() is threading.main_thread()
        self.terminals = terminals()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on: as SIGTERM, which ends workers that do not listen yet too; the second Ctrl-C as SIGKILL."""
        self.asked.append(number)
        again = self.asked.count(signal.SIGINT) > 1
        if number == signal.SIGHUP:
            silence(self.terminals)
        self.send(signal.SIGKILL if again else signal.SIGTERM)
        if number != signal.SIGTERM:  # so that they can say what it was
            self.send(signal.Signals(number))
        if again and not self.pids:
            raise KeyboardInterrupt

    def started(self, pids: Sequence[int]) -> None:
        """Take note of workers that have just started; what came before them is passed on now."""
        self.pids = list(pids)
        if self.asked:
            self.send(signal.SIGTERM)

    def send(self, number: signal.Signals) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _agent(settings_file: Path, processes: int, scratch: str, signals: Signals) -> Any:
    """Return the elastic agent that starts the workers and waits for them."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

    class Agent(LocalElasticAgent):
        """The elastic agent, which says which processes it started."""

        def _start_workers(self, worker_group: Any) -> dict[int, Any]:
            # A terminal sends Ctrl-C to the workers too; until they listen for it they are to ignore it.
            handler = signal.signal(signal.SIGINT, signal.SIG_IGN) if signals.listening else None
            try:
                started = super()._start_workers(worker_group)
            finally:
                if signals.listening:
                    signal.signal(signal.SIGINT, handler)
            signals.started(list(started.values()))
            return started

    parameters = RendezvousParameters(
        backend="c10d",
        endpoint="127.0.0.1:0",
        run_id=uuid.uuid4().hex,
        min_nodes=1,
        max_nodes=1,
        local_addr="127.0.0.1",
        is_host="true",
    )
    spec = WorkerSpec(
        role="train",
        local_world_size=processes,
        rdzv_handler=registry.get_rendezvous_handler(parameters),
        entrypoint=sys.executable,
        args=("-m", "treadle.train.worker", str(settings_file)),
        max_restarts=0,
        monitor_interval=0.1,
    )
    return Agent(spec, logs_specs=DefaultLogsSpecs(log_dir=scratch), shutdown_timeout=SECONDS_TO_END)


def _raise_first(scratch: Path, failures: dict[int, Any], asked: list[int]) -> None:
    """Raise the error of the worker that failed first; the others only lost their connection to it."""
    records = [json.loads(path.read_text()) for path in scratch.glob("failure-*.json")]
    if asked.count(signal.SIGINT) > 1:
        raise KeyboardInterrupt
    if asked and not records:
        return  # ended before training began: there was nothing to save
    for rank, failure in failures.items():
        # A rank that was killed leaves no record; those that wait for it then do.
        if failure.exitcode < 0 and -failure.exitcode != signal.SIGTERM:
            name = signal.Signals(-failure.exitcode).name
            hint = "; if the machine was out of memory, lower train.microbatch_tokens" if name == "SIGKILL" else ""
            raise TreadleError(f"rank {rank} was ended by {name}{hint}")
    if records:
        first = min(records, key=lambda record: (record["lost_connection"], record["time"]))
        raise (UserError if first["exit_code"] == 2 else TreadleError)(first["message"])
    rank, failure = min(failures.items())
    raise TreadleError(f"rank {rank} ended with exit code {failure.exitcode}")


@contextlib.contextmanager
def _passing_on() -> Generator[Signals]:
    """Pass what asks the run to stop on to the workers; elsewhere than in the main thread none is listened for."""
    signals = Signals()
    if not signals.listening:
        yield signals
        return
    numbers = heard()
    before = [signal.signal(number, signals.on_signal) for number in numbers]
    try:
        # The agent's own handlers would give workers 30 seconds, whatever they are saving, and undo nohup.
        with _environment({"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT"}):
            yield signals
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _loopback() -> dict[str, str]:
    """Keep the ranks' traffic on this machine, whatever its host name resolves to."""
    if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
        return {"GLOO_SOCKET_IFNAME": "lo"}
    return {}


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Generator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Keep the agent's own log off the terminal: what went wrong is said in one sentence."""
    logger = logging.getLogger("torch.distributed.elastic")
    level, disabled = logger.level, logging.root.manager.disable
    logger.setLevel(logging.CRITICAL)
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
        logging.disable(disabled)
