"""Optimizers by name: AdamW, Muon, and those of other packages (entry-point group `treadle.optimizers`).

A factory takes the settings and the named parameters and returns a `torch.optim.Optimizer`. Its state, tensors or
numbers in `optimizer.state`, is addressed by parameter name for checkpoints (`named_state`, `load_named_state`), as
whole tensors, so that it can be loaded into any layout.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Protocol

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from treadle.config import Settings, TreadleError
from treadle.config.plugins import Parts
from treadle.train.muon import Muon, is_hidden_matrix

NamedParameters = Iterable[tuple[str, nn.Parameter]]

# Where a setting is left out, what it is for this optimizer: Muon's update has the norm of an orthogonal matrix, so
# its rate and decay are of another size (the values of Jordan 2024) unless lr_scale makes them AdamW's.
DEFAULTS: Mapping[str, Mapping[str, float]] = {"muon": {"lr": 0.02, "weight_decay": 0.01}}


class OptimizerSettings(Settings):
    """How parameters are updated. `lr` is the peak rate; the schedule multiplies it by a factor at each step.

    Weight decay is decoupled, lr x weight_decay (Loshchilov & Hutter 2019, arXiv 1711.05101), and leaves out norms,
    biases and sinks always, the embedding unless `decay_embedding`. For Muon, `lr` is the rate of the hidden matrices
    and `adamw_lr` that of everything else (left out: `lr` under the rule rms, else 0.003); `lr_scale` is one of

    - shape: lr x sqrt(max(1, rows / columns)) (Jordan 2024, https://kellerjordan.github.io/posts/muon);
    - rms: lr x 0.2 sqrt(max(rows, columns)), an update as large as AdamW's, so that rates and decay tuned for AdamW
      carry over (Liu et al. 2025, arXiv 2502.16982).

    `options` is for optimizers of other packages.
    """

    name: str = "adamw"
    lr: float = Field(3e-4, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    decay_embedding: bool = False
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    adamw_lr: float | None = Field(None, gt=0)
    momentum: float = Field(0.95, ge=0, lt=1)
    nesterov: bool = True
    newton_schulz_steps: int = Field(5, ge=1, le=20)
    newton_schulz_dtype: Literal["bf16", "fp32"] = "bf16"
    lr_scale: Literal["shape", "rms"] = "shape"
    options: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_name(cls, tree: Any) -> Any:
        if isinstance(tree, Mapping) and tree.get("lr_scale") != "rms":
            return {**DEFAULTS.get(str(tree.get("name")), {}), **tree}
        return tree

    @model_validator(mode="after")
    def _checked(self) -> OptimizerSettings:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must lie from 0 to below 1, they are {list(self.betas)}")
        return self


class OptimizerFactory(Protocol):
    """Makes an optimizer of the named parameters; those that need no gradient are already left out."""

    def __call__(
        self, settings: OptimizerSettings, named_parameters: list[tuple[str, nn.Parameter]]
    ) -> torch.optim.Optimizer: ...


optimizers: Parts[OptimizerFactory] = Parts("optimizer")


def build_optimizer(settings: OptimizerSettings, named_parameters: NamedParameters) -> torch.optim.Optimizer:
    """Return the optimizer that `settings.name` names, over the parameters that need a gradient.

    Each of its groups holds its peak rate as `initial_lr` (`scale_rates` multiplies it). Raises UserError for an
    unknown name.
    """
    trained = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    assert trained, "no parameter needs a gradient"
    optimizer = optimizers.get(settings.name)(settings, trained)
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    return optimizer


def scale_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set every group's learning rate to `factor` times its peak."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor


def decays(settings: OptimizerSettings, name: str, parameter: Tensor) -> bool:
    """Return whether weight decay applies to a parameter: to matrices, to the embedding only where asked."""
    return parameter.ndim >= 2 and (settings.decay_embedding or not name.startswith("embedding."))


@optimizers.add("adamw")
def adamw(settings: OptimizerSettings, named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter 2019), fused where torch has the kernel."""
    return _adamw(settings, named_parameters, settings.lr)


@optimizers.add("muon")
def muon(settings: OptimizerSettings, named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Muon for the hidden matrices (see train/muon.py), AdamW for the embedding, the head, norms and biases."""
    matrices = [(name, parameter) for name, parameter in named_parameters if is_hidden_matrix(name, parameter)]
    others = [(name, parameter) for name, parameter in named_parameters if not is_hidden_matrix(name, parameter)]
    adamw_lr = settings.adamw_lr or (settings.lr if settings.lr_scale == "rms" else 3e-3)
    return Muon(
        [parameter for _, parameter in matrices],
        _adamw(settings, others, adamw_lr) if others else None,
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        steps=settings.newton_schulz_steps,
        dtype=torch.bfloat16 if settings.newton_schulz_dtype == "bf16" else torch.float32,
        lr_scale=settings.lr_scale,
    )


def _adamw(
    settings: OptimizerSettings, named_parameters: list[tuple[str, nn.Parameter]], lr: float
) -> torch.optim.AdamW:
    groups = []
    for decayed in (True, False):
        members = [p for name, p in named_parameters if decays(settings, name, p) == decayed]
        if members:
            groups.append({"params": members, "weight_decay": settings.weight_decay if decayed else 0.0})
    fused = all(parameter.device.type in ("cpu", "cuda", "xpu", "mps") for _, parameter in named_parameters)
    return torch.optim.AdamW(groups, lr=lr, betas=settings.betas, eps=settings.eps, fused=fused)


def named_state(optimizer: torch.optim.Optimizer, named_parameters: NamedParameters) -> dict[str, Tensor]:
    """Return the optimizer's state as `<parameter name>/<key>` -> tensor (a DTensor where the parameter is one).

    Numbers become float64 tensors without dims. A parameter that was never updated has no state. Raises TreadleError
    for state that is neither, because a checkpoint could not hold it.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in named_parameters:
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, numbers.Real):
                value = torch.tensor(float(value), dtype=torch.float64)
            if not isinstance(value, Tensor):
                raise TreadleError(
                    f"the optimizer {type(optimizer).__name__} keeps a {type(value).__name__} as '{key}' of {name}; "
                    "only tensors and numbers can be saved"
                )
            tensors[f"{name}/{key}"] = value
    return tensors


def load_named_state(
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters,
    names: Iterable[str],
    read: Callable[[str], Tensor],
) -> None:
    """Put saved state back: `read` returns the whole tensor of one of `names` (those of `named_state`).

    What has its parameter's shape takes its parameter's layout, so any number of ranks can load what any other
    number saved. Raises TreadleError for the state of a parameter that the optimizer does not have.
    """
    parameters = dict(named_parameters)
    # As in torch: kernels that read the step count on the device need it there.
    on_device = {
        parameter
        for group in optimizer.param_groups
        if group.get("fused") or group.get("capturable")
        for parameter in group["params"]
    }
    for name in names:
        owner, _, key = name.rpartition("/")
        if owner not in parameters:
            raise TreadleError(f"the checkpoint has optimizer state of '{owner}', a parameter that is not trained here")
        parameter, value = parameters[owner], read(name)
        if value.ndim == 0 and value.dtype == torch.float64:
            optimizer.state[parameter][key] = value.item()
        elif value.ndim == 0 and parameter in on_device:
            optimizer.state[parameter][key] = value.to(parameter.device, copy=True)
        else:
            optimizer.state[parameter][key] = laid_out_like(parameter, value)


@torch.no_grad()
def laid_out_like(parameter: Tensor, whole: Tensor) -> Tensor:
    """Return a copy of `whole` on the parameter's device, sharded as the parameter is where it has its shape.

    A tensor without dims (a step count) stays where it is. No rank communicates: each takes its own shard of `whole`,
    so that a memory-mapped one is read no further than that.
    """
    if whole.ndim == 0:
        return whole.clone()
    if not isinstance(parameter, DTensor) or whole.shape != parameter.shape:
        return whole.to(parameter.device, copy=True)
    mesh = parameter.device_mesh
    shard = distribute_tensor(whole, mesh, parameter.placements, src_data_rank=None)
    return DTensor.from_local(
        shard.to_local().to(parameter.device, copy=True),
        mesh,
        parameter.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
