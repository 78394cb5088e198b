"""The machine's ceilings, measured: matrix-product rate and read bandwidth, to say what share of them a run reaches.

A measurement takes about half a second and is kept in the cache folder, for this host, thread count and PyTorch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from treadle.config.errors import TreadleError
from treadle.config.files import cache_home, write_atomically
from treadle.device.host import memory, this_host

SECONDS = 0.5


def matmul_peak(dtype: torch.dtype, threads: int | None = None, device: str = "cpu", again: bool = False) -> float:
    """Return the best matrix-product rate that PyTorch reaches with `dtype`, in FLOP/s.

    `threads` is the number of CPU threads (None: torch.get_num_threads()). Measured once, then read from the cache;
    `again` measures once more and keeps the better rate.
    """
    name = f"matmul {str(dtype).removeprefix('torch.')} {device}"
    return _remembered(name, threads, lambda: _measure_matmul(dtype, torch.device(device)), again)


def read_bandwidth(threads: int | None = None, again: bool = False) -> float:
    """Return how fast main memory is read by `threads` threads, in bytes a second; remembered like `matmul_peak`."""
    return _remembered("read", threads, _measure_read, again)


def _remembered(name: str, threads: int | None, measure: Callable[[], float], again: bool) -> float:
    threads = threads or torch.get_num_threads()
    path = cache_home() / "ceilings" / f"{_machine_key()}.json"
    key = f"{name} {threads} threads"
    before_this = _known(path).get(key, 0.0)
    if before_this > 0 and not again:
        return before_this
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        value = measure()
    finally:
        torch.set_num_threads(before)
    # A ceiling is the best that was ever seen: a busy machine measures too low.
    value = max(value, before_this)
    # A cache that cannot be written costs half a second each time, nothing else.
    with contextlib.suppress(OSError, TreadleError):
        write_atomically(path, json.dumps({**_known(path), key: value}, indent=1, sort_keys=True).encode())
    return value


def _known(path: Path) -> dict[str, float]:
    """Return what the file at `path` remembers; nothing where it is missing or damaged."""
    try:
        known = json.loads(path.read_text())
        return {str(key): float(value) for key, value in known.items() if float(value) > 0}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _machine_key() -> str:
    machine = this_host()
    facts: list[Any] = [machine.processor, machine.isa, machine.cores, machine.accelerators, torch.__version__]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _measure_matmul(dtype: torch.dtype, device: torch.device) -> float:
    """Time square products of growing size for SECONDS in all and return the best rate."""
    best, ends = 0.0, time.perf_counter() + SECONDS
    size = 512
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    torch.mm(a, b)
    while True:
        took = _timed(lambda: torch.mm(a, b), device)  # noqa: B023 - called at once
        best = max(best, 2 * size**3 / took)
        now = time.perf_counter()
        if now >= ends:
            return best
        # Larger products come nearer to the peak, as long as several of them still fit into the time.
        if size < 8192 and 16 * took < ends - now:
            size *= 2
            a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))


def _timed(work: Callable[[], Any], device: torch.device) -> float:
    synchronize = torch.accelerator.synchronize if device.type != "cpu" else lambda: None
    synchronize()
    before = time.perf_counter()
    work()
    synchronize()
    return max(time.perf_counter() - before, 1e-9)


def _measure_read() -> float:
    """Time summing an array larger than any cache and return the best rate."""
    size = min(256 << 20, memory().available // 4)
    array = torch.ones(max(size // 4, 1))
    best, ends = 0.0, time.perf_counter() + SECONDS
    while time.perf_counter() < ends:
        best = max(best, array.nbytes / _timed(array.sum, torch.device("cpu")))
    return best
