"""A parallel model on several machines: each runs the same `treadle serve` with another --node-rank.

Node 0 is the server. The others only start their ranks, which take their commands from rank 0, and end with it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import psutil

from treadle.config import TreadleError
from treadle.device.host import cores
from treadle.serve import worker as workers
from treadle.serve.parallel_settings import Nodes


def interface_towards(address: str) -> dict[str, str]:
    """Return the environment that lets Gloo use the network interface which leads to `address`."""
    if "GLOO_SOCKET_IFNAME" in os.environ or not sys.platform.startswith("linux"):
        return {}
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # nothing is sent
            own = probe.getsockname()[0]
    except OSError:
        return {}
    for name, places in psutil.net_if_addrs().items():
        if any(place.address == own for place in places):
            return {"GLOO_SOCKET_IFNAME": name}
    return {}


def serve_node(nodes: Nodes, ranks: int, model: str, threads: int | None = None) -> None:
    """Run this node's ranks of a model at `model` until node 0 ends them. Raises UserError, TreadleError."""
    each = nodes.ranks_each(ranks)
    own = range(nodes.node_rank * each, (nodes.node_rank + 1) * each)
    threads = threads or max(1, cores() // each)
    environment = workers.environment(threads) | interface_towards(nodes.master_addr)
    address = f"{nodes.master_addr}:{nodes.master_port}"
    shown = f"rank {own[0]}" if each == 1 else f"ranks {own[0]} to {own[-1]}"
    print(f"node {nodes.node_rank} of {nodes.nnodes} joins node 0 at {address} as {shown}", flush=True)
    processes: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for rank in own:
            command = workers.command_line("--join", address, "--rank", str(rank), "--model", model)
            processes[rank] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, env=environment)
        _wait_for_all(processes, nodes)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def _wait_for_all(processes: dict[int, subprocess.Popen[bytes]], nodes: Nodes) -> None:
    left = dict(processes)
    while left:
        time.sleep(0.1)
        for rank, process in list(left.items()):
            code = process.poll()
            if code is None:
                continue
            del left[rank]
            if code:
                how = f"was ended by {signal.Signals(-code).name}" if code < 0 else "has ended"
                raise TreadleError(f"rank {rank} of this node {how}; node 0 says more")
