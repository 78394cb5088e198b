"""A run's settings: those of its parts, composed; and what they must agree on among each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from treadle.config import Settings, UserError
from treadle.model.lora import LoraSpec
from treadle.parallel.plan import Plan
from treadle.train.checkpoints import CheckpointSettings
from treadle.train.evaluation import EvaluationSettings
from treadle.train.optimizers import OptimizerSettings
from treadle.train.precision import Precision
from treadle.train.recompute import Recompute
from treadle.train.schedules import ScheduleSettings
from treadle.train.sinks import MetricsSettings
from treadle.train.spikes import SpikeSettings
from treadle.train.stopping import StopSettings


class LoraSettings(Settings):
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685) of the linear layers that `targets` name: q, k, v, o, gate,
    up, down, all, or patterns of module names. Their term is scaled by alpha / rank (alpha / sqrt(rank) with
    `rank_stabilized`).
    """

    rank: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0)
    targets: list[str] = Field(["all"], min_length=1)
    dropout: float = Field(0.0, ge=0, lt=1)
    rank_stabilized: bool = False

    def spec(self) -> LoraSpec:
        """Return what the model layer takes."""
        return LoraSpec(self.rank, self.alpha, tuple(self.targets), self.dropout, self.rank_stabilized)


class ModelSettings(Settings):
    """What is trained: exactly one of `config` (the content of a Hugging Face config.json; vocab_size may be left to
    the data), `depth` (one number that decides all others), or `from` (a model to fine-tune). With `lora` only low-rank
    adapters are trained.
    """

    config: dict[str, Any] | None = None
    depth: int | None = Field(None, ge=1, le=256)
    from_: Path | None = Field(None, alias="from")
    lora: LoraSettings | None = None

    @model_validator(mode="after")
    def _one(self) -> ModelSettings:
        given = [
            name for name, value in (("config", self.config), ("depth", self.depth), ("from", self.from_)) if value
        ]
        if len(given) != 1:
            raise ValueError(
                f"needs exactly one of config, depth and from, it has {' and '.join(given) if given else 'none'}"
            )
        if self.lora is not None and self.from_ is None:
            raise ValueError("lora adapts a model that is there; set from to its path")
        return self


class CorpusSettings(Settings):
    """A prepared corpus (`treadle data prepare`) and its weight in the mixture."""

    path: Path
    weight: float = Field(1.0, gt=0)


class DataSettings(Settings):
    """What is learnt from: corpora mixed by weight, cut into samples of `sequence_length` tokens.

    `validation` left out is the validation split of the training corpora, where they have one. `packing` whole keeps
    each document in one piece where it fits.
    """

    train: list[CorpusSettings] = Field(min_length=1)
    validation: list[CorpusSettings] | None = None
    sequence_length: int = Field(512, ge=2)
    packing: Literal["concat", "whole"] = "concat"
    seed: int = 0
    shuffle: bool = True


class TrainSettings(Settings):
    """The run itself. Batch sizes are in tokens; `batch_tokens` is the global batch of one step over all ranks.

    `steps` may be left out where `model.depth` is given: then it is 20 tokens a parameter (Hoffmann et al. 2022,
    arXiv 2203.15556). `clip` bounds the gradient norm, 0 does not. `reshard` says when gathered weights are dropped:
    after each layer's forward pass, or at the end of the step (faster, more memory). `threads` a process, left out:
    this machine's cores shared among its processes.
    """

    steps: int | None = Field(None, ge=1)
    batch_tokens: int = Field(16384, ge=1)
    microbatch_tokens: int | None = Field(None, ge=1)
    seed: int = 0
    precision: Precision = "bf16"
    clip: float = Field(1.0, ge=0)
    recompute: Recompute = "none"
    reshard: Literal["forward", "step"] = "step"
    device: str = "auto"
    threads: int | None = Field(None, ge=1)
    timeout_minutes: float = Field(30.0, gt=0)


class LogSettings(MetricsSettings):
    """Metrics are written every `every` steps."""

    every: int = Field(1, ge=1)


class RunSettings(Settings):
    """Everything that `treadle train` reads from a run's YAML file."""

    run: Path
    model: ModelSettings
    data: DataSettings
    train: TrainSettings = TrainSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    stop: StopSettings = StopSettings()
    spikes: SpikeSettings = SpikeSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    log: LogSettings = LogSettings()
    plan: Plan = Plan()
    nproc: int = Field(1, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _rate_of_the_depth(cls, tree: Any) -> Any:
        """Where model.depth decides and no rate is given, the rate of AdamW follows from the width."""
        model, optimizer = (
            (tree.get(key) or {} for key in ("model", "optimizer")) if isinstance(tree, dict) else ({}, {})
        )
        if not isinstance(model, dict) or not isinstance(optimizer, dict) or not isinstance(model.get("depth"), int):
            return tree
        key = "adamw_lr" if optimizer.get("name") == "muon" else "lr"
        return {**tree, "optimizer": {key: rate_of_depth(model["depth"]), **optimizer}}


HEAD_SIZE = 64


def rate_of_depth(depth: int) -> float:
    """Return AdamW's peak rate for a model of `depth` layers and width 64 x depth.

    It falls with the root of the width: 1e-3 at 768, where small recipes for that size agree.
    """
    return round(1e-3 * (768 / (HEAD_SIZE * max(1, depth))) ** 0.5, 6)


class Batching(Settings):
    """A global batch in samples: how it is cut into ranks and microbatches."""

    global_samples: int
    microbatch_samples: int
    microbatches: int


def batching(settings: RunSettings, ranks: int) -> Batching:
    """Return how the global batch is cut for `ranks` ranks. Raises UserError naming the numbers that do not divide."""
    length, train = settings.data.sequence_length, settings.train
    if train.batch_tokens % (length * ranks):
        near = max(1, round(train.batch_tokens / (length * ranks))) * length * ranks
        raise UserError(
            f"train.batch_tokens={train.batch_tokens} cannot be divided into samples of data.sequence_length={length} "
            f"for {ranks} rank{'s' if ranks > 1 else ''}; {near} can"
        )
    own = train.batch_tokens // ranks
    microbatch = min(train.microbatch_tokens or own, own)
    if microbatch % length or own % microbatch:
        good = [tokens for tokens in range(length, own + 1, length) if own % tokens == 0]
        near = min(good, key=lambda tokens: abs(tokens - microbatch))
        raise UserError(
            f"train.microbatch_tokens={microbatch} does not divide a rank's {own} tokens a step into whole samples of "
            f"{length}; {near} does"
        )
    return Batching(
        global_samples=train.batch_tokens // length,
        microbatch_samples=microbatch // length,
        microbatches=own // microbatch,
    )


def total_steps(settings: RunSettings, parameters: int) -> int:
    """Return the number of steps of the run. Raises UserError where nothing says it."""
    if settings.train.steps is not None:
        return settings.train.steps
    if settings.model.depth is None:
        raise UserError("train.steps is required: how many steps the run has")
    return max(1, round(20 * parameters / settings.train.batch_tokens))
