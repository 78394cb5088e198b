"""A model on several ranks: loading it, fitting its cache, and running engine steps on all of them.

The counterpart of runner.py and assembly.py, which do the same in one process.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from treadle.config import UserError
from treadle.model.layout import Layout
from treadle.model.spec import ModelSpec
from treadle.model.transformer import Transformer
from treadle.serve.adapters import check_adapter
from treadle.serve.batch import StepBatch, StepOutput, layer_groups
from treadle.serve.capacity import Capacity, Wanted, fit_capacity
from treadle.serve.kv_cache import KVFormat
from treadle.serve.measure import Activations, step_bytes
from treadle.serve.parallel_settings import ParallelSettings
from treadle.serve.rank_commands import (
    DropAdapter,
    DropWeights,
    FreeCache,
    LoadAdapter,
    LoadWeights,
    MakeCache,
    Measure,
    Step,
)
from treadle.serve.ranks import Ranks
from treadle.serve.room import Reserve

_numbers = itertools.count(1)  # of weights


def load_on_ranks(
    path: str | Path, spec: ModelSpec, settings: ParallelSettings, dtype: torch.dtype | None, device: str
) -> Ranks:
    """Return ranks that hold the model at `path`, whose spec was read. Raises UserError, TreadleError."""
    Layout(spec, settings.plan, 0)  # what cannot be cut is refused before anything is started
    ranks = Ranks(
        settings.plan, str(Path(path).absolute()), device, timeout=settings.worker_timeout, nodes=settings.nodes
    )
    try:
        loaded = ranks.all(LoadWeights(0, "", dtype_name(dtype)))
        owned = sum(one["owned"] for one in loaded)
        assert owned == spec.parameters_count(), f"the ranks hold {owned} of {spec.parameters_count()} parameters"
    except BaseException:
        ranks.close()
        raise
    return ranks


def dtype_name(dtype: torch.dtype | None) -> str:
    """Return the name of a dtype as it travels; "auto" leaves the choice to the checkpoint."""
    return "auto" if dtype is None else str(dtype).removeprefix("torch.")


def fit_on_ranks(
    ranks: Ranks, spec: ModelSpec, dtype: torch.dtype, kv_format: KVFormat, wanted: Wanted, reserved: int = 0
) -> Capacity:
    """Return what fits on every rank beside `reserved` bytes; each measures itself. Raises UserError naming the rank
    where nothing does."""
    fits: list[tuple[ModelSpec, Capacity]] = []
    for rank, measured in enumerate(ranks.all(Measure())):
        local = Layout(spec, ranks.plan, rank).local
        activations = Activations(measured["fixed"], measured["each"])
        step = step_bytes(local, dtype.itemsize, activations, wanted.step_tokens)
        try:
            available = max(0, int(measured["available"]) - reserved)
            fits.append((local, fit_capacity(local, kv_format, wanted, available, step)))
        except UserError as error:
            raise UserError(f"on rank {rank}: {error}") from error
    return _what_all_have(spec, fits)


def _what_all_have(spec: ModelSpec, fits: Sequence[tuple[ModelSpec, Capacity]]) -> Capacity:
    """Return the capacity of the whole model: of each number the least that a rank has.

    A rank whose layers see everything may have another number of blocks for those than one whose layers do not, so
    blocks are compared by the window of their group.
    """
    blocks: dict[int, int] = {}
    for local, fit in fits:
        for group, count in zip(layer_groups(local), fit.blocks, strict=True):
            blocks[group.window] = min(count, blocks.get(group.window, count))
    least = min((fit for _, fit in fits), key=lambda fit: (fit.length, fit.tokens))
    return replace(
        least,
        seqs=min(fit.seqs for _, fit in fits),
        blocks=tuple(blocks[group.window] for group in layer_groups(spec)),
        bytes=sum(fit.bytes for _, fit in fits),
        step_bytes=max(fit.step_bytes for _, fit in fits),
    )


class ParallelRunner:
    """The weights of one number, on all ranks, and the cache that they read and write."""

    def __init__(self, ranks: Ranks, weights: int = 0, cache: MakeCache | None = None) -> None:
        """`cache` is how the cache was made, so that it can be made again."""
        self.ranks, self.weights, self._cache = ranks, weights, cache
        self._gone: Transformer | None = None  # without values, in place of weights that were freed

    @classmethod
    def start(
        cls, ranks: Ranks, blocks: Sequence[int], block_size: int, format: str, deterministic: bool
    ) -> ParallelRunner:
        """Make the cache on every rank; `blocks` are those of each layer group, with the one that nobody has."""
        cache = MakeCache(list(blocks), block_size, format, deterministic)
        ranks.all(cache)
        return cls(ranks, 0, cache)

    @property
    def module(self) -> Transformer:
        """The first rank's part of the model; on the meta device once the weights are gone."""
        return self._gone or self.ranks.rank.weights[self.weights].module

    def step(self, batch: StepBatch) -> StepOutput:
        """Compute a step. Raises TreadleError, naming the rank, where one has failed: no further step is possible."""
        return self.ranks.step(Step(self.weights, batch))

    def load_adapter(self, slot: int, path: str, max_rank: int, reserve: Reserve) -> tuple[int, int]:
        """Read an adapter on every rank; returns its rank and its bytes. Raises UserError."""
        module = self.module
        stored = check_adapter(module.spec, path, max_rank)
        self.ranks.all(LoadAdapter(slot, path, reserve))
        return stored.rank, stored.elements() * module.dtype.itemsize

    def drop_adapter(self, slot: int) -> None:
        """Free an adapter."""
        if self.ranks.error is None:
            self.ranks.all(DropAdapter(slot))

    def with_weights(self, path: str, dtype: torch.dtype, reserve: Reserve) -> ParallelRunner:
        """Return a runner of other weights of the same model, on the same ranks and cache. Reading them takes long and
        may be done beside steps. Raises UserError."""
        number = next(_numbers)
        try:
            self.ranks.all(LoadWeights(number, path, dtype_name(dtype), reserve))
        except BaseException:
            if self.ranks.error is None:
                self.ranks.all(DropWeights(number))
            raise
        return ParallelRunner(self.ranks, number, self._cache)

    def forget(self) -> None:
        """Free the weights: nothing will be computed with them any more."""
        self._gone = Transformer(self.module.spec, device="meta", dtype=self.module.dtype)
        if self.ranks.error is None:
            self.ranks.all(DropWeights(self.weights))

    def sleep(self, keep_weights: bool) -> None:
        """Free the cache and, unless they are kept, the weights."""
        self.ranks.all(FreeCache())
        if not keep_weights:
            self.forget()

    def wake(self, step_bytes: int) -> None:
        """Make the cache anew."""
        assert self._cache is not None
        self.ranks.all(self._cache)

    def close(self) -> None:
        """Free the cache; where a rank was lost, end the others."""
        if self.ranks.error is None:
            self.ranks.all(FreeCache())
        else:
            self.ranks.close()
