"""The life of a run on one rank: build or restore its state, then step until something ends it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from treadle.config import TreadleError
from treadle.config.progress import amount_text
from treadle.data import PackedBatch
from treadle.ops.listing import fallbacks, listing
from treadle.parallel.collectives import sum_over_ranks
from treadle.parallel.mesh import Mesh
from treadle.train import spikes, stopping
from treadle.train.build import build_state
from treadle.train.evaluation import measure
from treadle.train.feed import Feed
from treadle.train.keep import Keeper
from treadle.train.optimizers import scale_rates
from treadle.train.precision import next_scaler
from treadle.train.report import Reporter
from treadle.train.schedules import rate_factor
from treadle.train.settings import RunSettings, batching, total_steps
from treadle.train.signals import StopRequest
from treadle.train.step import StepResult, train_step


@dataclass(frozen=True)
class Outcome:
    """How a run ended: why, after how many steps, its last losses (None: never measured), its newest checkpoint."""

    reason: str
    step: int
    loss: float | None
    validation_loss: float | None
    checkpoint: Path


class Run:
    """One rank's part of a run. `go` takes steps until something ends it."""

    def __init__(self, settings: RunSettings, feed: Feed, mesh: Mesh, stop: StopRequest) -> None:
        self.settings, self.feed, self.mesh, self.stop = settings, feed, mesh, stop
        self.cut = batching(settings, mesh.size)
        self.state = build_state(settings, feed, mesh)
        self.total = total_steps(settings, self.state.model.spec.parameters_count())
        made_with = {"plan": mesh.plan.axes(), "settings": settings.model_dump(mode="json", by_alias=True)}
        self.keeper = Keeper(settings.run, settings.checkpoint, feed.tokenizer, made_with)
        self.reporter = Reporter(settings, mesh, self.total, lambda: stop.notice)
        self.data: Generator[list[PackedBatch]] | None = None
        self.loss: float | None = None
        self.validation_loss: float | None = None
        self.evaluated_step = -1
        self.left_out = "; metrics.jsonl says why"
        self.clock = 0.0

    def go(self) -> Outcome:
        """Take steps until something ends the run, save, and return why it ended. Raises UserError, TreadleError."""
        resumed = self.keeper.restore(self.state)
        notes = [f"resumed  at step {self.state.counters.step}"] if resumed else []
        if self.state.patience.best_step == self.state.counters.step:
            self.validation_loss, self.evaluated_step = self.state.patience.best, self.state.counters.step
        self.reporter.open(self.state, [*summary(self), *notes, *self._take_up_data()])
        first = self.state.counters.step
        try:
            # Whatever ends the run, a checkpoint that was begun is finished.
            with self.keeper.writer:
                decision = self._steps()
                # A run that was found finished has nothing new to measure.
                went_on = self.state.counters.step > first
                if went_on and self.feed.validation and not decision.interrupted:
                    self._evaluate()
                self.reporter.doing("saving the last checkpoint")
                self.keeper.save(self.state, wait=True)
        finally:
            self._close_data()
            self.reporter.close()
        step, folder = self.state.counters.step, self.settings.run
        outcome = Outcome(decision.reason, step, self.loss, self.validation_loss, folder / "checkpoints" / "latest")
        skipped = self.state.counters.skipped_steps
        self.reporter.finish({**asdict(outcome), "checkpoint": str(outcome.checkpoint)}, closing(outcome, skipped))
        if skipped == step > 0 and not decision.interrupted:
            raise TreadleError(f"the run learnt nothing: every update of its {step} steps was skipped{self.left_out}")
        return outcome

    def _steps(self) -> stopping.Decision:
        """Take steps until one of the conditions holds, and return it."""
        state, settings = self.state, self.settings
        self.clock = time.perf_counter()
        while not (decision := self._should_stop()).stop:
            started = time.perf_counter()
            torch.manual_seed(self._step_seed())
            scale_rates(state.optimizer, rate_factor(state.counters.step, self.total, settings.schedule))
            microbatches = self._next_batch()
            waited = time.perf_counter() - started
            verdict = spikes.Verdict("none")

            def judge(result: StepResult) -> str:
                nonlocal verdict
                verdict = spikes.judge(settings.spikes, state.spikes, result.loss, result.gradient_norm)
                return verdict.reason

            result = train_step(state, microbatches, self.mesh.device, settings.train.clip, judge)
            seconds = time.perf_counter() - started
            self._count(result, verdict.action)
            self.reporter.step(state, result, seconds, waited)
            if verdict.action == "stop":
                raise TreadleError(
                    f"stopped at step {state.counters.step}, {verdict.reason}; go on from the last checkpoint with a "
                    "lower optimizer.lr, or set spikes.policy to skip or rewind"
                )
            if verdict.action == "rewind":
                self._rewind(verdict.reason)
                continue
            self._at_intervals()
        return decision

    def _at_intervals(self) -> None:
        step, settings = self.state.counters.step, self.settings
        if settings.evaluation.every and step % settings.evaluation.every == 0 and self.feed.validation:
            self._evaluate()
        if settings.checkpoint.every and step % settings.checkpoint.every == 0:
            # From here on a spike is a new one.
            self.state.spikes.rewinds = 0
            self.reporter.doing("copying the state for a checkpoint")
            self.reporter.saved(self.keeper.save(self.state))
        self.keeper.writer.check()

    def _should_stop(self) -> stopping.Decision:
        """Every rank decides alike: a signal to any rank counts, and rank 0's clock."""
        counters = self.state.counters
        asked, seconds = sum_over_ranks([float(bool(self.stop.reason)), counters.seconds if self.mesh.first else 0.0])
        counters.seconds = seconds
        if asked:
            return stopping.Decision(True, self.stop.reason or "stopped by a signal to another rank", interrupted=True)
        validated = self.validation_loss if self.evaluated_step == counters.step else None
        loss = validated if self.feed.validation else self.loss
        return stopping.should_stop(self.settings.stop, self.total, counters, self.state.patience, loss)

    def _step_seed(self) -> int:
        """Random numbers are a function of (seed, step, rank), so that none need be saved."""
        seed = (self.settings.train.seed * 1_000_003 + self.state.counters.step) * 65_537 + self.mesh.rank
        return seed & (2**63 - 1)

    def _count(self, result: StepResult, action: spikes.Action) -> None:
        state, counters = self.state, self.state.counters
        counters.step += 1
        counters.cursor += self.cut.global_samples
        counters.tokens += result.tokens
        now = time.perf_counter()
        counters.seconds, self.clock = counters.seconds + now - self.clock, now
        counters.skipped_steps += bool(result.skipped)
        if result.skipped:
            self.left_out = f", the last because {result.skipped}; {WAYS_OUT[why_skipped(result)]}"
        state.scaler = next_scaler(state.scaler, self.settings.train.precision, result.overflowed)
        if not result.overflowed and result.weight:
            state.spikes = spikes.after_step(
                self.settings.spikes, state.spikes, result.loss, result.gradient_norm, action
            )
            self.loss = result.loss if action == "none" else self.loss

    def _rewind(self, reason: str) -> None:
        """Go back to the last checkpoint, or to the beginning, and on with the data behind that of the spike."""
        counters, rewinds = self.state.counters, self.state.spikes.rewinds + 1
        self._close_data()
        self.keeper.finish()
        if not self.keeper.restore(self.state):
            fresh = build_state(self.settings, self.feed, self.mesh)
            vars(self.state).update(vars(fresh))
        # Data and time are used up, whatever came of them.
        self.state.counters.cursor, self.state.counters.seconds = counters.cursor, counters.seconds
        self.state.spikes.rewinds = rewinds
        # A step that is taken again is measured again.
        self.loss, self.evaluated_step = None, -1
        self.reporter.rewound(self.state)
        back = f"back to step {self.state.counters.step}, leaving out the data in between"
        self.reporter.say(f"step {counters.step}: {reason}; {back}")

    def _evaluate(self) -> None:
        started, state = time.perf_counter(), self.state
        if self.evaluated_step == state.counters.step:
            return
        self.reporter.doing("measuring the validation loss")
        batches = self.feed.held_out(self.settings.evaluation.tokens, self.cut.microbatch_samples, self.mesh)
        measured = measure(state.model, batches, self.mesh.device)
        self.validation_loss, self.evaluated_step = measured.loss, state.counters.step
        gain = self.settings.stop.patience_gain
        state.patience = stopping.after_evaluation(state.patience, measured.loss, state.counters.step, gain)
        self.reporter.evaluation(state, measured, time.perf_counter() - started, self.feed.bytes_per_token())

    def _next_batch(self) -> list[PackedBatch]:
        if self.data is None:
            self.data = self.feed.steps(self.state.counters.cursor, self.cut, self.mesh)
        return next(self.data)

    def _close_data(self) -> None:
        if self.data is not None:
            with contextlib.suppress(RuntimeError):
                self.data.close()
            self.data = None

    def _take_up_data(self) -> list[str]:
        """The cursor means nothing in other data than that of the checkpoint: then begin at its first sample."""
        counters, fingerprint = self.state.counters, self.feed.mixture.fingerprint
        if counters.data == fingerprint:
            return []
        counters.data, counters.cursor = fingerprint, 0
        return ["warning  the data is not that of the checkpoint: it is read from its beginning"]


def summary(run: Run) -> list[str]:
    """Return what is about to happen, a line a subject."""
    settings, spec, train, feed = run.settings, run.state.model.spec, run.settings.train, run.feed
    threads = torch.get_num_threads()
    rounds = run.cut.microbatches
    epochs = run.total * run.cut.global_samples / feed.mixture.samples_per_epoch
    held_out = sum(corpus.tokens for corpus in feed.validation)
    return [
        f"model    {spec.family}, {amount_text(spec.parameters_count(), 'parameters')}: {len(spec.layers)} layers of "
        f"width {spec.width}, vocabulary {spec.vocabulary}",
        f"data     {sum(corpus.tokens for corpus in feed.mixture.corpora):,} tokens, {epochs:.2f} "
        "epochs of them in this run, "
        f"{f'{held_out:,} held out' if held_out else 'none held out'}",
        f"run      {run.total} steps of {train.batch_tokens:,} tokens, {settings.optimizer.name}, "
        f"{settings.schedule.name}, {train.precision}; {rounds} microbatch{'es' if rounds > 1 else ''} a rank and step",
        f"machine  {run.mesh.size} process{'es' if run.mesh.size > 1 else ''} on {run.mesh.device.type}, {threads} "
        f"thread{'s' if threads > 1 else ''} each ({run.mesh.plan.describe()})",
        *(f"kernels  {sentence}" for sentence in fallbacks(listing())),
    ]


WAYS_OUT = {
    "overflow": "set train.precision=bf16, or allow more steps: the loss scale is halved until the gradients fit",
    "weight": "prepare data in which something is learnt (of chats that is the answers)",
    "spike": "lower optimizer.lr, or set spikes.policy to off",
}


def why_skipped(result: StepResult) -> str:
    """Return which of WAYS_OUT a skipped update leaves."""
    return "overflow" if result.overflowed else "spike" if result.weight else "weight"


def closing(outcome: Outcome, skipped: int) -> list[str]:
    """Return how a run ended, `skipped` of its updates left out, for a person."""
    losses = [f"loss {outcome.loss:.4f}"] if outcome.loss is not None else []
    losses += [f"validation loss {outcome.validation_loss:.4f}"] if outcome.validation_loss is not None else []
    return [
        f"ended at step {outcome.step}: {outcome.reason}" + (f"; {', '.join(losses)}" if losses else ""),
        *([f"warning  {skipped} of {outcome.step} updates were skipped"] if skipped else []),
        f"checkpoint {outcome.checkpoint}",
    ]
