"""Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon): momentum, orthogonalized, for hidden matrices.

The orthogonalization needs the whole matrix. Where parameters are sharded (FSDP2), the matrices are dealt out to the
ranks: each gathers its own whole, orthogonalizes them and sends every rank its shard back. The work is divided, and the
update is the one that a single process would make.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

# The quintic of Jordan 2024: its slope at 0 is steep, its fixed points scatter singular values over about 0.7 to 1.2.
QUINTIC = (3.4445, -4.7750, 2.0315)


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Return whether Muon updates a parameter: the matrices of the layers, but no adapter's thin factors."""
    return parameter.ndim == 2 and name.startswith("layers.") and ".adapter." not in name


def orthogonalize(
    matrix: Float[Tensor, "rows columns"], steps: int = 5, dtype: torch.dtype = torch.bfloat16
) -> Float[Tensor, "rows columns"]:
    """Return about U V^T of the matrix's singular value decomposition U S V^T, by Newton-Schulz iteration."""
    a, b, c = QUINTIC
    x = matrix.to(dtype)
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.T
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.T).to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """Muon for `matrices`; what else is trained belongs to `adamw`, whose groups and state are part of this one's."""

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        adamw: torch.optim.AdamW | None,
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
        nesterov: bool,
        steps: int,
        dtype: torch.dtype,
        lr_scale: str,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        super().__init__([{"params": list(matrices)}], defaults)
        self.steps, self.dtype, self.lr_scale = steps, dtype, lr_scale
        self.matrix_group = self.param_groups[0]
        self.adamw = adamw
        if adamw is not None:
            self.param_groups += adamw.param_groups
            adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyrefly: ignore[bad-override]
        """Update every parameter that has a gradient."""
        assert closure is None
        group = self.matrix_group
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter, update in zip(
            parameters, self._orthogonal([self._momentum(group, parameter) for parameter in parameters]), strict=True
        ):
            local = _local(parameter)
            local.mul_(1 - group["lr"] * group["weight_decay"])
            local.sub_(update.to(local.dtype), alpha=group["lr"] * self._scale(parameter.shape))
        if self.adamw is not None:
            self.adamw.step()

    def _momentum(self, group: dict[str, Any], parameter: nn.Parameter) -> Tensor:
        """Advance the parameter's momentum and return what is to be orthogonalized (Nesterov's look ahead)."""
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(gradient)
        average, own = _local(state["momentum"]), _local(gradient)
        average.lerp_(own, 1 - group["momentum"])
        update = own.lerp(average, group["momentum"]) if group["nesterov"] else average
        return _wrapped(update, parameter)

    def _scale(self, shape: torch.Size) -> float:
        rows, columns = shape
        if self.lr_scale == "rms":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1.0, rows / columns))

    def _orthogonal(self, matrices: list[Tensor]) -> list[Tensor]:
        """Return this rank's part of each matrix's orthogonalization."""
        updates: dict[int, Tensor] = {}
        dealt: dict[tuple[Any, int], list[int]] = {}
        for index, matrix in enumerate(matrices):
            axis = _only_sharded_axis(matrix)
            if axis is not None:
                assert isinstance(matrix, DTensor)
                dealt.setdefault((matrix.device_mesh, axis), []).append(index)
            else:
                updates[index] = self._whole(matrix)
        for (mesh, axis), indexes in dealt.items():
            parts = self._dealt([matrices[index] for index in indexes], mesh.get_group(axis), axis)  # pyrefly: ignore
            updates.update(zip(indexes, parts, strict=True))
        return [updates[index] for index in range(len(matrices))]

    def _whole(self, matrix: Tensor) -> Tensor:
        """One process, or a layout that is sharded along several mesh axes: every rank computes the whole."""
        if not isinstance(matrix, DTensor):
            return orthogonalize(matrix, self.steps, self.dtype)
        update = orthogonalize(matrix.full_tensor(), self.steps, self.dtype)
        return distribute_tensor(update, matrix.device_mesh, matrix.placements, src_data_rank=None).to_local()

    def _dealt(self, matrices: list[DTensor], group: dist.ProcessGroup, axis: int) -> list[Tensor]:
        """Deal the matrices out to the group's ranks, the largest first; exchange shards twice, all at once.

        Shards travel in the dtype of the iteration, to which the owner would round them anyway.
        """
        ranks, own = group.size(), group.rank()
        owners = _deal([_flops(matrix.shape) for matrix in matrices], ranks)
        dims = [matrix.placements[axis].dim for matrix in matrices]  # pyrefly: ignore[missing-attribute]
        shapes = [
            [_shard_shape(matrix.shape, dim, rank, ranks) for rank in range(ranks)]
            for matrix, dim in zip(matrices, dims, strict=True)
        ]
        mine = [index for index, owner in enumerate(owners) if owner == own]
        to_owner = [[i for i, owner in enumerate(owners) if owner == rank] for rank in range(ranks)]

        received = _exchange(
            [[matrices[i].to_local().to(self.dtype) for i in to_owner[rank]] for rank in range(ranks)],
            [[shapes[i][rank] for i in mine] for rank in range(ranks)],
            matrices[0].to_local().new_empty(0, dtype=self.dtype),
            group,
        )
        wholes = [
            orthogonalize(torch.cat([received[rank][j] for rank in range(ranks)], dims[i]), self.steps, self.dtype)
            for j, i in enumerate(mine)
        ]
        returned = _exchange(
            [
                [_shard(whole, dims[i], rank, ranks) for i, whole in zip(mine, wholes, strict=True)]
                for rank in range(ranks)
            ],
            [[shapes[i][own] for i in to_owner[rank]] for rank in range(ranks)],
            matrices[0].to_local().new_empty(0, dtype=self.dtype),
            group,
        )
        parts = {i: returned[rank][j] for rank in range(ranks) for j, i in enumerate(to_owner[rank])}
        return [parts[i] for i in range(len(matrices))]


def _exchange(
    sent: list[list[Tensor]], shapes: list[list[tuple[int, ...]]], empty: Tensor, group: dist.ProcessGroup
) -> list[list[Tensor]]:
    """Send `sent[rank]` to each rank; return what each sent here, whose shapes are `shapes[rank]`.

    `empty` has the dtype and device of all of it.
    """
    outgoing = torch.cat([empty, *(tensor.reshape(-1) for tensors in sent for tensor in tensors)])
    outgoing_sizes = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
    counts = [[math.prod(shape) for shape in of_rank] for of_rank in shapes]
    incoming_sizes = [sum(of_rank) for of_rank in counts]
    incoming = empty.new_empty(sum(incoming_sizes))
    dist.all_to_all_single(incoming, outgoing, incoming_sizes, outgoing_sizes, group=group)
    received = []
    for of_rank, sizes, block in zip(shapes, counts, incoming.split(incoming_sizes), strict=True):
        received.append([part.view(shape) for shape, part in zip(of_rank, block.split(sizes), strict=True)])
    return received


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _wrapped(local: Tensor, like: Tensor) -> Tensor:
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _only_sharded_axis(matrix: Tensor) -> int | None:
    """Return the one mesh axis along which a matrix is plainly sharded, where all others replicate it."""
    if not isinstance(matrix, DTensor):
        return None
    sharded = [axis for axis, placement in enumerate(matrix.placements) if not isinstance(placement, Replicate)]
    if len(sharded) == 1 and type(matrix.placements[sharded[0]]) is Shard:
        return sharded[0]
    return None


def _shard(whole: Tensor, dim: int, rank: int, ranks: int) -> Tensor:
    """Return a rank's shard as DTensor cuts it: equal chunks rounded up, the last ones shorter or empty."""
    size = whole.shape[dim]
    chunk = math.ceil(size / ranks)
    start = min(rank * chunk, size)
    return whole.narrow(dim, start, min(chunk, size - start))


def _shard_shape(shape: torch.Size, dim: int, rank: int, ranks: int) -> tuple[int, ...]:
    chunk = math.ceil(shape[dim] / ranks)
    start = min(rank * chunk, shape[dim])
    return (*shape[:dim], min(chunk, shape[dim] - start), *shape[dim + 1 :])


def _flops(shape: torch.Size) -> int:
    """Multiplications of one iteration, by which the matrices are dealt out."""
    short, long = min(shape), max(shape)
    return short * short * (2 * long + short)


def _deal(costs: list[int], ranks: int) -> list[int]:
    """Return each item's rank: the dearest first, always to the rank with the least so far."""
    loads, owners = [0] * ranks, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        rank = min(range(ranks), key=lambda rank: (loads[rank], rank))
        owners[index] = rank
        loads[rank] += costs[index]
    return owners
