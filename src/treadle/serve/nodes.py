"""A parallel model on several machines: each runs the same `treadle serve` with another --node-rank.

Node 0 is the server. The others only start their ranks, which take their commands from rank 0, and end with it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import psutil
from pydantic import Field

from treadle.config import Settings, TreadleError, UserError
from treadle.device.host import cores
from treadle.serve import worker as workers


class Nodes(Settings):
    """Which machine this is, of how many, and where node 0 is reached; the names are torchrun's."""

    nnodes: int = Field(1, ge=1)
    node_rank: int = Field(0, ge=0)
    master_addr: str = "127.0.0.1"
    master_port: int = Field(0, ge=0, le=65535)

    def ranks_each(self, ranks: int) -> int:
        """Return how many ranks each node has. Raises UserError where they do not divide, or the node is none."""
        if ranks % self.nnodes:
            raise UserError(
                f"{ranks} ranks cannot be shared evenly by nnodes={self.nnodes}; tensor_parallel_size x "
                "pipeline_parallel_size must be a multiple of it"
            )
        if self.node_rank >= self.nnodes:
            raise UserError(f"node_rank={self.node_rank} is no node of nnodes={self.nnodes}; they count from 0")
        if self.nnodes > 1 and not self.master_port:
            raise UserError("several nodes need a master_port, the same on each; choose a free one of node 0")
        return ranks // self.nnodes


ONE_NODE = Nodes()


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
                raise TreadleError(
                    f"rank {rank} on this node (node_rank {nodes.node_rank}) ended; see what node 0 says"
                )
