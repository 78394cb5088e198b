"""Facts about this host, as this process may use it: affinity and control groups (containers) count."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

# The instruction sets that decide which kernels run, by their names in /proc/cpuinfo: x86, then Arm.
ISA = (
    *("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16"),
    *("avx512_fp16", "amx_tile", "amx_bf16", "amx_int8"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve", "sve2", "sme"),
)
# A version 1 control group without a limit says so with a number near 2^63.
UNLIMITED = 1 << 60


@dataclass(frozen=True)
class Memory:
    """Main memory in bytes: what this process may use in all, and what of it is free now."""

    total: int
    available: int
    limit: str  # what sets the total: "machine" or "control group"


@dataclass(frozen=True)
class Accelerator:
    """One accelerator: its device name for PyTorch (cuda:0), what it is, and its memory in bytes (0: unknown)."""

    device: str
    name: str
    memory: int


@dataclass(frozen=True)
class Host:
    """This machine, as this process may use it."""

    system: str  # "Linux 6.1"
    architecture: str
    processor: str
    isa: tuple[str, ...]
    cores: int
    machine_cores: int
    memory: Memory
    accelerators: tuple[Accelerator, ...]

    def facts(self) -> dict[str, object]:
        """Return all of it as plain data, for JSON."""
        return dataclasses.asdict(self)


def this_host() -> Host:
    """Return the facts about this host."""
    return Host(
        system=f"{platform.system()} {platform.release()}",
        architecture=platform.machine(),
        processor=processor(),
        isa=isa(),
        cores=cores(),
        machine_cores=os.cpu_count() or 1,
        memory=memory(),
        accelerators=accelerators(),
    )


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name as it gives it, or the architecture's where it gives none."""
    return _cpuinfo(cpuinfo).get("model name", "") or platform.processor() or platform.machine()


def isa(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """Return the names of `ISA` that the processor has (empty where the system does not say)."""
    entries = _cpuinfo(cpuinfo)
    flags = set((entries.get("flags", "") or entries.get("Features", "")).split())
    return tuple(name for name in ISA if name in flags)


def _cpuinfo(path: Path) -> dict[str, str]:
    """Return what /proc/cpuinfo says of the first processor."""
    try:
        first = path.read_text(errors="replace").split("\n\n", 1)[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def cores(root: Path = Path("/")) -> int:
    """Return how many cores this process may use: its affinity's, at most the control group's quota (rounded up)."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _groups("cpu", root):
        quota, period = _cpu_quota(folder)
        if quota > 0 and period > 0:
            allowed = min(allowed, math.ceil(quota / period))
    return max(1, allowed)


def memory(root: Path = Path("/")) -> Memory:
    """Return the memory that this process may use: the machine's, or less where a control group limits it."""
    machine = psutil.virtual_memory()
    total, available, limit = machine.total, machine.available, "machine"
    for folder in _groups("memory", root):
        most = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
        if most is None or most >= UNLIMITED:
            continue
        # Pages of files count as used, but are given up when memory is short.
        used = max(0, used - _reclaimable(folder))
        if most < total:
            total, limit = most, "control group"
        available = min(available, max(0, most - used))
    return Memory(total, available, limit)


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Yield this process's control group for `controller` and every group above it, version 1 or 2, where mounted."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controllers if controllers else "")
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            folder = mount.joinpath(*parts[:depth])
            if folder.is_dir():
                yield folder


def _cpu_quota(folder: Path) -> tuple[float, float]:
    """Return (quota, period) in microseconds; a quota of 0 or less is none."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return (0.0 if quota == "max" else float(quota)), float(period)
    except (OSError, ValueError):
        return float(_number(folder / "cpu.cfs_quota_us") or 0), float(_number(folder / "cpu.cfs_period_us") or 0)


def _reclaimable(folder: Path) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    entries = dict(line.split(None, 1) for line in lines if " " in line)
    return int(entries.get("inactive_file", 0))


def _number(path: Path) -> int | None:
    """Return the whole number that a file holds, or None (no file, "max")."""
    try:
        return int(path.read_text().strip())
    except (OSError, ValueError):
        return None


def accelerators() -> tuple[Accelerator, ...]:
    """Return the accelerators that PyTorch can use."""
    import torch

    if not torch.accelerator.is_available():
        return ()
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    found = []
    for index in range(torch.accelerator.device_count()):
        name, size = kind.type, 0
        try:
            facts = torch.get_device_module(kind).get_device_properties(index)
            name, size = getattr(facts, "name", name), getattr(facts, "total_memory", 0)
        except (AttributeError, RuntimeError):
            pass  # a backend without such a call (MPS) is listed by its kind
        found.append(Accelerator(f"{kind.type}:{index}", name, size))
    return tuple(found)
