"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685): a linear layer's weight W becomes W + scale * b @ a.

attach_lora(model, LoraSpec(rank=16, alpha=32.0, targets=("q", "v")), seed=0)   # freezes all but a and b
lora_state(model)                                                               # what a training run saves
merge_lora(model)                                                               # adds b @ a to W for good
"""

from __future__ import annotations

import fnmatch
import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from treadle import ops
from treadle.config import UserError
from treadle.config.errors import nearest
from treadle.model.blocks import Linear

ALL = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass(frozen=True)
class LoraSpec:
    """Which linear layers get an adapter, and of what kind.

    A target is a part's name ("q", or Hugging Face's "q_proj"), "all", or a pattern of our module names
    ("layers.[0-3].mlp.*"). The adapter's term is scaled by alpha / rank, with `rank_stabilized` by alpha / sqrt(rank)
    (Kalajdzievski 2023, arXiv 2312.03732); `dropout` is the share of its inputs that training sets to zero.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ("all",)
    dropout: float = 0.0
    rank_stabilized: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1 or not 0 < self.alpha < math.inf or not 0 <= self.dropout < 1:
            raise UserError(
                f"a LoRA adapter needs a positive rank and alpha and a dropout in [0, 1), not rank {self.rank}, "
                f"alpha {self.alpha:g}, dropout {self.dropout:g}"
            )


class LowRank(nn.Module):
    """The term that an adapter adds to a linear layer's output."""

    def __init__(self, inputs: int, outputs: int, lora: LoraSpec, like: Tensor, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.lora = lora
        self.scale = lora.alpha / (math.sqrt(lora.rank) if lora.rank_stabilized else lora.rank)
        place = {"device": like.device, "dtype": dtype or like.dtype}
        self.a = nn.Parameter(torch.empty(lora.rank, inputs, **place))
        self.b = nn.Parameter(torch.empty(outputs, lora.rank, **place))

    def forward(self, x: Float[Tensor, "T I"]) -> Float[Tensor, "T O"]:
        if self.lora.dropout:
            x = F.dropout(x, self.lora.dropout, self.training)
        return ops.linear(ops.linear(x, self.a.to(x.dtype)), self.b.to(x.dtype)) * self.scale


def attach_lora(model: nn.Module, lora: LoraSpec, seed: int = 0, dtype: torch.dtype | None = None) -> list[str]:
    """Give each targeted linear layer an adapter, in `dtype` (default: the layer's), and freeze everything else.

    Returns the names of the layers. Adapters start without effect: b is zero, a is drawn from a generator seeded by
    its name (on the meta device nothing is drawn; `initial_adapter_value` gives the values later). Raises UserError for
    a target that matches nothing.
    """
    chosen = target_names(model, lora.targets)
    model.requires_grad_(False)
    for name in chosen:
        adapter = attach_one(model, name, lora, dtype)
        for part, parameter in adapter.named_parameters():
            if not parameter.is_meta:
                with torch.no_grad():
                    parameter.copy_(initial_adapter_value(f"{name}.adapter.{part}", parameter.shape, seed))
    return chosen


def attach_one(model: nn.Module, name: str, lora: LoraSpec, dtype: torch.dtype | None = None) -> LowRank:
    """Give the linear layer `name` an adapter whose values are not set yet, and return it. Raises UserError where it
    has one already."""
    linear = check_bare(model, name)
    outputs, inputs = linear.weight.shape
    linear.adapter = LowRank(inputs, outputs, lora, linear.weight, dtype)
    return linear.adapter


def check_bare(model: nn.Module, name: str) -> Linear:
    """Return the linear layer `name`. Raises UserError where it has an adapter already."""
    linear = model.get_submodule(name)
    assert isinstance(linear, Linear), name
    if linear.adapter is not None:
        raise UserError(f"{name} already has an adapter; merge it first")
    return linear


def target_names(model: nn.Module, targets: tuple[str, ...]) -> list[str]:
    """Return the names of the linear layers that `targets` mean, in the model's order. Raises UserError."""
    linears = adaptable(model)
    chosen: set[str] = set()
    for target in targets:
        part = target.removesuffix("_proj")
        if target == "all":
            found = linears
        elif part in ALL:
            found = [name for name in linears if name.rpartition(".")[2] == part]
        else:
            found = fnmatch.filter(linears, target)
        if not found:
            hint = (
                nearest(target, [*ALL, "all"]) or f"; give one of {', '.join(ALL)}, all, or a pattern of module names"
            )
            raise UserError(f"the LoRA target '{target}' matches no linear layer of the model{hint}")
        chosen.update(found)
    if not chosen:
        raise UserError("there is no LoRA target; give at least one, such as all")
    return [name for name in linears if name in chosen]


def adaptable(model: nn.Module) -> list[str]:
    """Return the names of the linear layers that can have an adapter: all within the layers, but not the head, whose
    weight goes straight into the fused loss."""
    return [name for name, module in model.named_modules() if isinstance(module, Linear) and name != "head"]


def initial_adapter_value(name: str, shape: torch.Size, seed: int) -> Float[Tensor, "..."]:
    """Return the start of an adapter's parameter in fp32, whatever the layout: b zero, a uniform in ±1/sqrt(inputs)."""
    if name.endswith(".b"):
        return torch.zeros(shape)
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(shape[1])


def adapters(model: nn.Module) -> dict[str, LowRank]:
    """Return every adapter by the name of its linear layer."""
    return {
        name: module.adapter
        for name, module in model.named_modules()
        if isinstance(module, Linear) and isinstance(module.adapter, LowRank)
    }


def lora_state(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the adapters' parameters by their names in the model."""
    return {
        f"{name}.adapter.{part}": parameter
        for name, adapter in adapters(model).items()
        for part, parameter in adapter.named_parameters()
    }


@torch.no_grad()
def merged_state(
    model: nn.Module, whole: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's parameters without adapters, their effect added to the weights, as `save_model` takes them.

    `whole` turns a parameter into its whole value where it is sharded; on all ranks alike, since it is collective.
    The product is added in fp32 and rounded once. Parameters without an adapter are yielded as they are.
    """
    found = adapters(model)
    for name, parameter in model.named_parameters():
        if ".adapter." in name:
            continue
        adapter = found.get(name.removesuffix(".weight"))
        value = whole(parameter)
        if adapter is not None and name.endswith(".weight"):
            value = merged(value, whole(adapter.a), whole(adapter.b), adapter.scale)
        yield name, value


@torch.no_grad()
def merge_lora(model: nn.Module) -> None:
    """Add every adapter to its weight for good and take it away."""
    for name, adapter in adapters(model).items():
        linear = model.get_submodule(name)
        assert isinstance(linear, Linear)
        linear.weight.copy_(merged(linear.weight, adapter.a, adapter.b, adapter.scale))
        linear.adapter = None


def merged(weight: Float[Tensor, "O I"], a: Float[Tensor, "R I"], b: Float[Tensor, "O R"], scale: float) -> Tensor:
    """Return weight + scale * b @ a, computed in fp32, in the weight's dtype."""
    return (weight.float() + scale * (b.float() @ a.float())).to(weight.dtype)
