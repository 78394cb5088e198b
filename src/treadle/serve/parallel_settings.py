"""How a model is laid out over ranks and machines to be served; the names are vLLM's and torchrun's."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from treadle.config import Settings, UserError
from treadle.parallel.plan import Plan

TIMEOUT_SECONDS = 60.0


class Nodes(Settings):
    """Which machine this is, of how many, and where node 0 is reached."""

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


class ParallelSettings(Nodes):
    """The ranks that share one model. `worker_timeout` is how many seconds a rank waits for another within a step until
    that counts as hanging.
    """

    tensor_parallel_size: int = Field(1, ge=1, le=1024)
    pipeline_parallel_size: int = Field(1, ge=1, le=1024)
    worker_timeout: float = Field(TIMEOUT_SECONDS, gt=0)

    @property
    def plan(self) -> Plan:
        """The layout of one replica."""
        return Plan(pp=self.pipeline_parallel_size, tp=self.tensor_parallel_size, dp_shard=1)

    @property
    def ranks(self) -> dict[str, Any]:
        """These settings alone, where they are part of others."""
        return {name: getattr(self, name) for name in ParallelSettings.model_fields}

    @property
    def nodes(self) -> Nodes:
        """The machines."""
        return Nodes(**{name: getattr(self, name) for name in Nodes.model_fields})
