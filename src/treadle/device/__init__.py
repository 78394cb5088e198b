"""What the machine is and can do: cores, instruction sets, memory, accelerators, and its measured ceilings."""

from treadle.device.ceilings import matmul_peak, read_bandwidth
from treadle.device.host import Accelerator, Host, Memory, cores, memory, this_host

__all__ = ["Accelerator", "Host", "Memory", "cores", "matmul_peak", "memory", "read_bandwidth", "this_host"]
