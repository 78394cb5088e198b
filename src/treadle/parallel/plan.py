"""The plan: how a model and its batches are laid out over ranks. Pure data; nothing here starts anything."""

from __future__ import annotations

import math

from pydantic import Field

from treadle.config import Settings, UserError


class Plan(Settings):
    """Sizes of the mesh axes, the outermost first.

    `dp_replicate` groups of ranks hold the same shards; within a group, parameters, gradients and optimizer state are
    cut into `dp_shard` shards (0: whatever ranks are left over).
    """

    dp_replicate: int = Field(1, ge=1)
    dp_shard: int = Field(0, ge=0)

    def resolve(self, ranks: int) -> Plan:
        """Return the plan with every size filled in for `ranks` ranks. Raises UserError where they do not fit."""
        shard = self.dp_shard or max(1, ranks // self.dp_replicate)
        if self.dp_replicate * shard != ranks:
            raise UserError(
                f"the plan dp_replicate={self.dp_replicate}, dp_shard={self.dp_shard or 'rest'} does not fit "
                f"{ranks} rank{'s' if ranks > 1 else ''}; their product must be the number of processes (nproc)"
            )
        return Plan(dp_replicate=self.dp_replicate, dp_shard=shard)

    def axes(self) -> dict[str, int]:
        """Return axis name -> size, the outermost first."""
        assert self.dp_shard, "resolve the plan first"
        return {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard}

    def ranks(self) -> int:
        """Return how many ranks the plan spans."""
        return math.prod(self.axes().values())

    def data_ranks(self) -> int:
        """Return how many ranks read different data."""
        return self.dp_replicate * self.dp_shard

    def describe(self) -> str:
        """Return the plan in words, for the start-up summary."""
        parts = [f"{name}={size}" for name, size in self.axes().items() if size > 1]
        return " × ".join(parts) or "one rank"
