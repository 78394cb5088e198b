"""What rank 0 tells of a run: metrics to the sinks, progress to the terminal, the loss curve as a picture."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import torch

from treadle.config import TreadleError
from treadle.config.files import write_atomically
from treadle.device.ceilings import matmul_peak
from treadle.parallel.mesh import Mesh
from treadle.train.checkpoints import SaveReport
from treadle.train.curve import svg_curve
from treadle.train.display import Display
from treadle.train.evaluation import Measured
from treadle.train.precision import DTYPES
from treadle.train.settings import RunSettings
from treadle.train.sinks import Sinks, read_metrics
from treadle.train.state import TrainState
from treadle.train.step import StepResult

# Steps over which the time left is estimated: the first ones are slower than the rest.
RECENT_STEPS = 50
OUTCOME = "outcome.json"


class Reporter:
    """Tells of a run of `total` steps. On other ranks than the first it does nothing."""

    def __init__(self, settings: RunSettings, mesh: Mesh, total: int, notice: Callable[[], str] = lambda: "") -> None:
        self.settings, self.mesh, self.total, self.notice = settings, mesh, total, notice
        self.sinks: Sinks | None = None
        self.display: Display | None = None
        self.recent: list[float] = []
        self.save: SaveReport | None = None
        self.peak, self.peak_is_sure = 0.0, False

    def open(self, state: TrainState, summary: list[str]) -> None:
        """Open the sinks, cut to the step of `state`, and say what is about to happen."""
        if not self.mesh.first:
            return
        self._open_sinks(state)
        self.display = Display(self.total, notice=self.notice)
        for record in read_metrics(self.settings.run / "metrics.jsonl"):
            self.display.remember(record)
        for line in summary:
            self.display.say(line)
        self.peak = machine_peak(self.settings, self.mesh)

    def rewound(self, state: TrainState) -> None:
        """Cut the metrics to the step of `state`, to which the run went back."""
        if self.sinks is None or self.display is None:
            return
        self.sinks.close()
        self._open_sinks(state)
        self.display.forget_after(state.counters.step)

    def _open_sinks(self, state: TrainState) -> None:
        plain = self.settings.model_dump(mode="json", by_alias=True)
        self.sinks = Sinks(self.settings.log, self.settings.run, state.counters.step, plain)

    def doing(self, what: str) -> None:
        """Show what happens between two steps."""
        if self.display is not None:
            self.display.doing(what)

    def say(self, text: str) -> None:
        """Print a line."""
        if self.display is not None:
            self.display.say(text)

    def saved(self, report: SaveReport) -> None:
        """Note what a checkpoint cost; the next step's record tells it."""
        self.save = report

    def step(self, state: TrainState, result: StepResult, seconds: float, data_seconds: float) -> None:
        """Tell of one step, which took `seconds`, of which `data_seconds` waiting for data."""
        counters = state.counters
        if result.skipped:
            self.say(f"step {counters.step}: the update was skipped, {result.skipped}")
        if self.sinks is None or self.display is None:
            return
        self.recent = [*self.recent, seconds][-RECENT_STEPS:]
        record: dict[str, Any] = {
            "loss": result.loss,
            "gradient_norm": result.gradient_norm,
            "learning_rate": state.optimizer.param_groups[0]["lr"],
            "tokens": counters.tokens,
            "tokens_per_second": result.tokens / seconds,
            "seconds": counters.seconds,
            "data_seconds": data_seconds,
            "memory_bytes": memory_bytes(self.mesh.device),
        }
        record["peak_share"] = self._peak_share(state, record["tokens_per_second"])
        if self.save is not None:
            record["checkpoint_seconds"] = self.save.seconds
            record["checkpoint_waited_seconds"], self.save = self.save.waited_seconds, None
        if self.settings.train.precision == "fp16":
            record["loss_scale"] = state.scaler.scale
        if result.skipped:
            record["skipped"] = result.skipped
        if counters.step % self.settings.log.every == 0 or counters.step == self.total:
            self.sinks.write(counters.step, record)
        left = (self.total - counters.step) * sum(self.recent) / len(self.recent)
        self.display.step(counters.step, {**record, "seconds_left": left})

    def _peak_share(self, state: TrainState, tokens_per_second: float) -> float:
        """Return the share of the machine's rate of matrix products that the model's own arithmetic uses."""
        # A backward pass costs twice a forward pass; an average token sees half of a sample before it.
        flops = 3 * state.model.spec.flops_per_token(self.settings.data.sequence_length // 2)
        if flops * tokens_per_second > self.peak and not self.peak_is_sure:
            # The ceiling was measured while the machine was busy.
            self.peak, self.peak_is_sure = machine_peak(self.settings, self.mesh, again=True), True
        return flops * tokens_per_second / self.peak

    def evaluation(self, state: TrainState, measured: Measured, seconds: float, bytes_per_token: float) -> None:
        """Tell of a validation loss."""
        if self.sinks is None or self.display is None:
            return
        report = measured.report()
        record = {
            "validation_loss": report["loss"],
            "validation_perplexity": report["perplexity"],
            "validation_bits_per_byte": measured.loss / math.log(2) / bytes_per_token,
            "evaluation_seconds": seconds,
        }
        self.sinks.write(state.counters.step, record)
        self.display.evaluated(state.counters.step, record)

    def close(self) -> None:
        """Close the sinks and leave the terminal as it was."""
        with contextlib.ExitStack() as stack:
            if self.sinks is not None:
                stack.callback(self.sinks.close)
            if self.display is not None:
                stack.callback(self.display.close)
        self.sinks = None

    def finish(self, outcome: Mapping[str, Any], lines: list[str]) -> None:
        """Draw the loss curve on the terminal and into loss.svg, print `lines` below it; save `outcome` as JSON."""
        if self.display is None:
            return
        self.close()
        display, folder = self.display, self.settings.run
        speed = self.settings.train.batch_tokens / statistics.median(self.recent) if self.recent else None
        told = json.dumps({**outcome, "tokens_per_second": speed})
        write_atomically(folder / OUTCOME, told.encode() + b"\n")
        picture = svg_curve(display.losses, display.validation, f"Loss of {folder.name}")
        try:
            write_atomically(folder / "loss.svg", picture.encode())
        except TreadleError as error:
            print(f"warning: the loss curve was not saved: {error}", file=sys.stderr)
        display.finish(lines)


def machine_peak(settings: RunSettings, mesh: Mesh, again: bool = False) -> float:
    """Return the rate of matrix products, in FLOP/s, that all ranks together could reach at most: the measured one."""
    dtype = DTYPES[settings.train.precision] or torch.float32
    if mesh.device.type == "cpu":
        return matmul_peak(dtype, torch.get_num_threads() * mesh.size, again=again)
    return matmul_peak(dtype, device=str(mesh.device), again=again) * mesh.size


def memory_bytes(device: torch.device) -> int:
    """Return the memory that this process uses on its device."""
    if device.type == "cpu":
        return psutil.Process().memory_info().rss
    return torch.accelerator.memory_allocated(device.index)
