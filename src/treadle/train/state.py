"""All that a run must remember to go on as if it had never stopped.

Two things that other trainers save are absent, because they are pure functions of what is here: the random numbers of
a step come from (seed, step, rank), and the data of a step from (seed, cursor).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from treadle.config import TreadleError
from treadle.model.lora import LoraSpec, MergedState, lora_state
from treadle.model.transformer import Transformer
from treadle.train.optimizers import named_state


@dataclass
class Counters:
    """How far a run has come. `cursor` is the next global sample of the data whose fingerprint is `data`; `seconds`
    sums over all sessions of the run.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    skipped_steps: int = 0
    cursor: int = 0
    data: str = ""


@dataclass
class ScalerState:
    """The loss scale of fp16 and the steps since it last changed; scale 1 and never changed for other precisions."""

    scale: float = 1.0
    good_steps: int = 0


@dataclass
class PatienceState:
    """The best validation loss so far, when it was, and the evaluations since that did not improve on it."""

    best: float | None = None
    best_step: int = 0
    waited: int = 0


@dataclass
class SpikeState:
    """The last losses and gradient norms, from which a spike is told; and how often in a row one was seen."""

    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    in_a_row: int = 0
    rewinds: int = 0


@dataclass
class TrainState:
    """A run in progress: what a checkpoint saves and restores.

    Tensors are the model's parameters (fp32 masters, DTensors where they are sharded) and the optimizer's state, by
    name; `scalars` is plain JSON. `lora` is the adapter that is trained on the model at `base`, else None.
    """

    model: Transformer
    optimizer: torch.optim.Optimizer
    counters: Counters = field(default_factory=Counters)
    scaler: ScalerState = field(default_factory=ScalerState)
    patience: PatienceState = field(default_factory=PatienceState)
    spikes: SpikeState = field(default_factory=SpikeState)
    lora: LoraSpec | None = None
    base: str = ""

    def weights(self) -> Mapping[str, Tensor]:
        """Return the parameters of the model by name as they are saved; a tied head is the embedding.

        Adapters are merged: then each tensor is made whole when it is asked for, which every rank must do alike.
        """
        return dict(self.model.named_parameters()) if self.lora is None else MergedState(self.model, whole)

    def adapter_tensors(self) -> dict[str, Tensor]:
        """Return the adapters' parameters by name; none where there is no adapter."""
        return dict(lora_state(self.model))

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Return the optimizer's state as `<parameter name>/<key>`."""
        return named_state(self.optimizer, self.model.named_parameters())

    def scalars(self) -> dict[str, Any]:
        """Return everything else as plain JSON."""
        return {name: asdict(getattr(self, name)) for name in _SCALARS}

    def load_scalars(self, saved: dict[str, Any]) -> None:
        """Put `scalars` back. Raises TreadleError where they are not of this shape."""
        for name, kind in _SCALARS.items():
            values = saved.get(name)
            known = {member.name for member in fields(kind)}
            if not isinstance(values, dict) or not set(values) <= known:
                raise TreadleError(f"the checkpoint's state has no valid '{name}'; it was made by another version")
            setattr(self, name, kind(**values))


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor whole, gathered from all ranks where it is sharded."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


_SCALARS: dict[str, Any] = {
    "counters": Counters,
    "scaler": ScalerState,
    "patience": PatienceState,
    "spikes": SpikeState,
}
