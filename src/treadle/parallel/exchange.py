"""Sums and gathers between ranks of one machine through shared memory, which takes a fraction of a message's time.

A layer of a model that two ranks share needs two sums a token, so that on CPUs their latency is what tensor parallelism
costs. The work is done by the native library (ops/native/exchange.cpp).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import os
import secrets
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from treadle.config import TreadleError
from treadle.ops import native
from treadle.ops.native.abi import DTYPES

FOLDER = Path("/dev/shm")  # noqa: S108 - shared memory is what is wanted; files are made exclusively, for this user alone
TOTAL = 16 << 20  # bytes of a group's memory; what a rank's share does not hold goes in pieces
MOST_RANKS = 16  # every rank reads what all others give, so that many make it slow


class LostRankError(TreadleError):
    """Another rank is gone, or did not come in time."""


class Exchange:
    """The memory that the ranks of a group share. Made by `open_exchange`."""

    def __init__(self, memory: mmap.mmap, rank: int, ranks: int, timeout: float) -> None:
        self._memory, self._library = memory, native.library()
        self._ranks, self._timeout = ranks, timeout
        self._region = (ctypes.c_char * len(memory)).from_buffer(memory)
        self._group = (ctypes.addressof(self._region), capacity_of(ranks), ranks, rank)
        self._library.treadle_exchange_enter(*self._group)

    @staticmethod
    def takes(x: Tensor) -> bool:
        """Return whether tensors like this one can be summed."""
        return x.is_cpu and x.dtype in DTYPES

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of every rank's `x`, added in fp32 in the order of the ranks. Raises LostRankError."""
        x = x.contiguous()
        out = torch.empty_like(x)
        self._check(
            self._library.treadle_exchange_sum(
                *self._group, self._timeout, DTYPES[x.dtype], x.data_ptr(), out.data_ptr(), x.numel()
            )
        )
        return out

    def gather(self, x: Tensor, keep: bool = True) -> Tensor | None:
        """Return every rank's `x` in their order, [ranks, *x.shape]; None without `keep`. Raises LostRankError."""
        x = x.contiguous()
        out = x.new_empty((self._ranks, *x.shape)) if keep else None
        self._check(
            self._library.treadle_exchange_gather(
                *self._group, self._timeout, x.data_ptr(), None if out is None else out.data_ptr(), x.nbytes
            )
        )
        return out

    def _check(self, result: int) -> None:
        if result > 0:
            raise LostRankError(f"rank {result - 1} of this tensor-parallel group is gone")
        if result < 0:
            raise LostRankError(f"a rank of this tensor-parallel group gave no sign for {self._timeout:g} s")


def capacity_of(ranks: int) -> int:
    """Return the bytes that each of so many ranks gives at once."""
    return TOTAL // (2 * ranks) // 64 * 64


def open_exchange(group: dist.ProcessGroup, device: torch.device, timeout: float) -> Exchange | None:
    """Return the group's exchange, or None where there can be none: other devices, machines, or no native library.

    Every rank of the group calls it and gets the same answer.
    """
    rank, ranks = group.rank(), group.size()
    here = device.type == "cpu" and _prepare() and 1 < ranks <= MOST_RANKS
    # Which machine this is, and the name of the first rank's file, in numbers that all can compare.
    own = torch.tensor([_machine() if here else 0, secrets.randbits(62)])
    everyone = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(everyone, own, group=group)
    machines = {int(one[0]) for one in everyone}
    if 0 in machines or len(machines) > 1:
        return None
    path = FOLDER / f"treadle-{int(everyone[0][1]):016x}"
    size = native.library().treadle_exchange_bytes(ranks, capacity_of(ranks))
    memory = _map(path, size, create=True) if rank == 0 else None
    dist.barrier(group=group)
    memory = memory if rank == 0 else _map(path, size, create=False)
    exchange = Exchange(memory, rank, ranks, timeout) if memory is not None else None
    good = torch.tensor([int(exchange is not None)])
    dist.all_reduce(good, dist.ReduceOp.MIN, group=group)
    if rank == 0:
        path.unlink(missing_ok=True)  # those who have it keep it
    return exchange if int(good) else None


def _map(path: Path, size: int, create: bool) -> mmap.mmap | None:
    """Return the file's memory, or None where it cannot be had."""
    flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
    with contextlib.suppress(OSError, ValueError):
        descriptor = os.open(path, flags, 0o600)
        try:
            if create:
                os.posix_fallocate(descriptor, 0, size)  # now: later a lack of memory would be a signal, not an error
            return mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
    return None


def _machine() -> int:
    """Return a number that is the same for processes that see the same shared memory, and not 0."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    where = f"{boot} {socket.gethostname()} {FOLDER.stat().st_dev} {os.getuid()}"
    return int.from_bytes(hashlib.blake2b(where.encode(), digest_size=7).digest(), "little") | 1


def _prepare() -> bool:
    """Return whether this machine has what it takes, the library's functions declared."""
    if native.missing() or not FOLDER.is_dir() or not Path("/proc/sys/kernel/random/boot_id").exists():
        return False
    library: Any = native.library()
    if not hasattr(library, "treadle_exchange_sum"):
        return False  # one that was built before there were exchanges
    group = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_int32]
    library.treadle_exchange_bytes.argtypes = [ctypes.c_int32, ctypes.c_int64]
    library.treadle_exchange_bytes.restype = ctypes.c_int64
    library.treadle_exchange_enter.argtypes, library.treadle_exchange_enter.restype = group, None
    pointers = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    library.treadle_exchange_sum.argtypes = [*group, ctypes.c_double, ctypes.c_int32, *pointers]
    library.treadle_exchange_gather.argtypes = [*group, ctypes.c_double, *pointers]
    return True
