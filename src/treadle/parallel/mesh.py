"""Joining the other ranks: the process group and the device mesh, from the environment that a launcher sets."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from treadle.config import UserError
from treadle.parallel.exchange import open_exchange
from treadle.parallel.pipeline import PipelineGroup
from treadle.parallel.plan import Plan
from treadle.parallel.tensor import TensorGroup

# What gradients and weights travel over, by device; control messages always go over Gloo from the CPU.
BACKENDS = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl", "npu": "hccl"}


@dataclass(frozen=True)
class Mesh:
    """This rank's place among the ranks of a plan."""

    plan: Plan
    device: torch.device
    rank: int
    size: int
    device_mesh: DeviceMesh
    timeout_seconds: float

    @property
    def first(self) -> bool:
        """Whether this rank speaks for all (prints, writes metrics)."""
        return self.rank == 0

    def tensor_group(self) -> TensorGroup | None:
        """Return the ranks that share this one's layers, None where it has them alone. Every rank calls it at once."""
        if self.plan.tp == 1:
            return None
        group = self.device_mesh.get_group("tp")
        return TensorGroup(group, open_exchange(group, self.device, self.timeout_seconds))

    def pipeline_group(self) -> PipelineGroup | None:
        """Return the ranks that hold the stages of this one's pipeline, None where it has all layers."""
        return PipelineGroup(self.device_mesh.get_group("pp")) if self.plan.pp > 1 else None


def world_from_environment() -> tuple[int, int, int]:
    """Return (rank, ranks, local rank) as a launcher such as torchrun set them; (0, 1, 0) without one.

    Raises UserError where they are no such numbers.
    """
    rank, ranks, local_rank = _number("RANK", 0), _number("WORLD_SIZE", 1), _number("LOCAL_RANK", 0)
    if not rank < ranks:
        raise UserError(f"the environment says RANK={rank} of WORLD_SIZE={ranks}, but ranks count from 0; {_WAY_OUT}")
    return rank, ranks, local_rank


_WAY_OUT = "start it through a launcher such as torchrun, or unset RANK and WORLD_SIZE"


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdecimal()):
        raise UserError(f"the environment says {name}={text}, which is no whole number; {_WAY_OUT}")
    return int(text)


def launched() -> bool:
    """Return whether a launcher started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@dataclass(frozen=True)
class Rendezvous:
    """Where ranks meet that no launcher started: each its number, and a store that all of them reach."""

    rank: int
    size: int
    store: dist.Store


@contextmanager
def join(
    plan: Plan, device: torch.device, timeout_seconds: float = 1800, rendezvous: Rendezvous | None = None
) -> Generator[Mesh]:
    """Join the process group, yield this rank's place in the mesh, and leave it again.

    Without a launcher or `rendezvous` this process is a group of its own. A process group that is already there is used
    and kept. Raises UserError where the plan does not fit the number of ranks.
    """
    rank, size, _ = world_from_environment() if rendezvous is None else (rendezvous.rank, rendezvous.size, 0)
    plan = plan.resolve(size)
    own = not dist.is_initialized()
    if own:
        backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{BACKENDS.get(device.type, 'gloo')}"
        timeout = timedelta(seconds=timeout_seconds)
        if device.type != "cpu":
            torch.accelerator.set_device_index(device.index)
        if rendezvous is not None:
            dist.init_process_group(backend, store=rendezvous.store, rank=rank, world_size=size, timeout=timeout)
        elif launched():
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        axes = plan.axes()
        device_mesh = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        for axis in axes:  # otherwise the groups along the axes would wait for PyTorch's own default
            _set_pg_timeout(timedelta(seconds=timeout_seconds), device_mesh.get_group(axis))
        yield Mesh(plan, device, rank, size, device_mesh, timeout_seconds)
    finally:
        if own:
            dist.destroy_process_group()
