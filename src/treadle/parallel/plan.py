"""The plan: how a model and its batches are laid out over ranks. Pure data; nothing here starts anything."""

from __future__ import annotations

import math

from pydantic import Field

from treadle.config import Settings, UserError


class Plan(Settings):
    """Sizes of the mesh axes, the outermost first.

    The layers are cut into `pp` pipeline stages. `dp_replicate` groups of ranks hold the same shards; within a group,
    parameters, gradients and optimizer state are cut into `dp_shard` shards (0: whatever ranks are left over). `tp`
    neighbouring ranks share each layer: its heads, its feed-forward width, and the vocabulary.
    """

    pp: int = Field(1, ge=1)
    dp_replicate: int = Field(1, ge=1)
    dp_shard: int = Field(0, ge=0)
    tp: int = Field(1, ge=1)

    def resolve(self, ranks: int) -> Plan:
        """Return the plan with every size filled in for `ranks` ranks. Raises UserError where they do not fit."""
        others = self.pp * self.dp_replicate * self.tp
        shard = self.dp_shard or max(1, ranks // others)
        if others * shard != ranks:
            sizes = {"pp": self.pp, "dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "tp": self.tp}
            given = ", ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
            raise UserError(
                f"the plan {given} does not fit {ranks} rank{'s' if ranks > 1 else ''}; the product of its sizes must "
                "be the number of processes (nproc)"
            )
        return self.model_copy(update={"dp_shard": shard})

    def axes(self) -> dict[str, int]:
        """Return axis name -> size, the outermost first."""
        assert self.dp_shard, "resolve the plan first"
        return {"pp": self.pp, "dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "tp": self.tp}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return axis name -> index of a rank along it; neighbouring ranks differ along the innermost axis first."""
        found: dict[str, int] = {}
        for axis, size in reversed(self.axes().items()):
            rank, found[axis] = divmod(rank, size)
        assert rank == 0, "no such rank"
        return found

    def rank(self, **coordinates: int) -> int:
        """Return the rank at these indices; 0 along an axis that is not named."""
        rank = 0
        for axis, size in self.axes().items():
            rank = rank * size + coordinates.get(axis, 0)
        return rank

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
