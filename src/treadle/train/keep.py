"""A run's checkpoints: what of its state goes into one, and how it comes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from treadle.config import UserError
from treadle.model.lora import LoraSpec, attach_lora
from treadle.model.spec import ModelSpec
from treadle.model.tokenizer import Tokenizer
from treadle.model.transformer import Transformer
from treadle.parallel.collectives import from_first, together
from treadle.parallel.shard import fill
from treadle.train.checkpoints import (
    Checkpoint,
    CheckpointSettings,
    CheckpointWriter,
    Content,
    SaveReport,
    check_same_model,
    latest_good,
    open_checkpoint,
)
from treadle.train.optimizers import load_named_state
from treadle.train.state import TrainState
from treadle.weights.adapter import save_adapter


class Keeper:
    """Saves and restores the state of the run in `run`; every rank calls each method at the same step.

    `made_with` is plain data that every checkpoint records for people: the plan and the resolved settings.
    """

    def __init__(
        self, run: Path, settings: CheckpointSettings, tokenizer: Tokenizer, made_with: Mapping[str, Any]
    ) -> None:
        self.run, self.settings, self.tokenizer, self.made_with = run, settings, tokenizer, made_with
        self.writer = CheckpointWriter(run, settings)

    def restore(self, state: TrainState) -> bool:
        """Put the newest good checkpoint into `state`; False where there is none. Raises UserError.

        Rank 0 looks for it and compares checksums; the others read what it found.
        """

        def find() -> Checkpoint | None:
            return latest_good(self.run, self.settings.verify) if self.writer.first else None

        checkpoint = together(find)
        path = from_first(str(checkpoint.path) if checkpoint else "")
        if not path:
            return False

        def put() -> None:
            self._put(checkpoint or open_checkpoint(path, checksums=False), state)

        together(put)
        self.writer.last_step = state.counters.step
        return True

    def _put(self, found: Checkpoint, state: TrainState) -> None:
        check_same_model(found, state.model.spec, self.tokenizer.fingerprint)
        check_same_adapter(found, state)
        check_same_optimizer(found, state)
        # With an adapter the model's own weights are still those that it was built with.
        values = found.weights() if state.lora is None else found.tensors("adapter")
        fill(state.model, ((name, values[name]) for name in values), all_of_it=state.lora is None)
        state.optimizer.state.clear()
        saved = found.tensors("optimizer")
        load_named_state(state.optimizer, state.model.named_parameters(), saved, saved.__getitem__)
        state.load_scalars(dict(found.state["run"]))

    def save(self, state: TrainState, wait: bool = False) -> SaveReport:
        """Begin to save `state`, or, with `wait`, save it, and return what that cost.

        Raises TreadleError on every rank where it fails.
        """
        content = Content(
            step=state.counters.step,
            spec=state.model.spec,
            weights=state.weights(),
            tensors={"optimizer": state.optimizer_tensors(), "adapter": state.adapter_tensors()},
            state={
                "run": state.scalars(),
                "optimizer": type(state.optimizer).__name__,
                **adapter_record(state),
                **self.made_with,
            },
            tokenizer=self.tokenizer,
            beside=peft_writer(state.model.spec, state.lora, state.base) if state.lora is not None else None,
        )
        return self.writer.save(content, wait)

    def finish(self) -> None:
        """Return when what was begun is saved. Raises TreadleError on every rank where that failed."""
        together(self.writer.close)


def adapter_record(state: TrainState) -> dict[str, Any]:
    """Return what a checkpoint says of the adapter that is trained; nothing where there is none."""
    return (
        {"lora": {**asdict(state.lora), "targets": list(state.lora.targets), "base": state.base}} if state.lora else {}
    )


def check_same_adapter(checkpoint: Checkpoint, state: TrainState) -> None:
    """Raise UserError where a checkpoint was made with another adapter, or of another base model, than the run has."""
    saved, own = checkpoint.state.get("lora"), adapter_record(state).get("lora")
    if saved != own:
        keys = sorted(key for key in {**(saved or {}), **(own or {})} if (saved or {}).get(key) != (own or {}).get(key))
        raise UserError(
            f"{checkpoint.path} was trained with other model.lora settings ({', '.join(keys)} differ); continue with "
            "those, or set another folder for this run"
        )


def check_same_optimizer(checkpoint: Checkpoint, state: TrainState) -> None:
    """Raise UserError where a checkpoint holds the state of another kind of optimizer than the run has."""
    saved, own = checkpoint.state.get("optimizer"), type(state.optimizer).__name__
    if saved != own:
        raise UserError(
            f"{checkpoint.path} was trained with the optimizer {saved}, this run has {own}; continue with that one, or "
            f"set another folder for this run and model.from={checkpoint.path}"
        )


def peft_writer(
    spec: ModelSpec, lora: LoraSpec, base: str
) -> Callable[[Path, Mapping[str, Mapping[str, Tensor]]], None]:
    """Return what writes the adapter into a checkpoint's folder adapter/ in PEFT's format."""
    # The structure alone: the live parameters come and go while training goes on.
    model = Transformer(spec, device="meta")
    attach_lora(model, lora)
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def write(folder: Path, groups: Mapping[str, Mapping[str, Tensor]]) -> None:
        (folder / "adapter").mkdir()
        copies = groups["adapter"]
        save_adapter(folder / "adapter", model, base, lambda parameter: copies[names[id(parameter)]])

    return write
