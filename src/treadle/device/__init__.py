"""What the machine is and can do: cores, instruction sets, memory, accelerators, and its measured ceilings."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from treadle.device.host import Accelerator, Host, Memory, cores, memory, this_host

if TYPE_CHECKING:
    from treadle.device.ceilings import matmul_peak, read_bandwidth

__all__ = ["Accelerator", "Host", "Memory", "cores", "matmul_peak", "memory", "read_bandwidth", "this_host"]


def __getattr__(name: str) -> Any:
    # The measurements need torch, which takes seconds to import; what describes the host does not.
    if name not in ("matmul_peak", "read_bandwidth"):
        raise AttributeError(f"module 'treadle.device' has no attribute {name!r}")
    return getattr(importlib.import_module("treadle.device.ceilings"), name)
