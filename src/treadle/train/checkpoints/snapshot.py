"""Copies of tensors as they are at one moment, whole, on rank 0, while training goes on changing the originals."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from treadle.config import TreadleError
from treadle.parallel.collectives import together


class Snapshots:
    """Takes one snapshot after the other into the same memory; the one before must no longer be in use.

    That memory is kept: a run that could not spare it could not save, and touching new memory costs more than copying.
    """

    def __init__(self, first: bool) -> None:
        """`first` says whether this process is the rank that keeps the copies."""
        self.first = first
        self._memory: dict[tuple[str, str], Tensor] = {}

    @torch.no_grad()
    def take(self, groups: Mapping[str, Mapping[str, Tensor]]) -> tuple[dict[str, dict[str, Tensor]], int]:
        """Return the groups' tensors, whole and on the CPU, and their bytes together; on other ranks nothing, and 0.

        Every rank calls it: they gather sharded tensors one after the other, so that the others hold no more than one
        at a time. Raises TreadleError on all of them where rank 0 has too little memory.
        """
        copies: dict[str, dict[str, Tensor]] = {group: {} for group in groups}
        problem: Exception | None = None
        for group, tensors in groups.items():
            for name, tensor in tensors.items():
                whole = tensor.detach()
                whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
                if self.first and problem is None:
                    try:
                        copies[group][name] = self._own(group, name, whole, tensor)
                    except (RuntimeError, MemoryError) as error:
                        problem = error

        def check() -> None:
            if problem is not None:
                raise TreadleError(f"there is too little memory for a copy of the checkpoint: {problem}")

        together(check)
        return copies, sum(copy.nbytes for members in copies.values() for copy in members.values())

    def _own(self, group: str, name: str, whole: Tensor, original: Tensor) -> Tensor:
        """Return `whole` itself where gathering made it, else a copy that the original does not share."""
        local = original.to_local() if isinstance(original, DTensor) else original
        if whole.device.type == "cpu" and whole.untyped_storage().data_ptr() != local.untyped_storage().data_ptr():
            return whole.contiguous()
        copy = self._memory.get((group, name))
        if copy is None or copy.shape != whole.shape or copy.dtype != whole.dtype:
            copy = self._memory[group, name] = torch.empty(whole.shape, dtype=whole.dtype)
        return copy.copy_(whole)
