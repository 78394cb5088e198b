"""The context of an engine step (see model/context.py): new tokens of several sequences, their past in blocks."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from treadle import ops
from treadle.model.context import RopeTables
from treadle.model.spec import AttentionSpec
from treadle.serve.batch import NULL_BLOCK, StepBatch
from treadle.serve.kv_cache import KVCache


class PagedContext:
    """Writes a batch's new keys and values into the cache and attends over each sequence's own.

    `rows` and `pooled` are the batch's, as tensors. With `deterministic` a token's attention is the same bit for bit
    whatever else is in the batch and however its prompt was cut into steps. Raises ValueError where a batch contradicts
    itself or has no block for a new token.
    """

    def __init__(
        self, cache: KVCache, batch: StepBatch, device: torch.device | str = "cpu", deterministic: bool = False
    ) -> None:
        self.cache, self.deterministic = cache, deterministic
        counts, pasts = np.array(batch.counts, dtype=np.int64), np.array(batch.pasts, dtype=np.int64)
        lengths = pasts + counts
        starts = np.zeros(len(counts) + 1, dtype=np.int64)
        np.cumsum(counts, out=starts[1:])
        sequences = np.repeat(np.arange(len(counts)), counts)
        if starts[-1] != len(batch.tokens) or len(batch.tables) != len(cache.groups):
            raise ValueError(
                f"a batch of {len(batch.tokens)} tokens counts {starts[-1]} and brings tables of {len(batch.tables)} "
                f"layer groups; the cache has {len(cache.groups)}"
            )
        positions = np.arange(starts[-1]) + (pasts - starts[:-1])[sequences]

        def tensor(values: np.ndarray, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.from_numpy(values).to(device, dtype)

        self._tables: list[Int[Tensor, "S B"]] = []
        self._written: list[Int[Tensor, "T"]] = []  # the rows of the cache that the new tokens take
        block, offset = np.divmod(positions, cache.block_size)
        for data in batch.tables:
            table = np.frombuffer(bytearray(data), dtype=np.int32).reshape(len(counts), -1)
            blocks = table[sequences, block].astype(np.int64)
            if (blocks == NULL_BLOCK).any():
                raise ValueError("a new token has no block to be written to")
            self._tables.append(tensor(table, torch.int32))
            self._written.append(tensor(blocks * cache.block_size + offset))
        self.starts: Int[Tensor, "S1"] = tensor(starts, torch.int32)
        self.lengths: Int[Tensor, "S"] = tensor(lengths, torch.int32)
        self.rows: Int[Tensor, "R"] = tensor(np.array(batch.rows, dtype=np.int64))
        self.pooled: Int[Tensor, "P"] = tensor(np.array(batch.pooled, dtype=np.int64))
        self.rope = RopeTables(tensor(positions), tensor(np.array(batch.rope_lengths, dtype=np.int64)[sequences]))

    def attend(
        self,
        layer: int,
        spec: AttentionSpec,
        query: Float[Tensor, "T H E"],
        key: Float[Tensor, "T K E"],
        value: Float[Tensor, "T K E"],
        sinks: Float[Tensor, "H"] | None,
    ) -> Float[Tensor, "T H E"]:
        """Write the new keys and values into the cache, then attend over each sequence's own."""
        group = self.cache.group_of[layer]
        keys, values = self.cache.layer(layer)
        ops.paged_write(key, value, keys, values, self._written[group])
        return ops.paged_attention(
            query,
            keys,
            values,
            self._tables[group],
            self.starts,
            self.lengths,
            spec.scale,
            spec.window,
            spec.softcap,
            sinks,
            self.deterministic,
        )
