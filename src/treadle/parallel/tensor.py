"""Tensor parallelism: what a rank holds of a tensor, and the collectives between the ranks that share a layer.

A linear layer is cut by its outputs (column) or by its inputs (row). A column-parallel layer takes the whole input on
every rank; the row-parallel one behind it gives partial sums, which are added up over ranks. So a pair of them needs
one sum forward and, where the input was taken, one sum backward (Shoeybi et al. 2019, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from treadle.parallel.exchange import Exchange


@dataclass(frozen=True)
class TensorShard:
    """What a rank holds of a tensor: elements `start` to `stop` of its dim `dim`, and behind them `padding` zeros.

    `copies` neighbouring ranks hold the same elements; this is copy number `copy` of them.
    """

    dim: int
    start: int
    stop: int
    padding: int = 0
    copies: int = 1
    copy: int = 0

    def shape(self, whole: tuple[int, ...] | torch.Size) -> tuple[int, ...]:
        """Return the shard's shape for the whole tensor's."""
        size = self.stop - self.start + self.padding
        return (*whole[: self.dim], size, *whole[self.dim + 1 :])

    def of(self, whole: Tensor) -> Tensor:
        """Return the shard of a whole tensor: a view of it, unless there is padding."""
        part = whole.narrow(self.dim, self.start, self.stop - self.start)
        if not self.padding:
            return part
        shape = list(part.shape)
        shape[self.dim] = self.padding
        return torch.cat([part, part.new_zeros(shape)], self.dim)

    def unpadded(self, shard: Tensor) -> Tensor:
        """Return what is not padding, a view."""
        return shard.narrow(self.dim, 0, self.stop - self.start)


def cut(size: int, ranks: int, index: int, dim: int = 0, unit: int = 1, repeat: bool = False) -> TensorShard:
    """Return shard `index` of `ranks` of a dim that holds `size` units of `unit` elements.

    With `repeat`, where there are fewer units than ranks, each is held by several; otherwise the last ranks' shards are
    padded where `ranks` does not divide.
    """
    if repeat and ranks > size:
        copies = ranks // size
        number = index // copies
        return TensorShard(dim, number * unit, (number + 1) * unit, copies=copies, copy=index % copies)
    each = -(-size // ranks)
    start, stop = min(index * each, size), min((index + 1) * each, size)
    return TensorShard(dim, start * unit, stop * unit, (each - (stop - start)) * unit)


class TensorGroup:
    """The ranks that share each layer, and this one's index among them.

    `exchange` is their shared memory where they have one; else their tensors go through `group`. With `ordered` they
    are added in the order of the ranks, so that an element's sum does not depend on how many others travel beside it.
    """

    def __init__(self, group: dist.ProcessGroup, exchange: Exchange | None = None) -> None:
        self.group, self.exchange = group, exchange
        self.index, self.size, self.ordered = group.rank(), group.size(), False

    @property
    def backend(self) -> str:
        """What `group` sends tensors through."""
        return {"gloo": "Gloo", "nccl": "NCCL"}.get(name := dist.get_backend(self.group), name)

    def sum(self, x: Tensor, exact: bool = False) -> Tensor:
        """Return the sum of `x` over ranks, in its dtype. It is added up in fp32 unless that is `exact` anyhow."""
        if self.exchange is not None and self.exchange.takes(x):
            return self.exchange.sum(x)
        if self.ordered:
            wide = torch.promote_types(x.dtype, torch.float32)
            return sum((part.to(wide) for part in self.gather(x)), x.new_zeros((), dtype=wide)).to(x.dtype)
        total = x.to(torch.float32, copy=True) if not exact and x.dtype.itemsize < 4 else x.clone()
        dist.all_reduce(total, group=self.group)
        return total.to(x.dtype)

    def largest(self, x: Tensor) -> Tensor:
        """Return the elementwise maximum of `x` over ranks."""
        if self.exchange is not None and self.exchange.takes(x):
            return torch.stack(self.gather(x)).amax(0)
        found = x.clone()
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return found

    def gather(self, x: Tensor, to_first: bool = False) -> list[Tensor]:
        """Return every rank's `x` in their order; with `to_first` on the first rank only, elsewhere none."""
        keep = not to_first or self.index == 0
        if not x.numel():
            return [x] * self.size if keep else []
        if self.exchange is not None and self.exchange.takes(x):
            found = self.exchange.gather(x, keep)
            return [] if found is None else list(found)
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)] if keep else []
        if to_first:
            dist.gather(x, parts or None, group=self.group, group_dst=0)
        else:
            dist.all_gather(parts, x, group=self.group)
        return parts


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.group.sum(grads[0]), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup, exact: bool) -> Tensor:
        return group.sum(x, exact)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group, ctx.width = group, x.shape[-1]
        return torch.cat(group.gather(x), -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].narrow(-1, ctx.group.index * ctx.width, ctx.width), None


class _SumOfCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: TensorGroup, copies: int) -> Tensor:
        ctx.group, ctx.copies = group, copies
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        group, number = ctx.group, ctx.group.index // ctx.copies
        every = grad.new_zeros((group.size // ctx.copies, *grad.shape))
        every[number] = grad
        return group.sum(every)[number], None, None


def copy_in(x: Tensor, group: TensorGroup) -> Tensor:
    """Return `x`, which is the same on every rank; its gradient is the sum of what each rank's part gives."""
    return _Copy.apply(x, group) if torch.is_grad_enabled() else x


def sum_out(x: Tensor, group: TensorGroup, exact: bool = False) -> Tensor:
    """Return the sum of every rank's `x`; the gradient is passed on to each. See `TensorGroup.sum` for `exact`."""
    return _Sum.apply(x, group, exact) if torch.is_grad_enabled() else group.sum(x, exact)


def gather_out(x: Tensor, group: TensorGroup) -> Tensor:
    """Return every rank's `x` side by side along the last dim; each rank gets the gradient of its own."""
    return _Gather.apply(x, group) if torch.is_grad_enabled() else torch.cat(group.gather(x), -1)


def shared(weight: Tensor, group: TensorGroup, copies: int) -> Tensor:
    """Return `weight`, of which `copies` neighbouring ranks hold the same; its gradient is the sum over them."""
    return _SumOfCopies.apply(weight, group, copies) if copies > 1 and torch.is_grad_enabled() else weight


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a parameter, as a plain tensor."""
    # By its method, not its class: importing that takes longer than a small model takes to load.
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
