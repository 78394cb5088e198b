"""Runs one engine step on the model, in this process."""

from __future__ import annotations

from typing import Protocol

import torch

from treadle import ops
from treadle.model.transformer import Transformer
from treadle.serve.adapters import AppliedAdapters, Terms, check_adapter, check_free
from treadle.serve.batch import StepBatch, StepOutput
from treadle.serve.kv_cache import KVCache
from treadle.serve.paged import PagedContext
from treadle.serve.room import WEIGHTS_WAY_OUT, Reserve, check_room


class Runner(Protocol):
    """What the engine's core asks of whoever computes: some weights, adapters upon them, a cache.

    `load_adapter` and `with_weights` take long; they are called in other threads, beside steps.
    """

    @property
    def module(self) -> Transformer:
        """The model, or the first rank's part of it; on the meta device while there are no weights."""
        ...

    def step(self, batch: StepBatch) -> StepOutput:
        """Compute a step. Raises TreadleError where no further step is possible."""
        ...

    def load_adapter(self, slot: int, path: str, max_rank: int, reserve: Reserve) -> tuple[int, int]:
        """Read the adapter that batches name by `slot`; returns its rank and its bytes.

        It is there for the runners that `with_weights` gives as well. Raises UserError where it does not fit.
        """
        ...

    def drop_adapter(self, slot: int) -> None:
        """Free an adapter."""
        ...

    def with_weights(self, path: str, dtype: torch.dtype, reserve: Reserve) -> Runner:
        """Return a runner of other weights of the same model on the same cache. Raises UserError where they do not fit
        the memory."""
        ...

    def forget(self) -> None:
        """Free the weights: nothing will be computed with them any more."""
        ...

    def sleep(self, keep_weights: bool) -> None:
        """Free the cache, and the weights or their place on an accelerator."""
        ...

    def wake(self, step_bytes: int) -> None:
        """Make the cache anew, empty, and put the weights back to where they were, if they were kept.

        Raises UserError where they do not fit the memory any more; nothing has changed then.
        """
        ...

    def close(self) -> None:
        """Free what it holds."""
        ...


class LocalRunner:
    """A model and the cache that it reads and writes."""

    def __init__(
        self,
        module: Transformer,
        cache: KVCache,
        deterministic: bool = False,
        terms: dict[int, Terms] | None = None,
    ) -> None:
        """`terms` are the adapters by slot, where they are shared with another runner."""
        self.module, self.cache, self.deterministic = module, cache, deterministic
        self.device = module.embedding.weight.device
        self._terms: dict[int, Terms] = {} if terms is None else terms
        self._applied: AppliedAdapters | None = None

    @torch.inference_mode()
    def step(self, batch: StepBatch) -> StepOutput:
        """Compute a step."""
        with ops.row_invariant(self.deterministic):
            if not batch.adapters:
                return self._step(batch)
            if self._applied is None:
                self._applied = AppliedAdapters(self.module, self._terms)
            with self._applied.to_rows(batch.adapters, batch.counts):
                return self._step(batch)

    def _step(self, batch: StepBatch) -> StepOutput:
        tokens = torch.tensor(batch.tokens, device=self.device)
        context = PagedContext(self.cache, batch, self.device, deterministic=self.deterministic)
        hidden = self.module.hidden(tokens, context)
        wanted = batch.rows + batch.pooled
        if len(wanted) != len(hidden) or batch.pooled:
            hidden = hidden[torch.tensor(wanted, dtype=torch.int64, device=self.device)]
        normed = self.module.norm(hidden)
        logits = self.module.logits(normed[: len(batch.rows)]).float()
        return StepOutput(logits, normed[len(batch.rows) :].float())

    def load_adapter(self, slot: int, path: str, max_rank: int, reserve: Reserve) -> tuple[int, int]:
        """Read an adapter; returns its rank and its bytes. Raises UserError."""
        module = self.module
        check_free(module)
        stored = check_adapter(module.spec, path, max_rank)
        size = stored.elements() * module.dtype.itemsize
        check_room(f"the adapter {path}", size, self.cache, reserve, way_out="remove another one")
        self._terms[slot] = stored.terms(module)
        return stored.rank, size

    def drop_adapter(self, slot: int) -> None:
        """Free an adapter."""
        self._terms.pop(slot, None)

    def with_weights(self, path: str, dtype: torch.dtype, reserve: Reserve) -> LocalRunner:
        """Return a runner of other weights of the same model on the same cache. Raises UserError."""
        from treadle.weights.load import load_model

        needed = self.module.spec.parameters_count() * dtype.itemsize
        check_room(f"the model at {path}", needed, self.cache, reserve, way_out=WEIGHTS_WAY_OUT)
        module = load_model(path, dtype, self.device)
        return LocalRunner(module, self.cache, self.deterministic, self._terms)

    def forget(self) -> None:
        """Let go of the weights."""
        self.module = Transformer(self.module.spec, device="meta", dtype=self.module.dtype)
        self._applied = None

    def sleep(self, keep_weights: bool) -> None:
        """Free the cache, and the weights or their place on an accelerator."""
        self.cache.release()
        if not keep_weights:
            self.forget()
        elif self.device.type != "cpu":
            self.module.to("cpu")

    def wake(self, step_bytes: int) -> None:
        """Make the cache anew, and put kept weights back. Raises UserError."""
        module, cache = self.module, self.cache
        moved = module.spec.parameters_count() * module.dtype.itemsize if module.device != self.device else 0
        everything = Reserve(tuple(count - 1 for count in cache.blocks), step_bytes)
        check_room("waking", moved, cache, everything, way_out="free some memory and wake it again")
        module.to(self.device)
        cache.allocate()

    def close(self) -> None:
        """Free the cache's memory."""
        self.cache.release()
