"""Several LoRA adapters in one batch: each row of a step gets the term of its own sequence's adapter.

    terms = {3: open_adapter(module, folder).terms(module)}     # by slot
    applied = AppliedAdapters(module, terms)
    with applied.to_rows(batch.adapters, batch.counts):         # [S] slots, [S] tokens of each sequence
        module.hidden(tokens, context)

A step without adapters runs the plain layers: the terms take their place at the linear layers for one step at a time.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from treadle.config import UserError
from treadle.model.blocks import Linear
from treadle.model.lora import LowRank, adaptable, adapters
from treadle.model.spec import ModelSpec
from treadle.model.transformer import Transformer
from treadle.weights.adapter import StoredAdapter, open_adapter

Terms = Mapping[str, LowRank]  # of one adapter, by the name of the linear layer
# Engines may share a module: only one of them at a time puts terms at its layers.
_locks: weakref.WeakKeyDictionary[Transformer, threading.Lock] = weakref.WeakKeyDictionary()


@dataclass
class _Step:
    """Which rows of the step at hand each adapter is for; None: all of them."""

    parts: list[tuple[Int[Tensor, "R"] | None, Terms]] = field(default_factory=list)
    thread: int = 0  # that computes it; the layers of another one have no adapter


class RowTerms(nn.Module):
    """The term of one linear layer: of each row's own adapter, zero where there is none."""

    def __init__(self, name: str, outputs: int, step: _Step) -> None:
        super().__init__()
        self.name, self.outputs, self.step = name, outputs, step

    def forward(self, x: Float[Tensor, "T I"]) -> Float[Tensor, "T O"]:
        out = None
        if self.step.thread == threading.get_ident():
            for rows, terms in self.step.parts:
                term = terms.get(self.name)
                if term is None:
                    continue
                if rows is None:
                    return term(x)
                if out is None:
                    out = x.new_zeros(len(x), self.outputs)
                out[rows] = term(x[rows])
        return x.new_zeros(len(x), self.outputs) if out is None else out


class AppliedAdapters:
    """Applies the adapters of `terms` (by slot; shared with whoever adds and drops them) to one module."""

    def __init__(self, module: Transformer, terms: Mapping[int, Terms]) -> None:
        self.module, self.terms = module, terms
        self._step = _Step()
        self._lock = _locks.setdefault(module, threading.Lock())
        self._layers: dict[str, tuple[Linear, RowTerms]] = {}

    @contextlib.contextmanager
    def to_rows(self, slots: Sequence[int], counts: Sequence[int]) -> Generator[None]:
        """Within this block, in this thread, let each sequence of a step have the adapter of its slot, 0 for none."""
        used = sorted({*slots} - {0})
        if not used:
            yield
            return
        rows = np.repeat(np.array(slots), np.array(counts))
        for slot in used:
            chosen = rows == slot
            indices = None if chosen.all() else torch.from_numpy(np.flatnonzero(chosen)).to(self.module.device)
            self._step.parts.append((indices, self.terms[slot]))
        self._step.thread = threading.get_ident()
        layers = [self._layer(name) for name in dict.fromkeys(name for _, terms in self._step.parts for name in terms)]
        with self._lock:
            try:
                for linear, term in layers:
                    # As a plain attribute: the term is no part of the model, only of this step.
                    linear.__dict__["adapter"] = term
                yield
            finally:
                for linear, _ in layers:
                    linear.__dict__["adapter"] = None
                self._step.parts.clear()

    def _layer(self, name: str) -> tuple[Linear, RowTerms]:
        if name not in self._layers:
            linear = self.module.get_submodule(name)
            assert isinstance(linear, Linear)
            self._layers[name] = linear, RowTerms(name, linear.weight.shape[0], self._step)
        return self._layers[name]


def check_adapter(spec: ModelSpec, folder: str, max_rank: int) -> StoredAdapter:
    """Return what a PEFT folder holds for a model. Raises UserError where it does not fit or its rank is too large."""
    stored = open_adapter(Transformer(spec, device="meta"), folder)
    if stored.rank > max_rank:
        raise UserError(
            f"{folder} has rank {stored.rank}, more than max_lora_rank={max_rank}; start with a larger --max-lora-rank"
        )
    return stored


def check_free(module: Transformer) -> None:
    """Raise UserError where the model itself has an adapter attached, in whose place others would come."""
    if adapters(module):
        raise UserError("the model has an adapter attached already; merge it, or serve the model without it")


def adapter_bytes(spec: ModelSpec, rank: int, element: int) -> int:
    """Return the bytes of an adapter of all linear layers, of a rank, with `element` bytes a number."""
    meta = Transformer(spec, device="meta")
    shapes = [meta.get_submodule(name).get_parameter("weight").shape for name in adaptable(meta)]
    return sum(rank * (inputs + outputs) * element for outputs, inputs in shapes)
