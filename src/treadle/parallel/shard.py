"""Sharded data parallelism (FSDP2), applied to a model from outside, and what must know that parameters are sharded."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from treadle.parallel.mesh import Mesh


def shard(
    model: nn.Module, layers: Iterable[nn.Module], mesh: Mesh, dtype: torch.dtype | None, reshard_in_forward: bool
) -> None:
    """Cut `model` into shards over the mesh: each layer is a unit, what lies outside the layers belongs to the root.

    The embedding and the head stay together in the root because they may be one tied parameter. Parameters stay fp32
    masters; layers compute in `dtype` (None: as they are), gradients are summed over ranks in fp32, never averaged.
    With `reshard_in_forward` a layer's gathered weights are dropped between forward and backward (less memory, they
    travel twice); otherwise they are kept until the step ends.
    """
    axes = mesh.device_mesh["dp_shard" if mesh.plan.dp_replicate == 1 else ("dp_replicate", "dp_shard")]
    # Inputs are not cast: token ids are whole numbers, and the weights of tokens must keep their precision.
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in layers:
        fully_shard(layer, mesh=axes, mp_policy=precision, reshard_after_forward=reshard_in_forward)
    fully_shard(model, mesh=axes, mp_policy=precision, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Gloo has no other reduction; with the factor 1 it is the plain sum.
            module.set_force_sum_reduction_for_comms(True)


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give a sharded model that was built on "meta" its memory on `device`, uninitialized."""
    model.to_empty(device=device)


@torch.no_grad()
def fill(model: nn.Module, values: Iterable[tuple[str, Tensor]], all_of_it: bool = True) -> None:
    """Set every parameter from `values`: names and whole tensors, of which each rank keeps its own shard.

    No rank communicates, and one whole tensor is needed at a time. Without `all_of_it` parameters may stay as they are.
    """
    left = dict(model.named_parameters())
    for name, whole in values:
        parameter = left.pop(name)
        if isinstance(parameter, DTensor):
            whole = whole.to(parameter.dtype)
            own = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(own.to_local())
        else:
            parameter.copy_(whole)
    assert not (left and all_of_it), f"no value for {', '.join(left)}"


def synchronize_gradients(model: nn.Module, enabled: bool, keep_weights: bool) -> None:
    """Say whether the next backward pass sums gradients over ranks, and whether it keeps the gathered weights."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
        model.set_reshard_after_backward(not keep_weights)
        model.set_is_last_backward(enabled)


def drop_gathered(model: nn.Module) -> None:
    """Drop weights that were gathered for a forward pass without a backward one; until then parameters are whole."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return this rank's part of each gradient that there is."""
    return [
        gradient.to_local() if isinstance(gradient, DTensor) else gradient
        for parameter in parameters
        if (gradient := parameter.grad) is not None
    ]


def gradient_square_sum(parameters: Iterable[nn.Parameter]) -> float:
    """Return this rank's share of the squared norm of all gradients: summed over all ranks it is the whole.

    What several ranks hold alike is divided by their number.
    """
    by_copies: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        gradient, copies = parameter.grad, 1
        if gradient is None:
            continue
        if isinstance(gradient, DTensor):
            mesh = gradient.device_mesh
            copies = math.prod(
                mesh.size(axis) for axis, place in enumerate(gradient.placements) if isinstance(place, Replicate)
            )
            gradient = gradient.to_local()
        if gradient.numel():
            by_copies.setdefault(copies, []).append(gradient)
    total = 0.0
    for copies, gradients in by_copies.items():
        norms = torch.stack(torch._foreach_norm(gradients, 2.0, dtype=torch.float32))
        total += float(norms.double().square().sum()) / copies
    return total
