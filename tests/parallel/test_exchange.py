"""Sums and gathers through shared memory: exact, in pieces, in any order of arrival; a rank that is lost is noticed."""

from __future__ import annotations

import ctypes
import math
import mmap
import subprocess

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from treadle.ops import native
from treadle.parallel import exchange as exchanges
from treadle.parallel.exchange import FOLDER, Exchange, LostRankError, capacity_of, open_exchange
from treadle.parallel.tensor import TensorGroup

CPU = torch.device("cpu")
needs_native = pytest.mark.skipif(bool(native.missing()), reason="there is no compiler, so there is no native library")


def part(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _compare(shared: bool) -> str:
    """Return what differs between the group's sums and gathers and those computed here from what every rank has."""
    exchanges.TOTAL = 1 << 16  # so that much goes in pieces
    group = dist.new_group(list(range(dist.get_world_size())))
    found = open_exchange(group, CPU, 60.0) if shared else None
    if shared and found is None:
        return "no exchange"
    tensor = TensorGroup(group, found)
    tensor.ordered = True
    rank, ranks = tensor.index, tensor.size
    long = capacity_of(ranks) // 4
    for turn, shape in enumerate(
        [(1,), (3, 5), (0, 7), (1, 576), (long,), (2, long // 2 + 3), (3 * long + 1,), (2, 2)]
    ):
        for dtype in (torch.float32, torch.bfloat16):
            every = [part(other + 10 * turn, shape, dtype) for other in range(ranks)]
            wanted = every[0].float()
            for other in every[1:]:
                wanted = wanted + other.float()
            got = tensor.sum(every[rank]) if every[0].numel() else wanted.to(dtype)
            if not torch.equal(got, wanted.to(dtype)):
                return f"sum of {shape} {dtype}"
            if not all(torch.equal(a, b) for a, b in zip(tensor.gather(every[rank]), every, strict=True)):
                return f"gather of {shape} {dtype}"
            first = tensor.gather(every[rank], to_first=True)
            if len(first) != (ranks if rank == 0 else 0) or not all(map(torch.equal, first, every)):
                return f"gather of {shape} {dtype} to the first"
    if not torch.equal(tensor.largest(torch.tensor([float(rank), -float(rank)])), torch.tensor([ranks - 1.0, 0.0])):
        return "maximum"
    if not bool(tensor.sum(torch.full((4,), float(rank) or math.inf)).isinf().all()):
        return "infinity"
    wide = tensor.sum(torch.ones(3, 4, dtype=torch.float64).t() * (rank + 1))
    return "" if bool((wide == ranks * (ranks + 1) / 2).all()) else "float64, not contiguous"


@needs_native
@pytest.mark.parametrize("size", [2, 3])
def test_sums_and_gathers_through_shared_memory(ranks, size: int) -> None:
    before = set(FOLDER.iterdir())
    assert ranks(size).run(_compare, True) == [""] * size
    assert {path.name for path in set(FOLDER.iterdir()) - before if "treadle" in path.name} == set(), "nothing is left"


def test_sums_and_gathers_through_the_network(ranks) -> None:
    assert ranks(3).run(_compare, False) == [""] * 3


def _without(rank_without: int) -> bool:
    """Return whether there is an exchange where one rank has no native library."""
    kept = exchanges._prepare
    if dist.get_rank() == rank_without:
        exchanges._prepare = lambda: False
    try:
        return open_exchange(dist.group.WORLD, CPU, 60.0) is not None
    finally:
        exchanges._prepare = kept


def test_all_ranks_have_one_or_none(ranks) -> None:
    assert ranks(2).run(_without, 1) == [False, False]
    assert ranks(2).run(_without, 7) == [not native.missing()] * 2


def alone(timeout: float) -> tuple[Exchange, mmap.mmap]:
    """Return the exchange of a rank whose neighbour does not come."""
    exchanges._prepare()
    memory = mmap.mmap(-1, native.library().treadle_exchange_bytes(2, capacity_of(2)))
    return Exchange(memory, 0, 2, timeout), memory


@needs_native
def test_a_rank_that_does_not_come_is_waited_for_so_long() -> None:
    with pytest.raises(LostRankError, match=r"gave no sign for 0.1 s"):
        alone(0.1)[0].sum(torch.ones(3))


@needs_native
def test_a_rank_that_is_gone_is_noticed_at_once() -> None:
    child = subprocess.Popen(["/bin/true"])
    child.wait()
    exchange, memory = alone(60.0)
    memory[64 + 8 : 64 + 12] = bytes(ctypes.c_int32(child.pid))
    with pytest.raises(LostRankError, match="rank 1 of this tensor-parallel group is gone"):
        exchange.gather(torch.ones(3))
