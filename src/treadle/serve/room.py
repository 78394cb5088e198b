"""Whether something fits the memory beside a running engine."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.config import UserError
from treadle.config.progress import amount_text
from treadle.serve.capacity import available_memory
from treadle.serve.kv_cache import KVCache, group_bytes_per_token


@dataclass(frozen=True)
class Reserve:
    """What must stay free for the engine's own use."""

    fresh: tuple[int, ...]  # blocks by layer group that were never written: on a CPU they have no memory yet
    step_bytes: int  # that the largest step takes

    def cache_bytes(self, cache: KVCache) -> int:
        """Return the bytes that a cache will still claim."""
        if not self.fresh or (cache.allocated and cache.device.type != "cpu"):
            return 0
        return sum(
            fresh * cache.block_size * group_bytes_per_token(cache.spec, group, cache.format)
            for group, fresh in zip(cache.groups, self.fresh, strict=True)
        )


NO_RESERVE = Reserve((), 0)
WEIGHTS_WAY_OUT = "free some memory, lower kv_cache_memory, or start the server anew with the new weights"


def check_room(what: str, needed: int, cache: KVCache, reserve: Reserve, sharing: int = 1, way_out: str = "") -> None:
    """Raise UserError with the numbers where `needed` bytes more do not fit; `sharing` ranks share the memory."""
    available = available_memory(cache.device) // sharing
    unclaimed = reserve.cache_bytes(cache)
    left = available - unclaimed - reserve.step_bytes
    if needed <= left:
        return
    raise UserError(
        f"{what} would take {amount_text(needed, 'B')} beside what is loaded, but of the {amount_text(available, 'B')} "
        f"of memory that are free, {amount_text(unclaimed, 'B')} belong to the key-value cache and "
        f"{amount_text(reserve.step_bytes, 'B')} to a step, which leaves {amount_text(max(0, left), 'B')}; "
        f"{way_out or 'free some memory'}"
    )
