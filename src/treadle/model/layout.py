"""Which part of a model a rank of a plan holds: its layers, its heads, its share of every parameter. Pure data."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from treadle.config import UserError
from treadle.model.spec import LayerSpec, ModelSpec
from treadle.parallel.pipeline import split_layers
from treadle.parallel.plan import Plan
from treadle.parallel.tensor import TensorShard, cut

# Linear layers by how tensor parallelism cuts them: by their outputs, or by their inputs.
COLUMN, ROW = ("q", "k", "v", "gate", "up"), ("o", "down")


def check_plan(spec: ModelSpec, plan: Plan) -> None:
    """Raise UserError naming the number to change where the plan's `pp` or `tp` cannot cut this model."""
    if plan.pp > len(spec.layers):
        raise UserError(
            f"pp={plan.pp} (pipeline_parallel_size) asks for more stages than the model has layers, "
            f"{len(spec.layers)}; set it to at most that"
        )
    if problem := next(filter(None, (_problem(layer, plan.tp) for layer in spec.layers)), ""):
        most = min(layer.attention.heads for layer in spec.layers)
        fit = [tp for tp in range(1, most + 1) if not any(_problem(layer, tp) for layer in spec.layers)]
        raise UserError(
            f"tp={plan.tp} (tensor_parallel_size) cannot cut this model: {problem}; "
            f"set it to {' or '.join(map(str, fit))}"
        )


def _problem(layer: LayerSpec, tp: int) -> str:
    """Return what of a layer cannot be cut into `tp` equal parts, or ""."""
    heads, kv_heads, width = layer.attention.heads, layer.attention.kv_heads, layer.mlp.width
    if heads % tp:
        return f"its {heads} query heads cannot be shared evenly"
    if kv_heads % tp and tp % kv_heads:
        return f"its {kv_heads} key-value heads can neither be shared nor repeated evenly"
    if width % tp:
        return f"its feed-forward width of {width} cannot be shared evenly"
    return ""


@dataclass(frozen=True)
class Layout:
    """The place of one rank in a resolved plan of a model. Raises UserError where the plan cannot cut the model."""

    spec: ModelSpec
    plan: Plan
    rank: int

    def __post_init__(self) -> None:
        check_plan(self.spec, self.plan)

    @cached_property
    def coordinates(self) -> dict[str, int]:
        """Axis name -> index of this rank along it."""
        return self.plan.coordinates(self.rank)

    @cached_property
    def layers(self) -> range:
        """The layers of this rank's stage. A stage's cost is the parameters that it holds."""
        layers = [layer.matrices(self.spec.width) for layer in self.spec.layers]
        table = self.spec.vocabulary * self.spec.width
        return split_layers(layers, self.plan.pp, first=table, last=table)[self.coordinates["pp"]]

    @property
    def first(self) -> bool:
        """Whether this rank's stage takes tokens."""
        return self.coordinates["pp"] == 0

    @property
    def last(self) -> bool:
        """Whether this rank's stage gives logits."""
        return self.coordinates["pp"] == self.plan.pp - 1

    @cached_property
    def local(self) -> ModelSpec:
        """What this rank computes, as a model: its layers with its share of their heads and feed-forward width."""
        tp = self.plan.tp

        def share(layer: LayerSpec) -> LayerSpec:
            attention = layer.attention
            heads, kv_heads = attention.heads // tp, max(1, attention.kv_heads // tp)
            return replace(
                layer,
                attention=replace(attention, heads=heads, kv_heads=kv_heads),
                mlp=replace(layer.mlp, width=layer.mlp.width // tp),
            )

        return replace(self.spec, layers=tuple(share(self.spec.layers[index]) for index in self.layers))

    def holds(self, name: str) -> bool:
        """Return whether this rank's stage has the parameter of this name."""
        part, _, rest = name.partition(".")
        if part == "layers":
            return int(rest.partition(".")[0]) in self.layers
        if part == "embedding":
            return self.first or (self.last and self.spec.tied)
        return self.last

    def shard(self, name: str, index: int | None = None) -> TensorShard | None:
        """Return what this rank, or the one at `index` of its tp axis, holds of a parameter, an adapter's included.

        None stands for all of it.
        """
        tp, index = self.plan.tp, self.coordinates["tp"] if index is None else index
        parts = name.split(".")
        if tp == 1:
            return None
        if parts[0] in ("embedding", "head"):
            return cut(self.spec.vocabulary, tp, index)
        if parts[0] != "layers":
            return None
        layer, part, kind = self.spec.layers[int(parts[1])], parts[3] if len(parts) > 3 else "", parts[-1]
        attention = layer.attention
        # The adapter's `a` has its layer's inputs, its `b` the outputs.
        if part in COLUMN and kind != "a":
            dim = 0
        elif part in ROW and kind in ("weight", "a"):
            dim = 1
        elif part == "sinks":
            return cut(attention.heads, tp, index)
        else:
            return None
        if part in ("q", "o"):
            return cut(attention.heads, tp, index, dim, attention.head_size)
        if part in ("k", "v"):
            return cut(attention.kv_heads, tp, index, dim, attention.head_size, repeat=True)
        return cut(layer.mlp.width, tp, index, dim)

    def stacked(self, name: str, whole: Tensor) -> Tensor:
        """Return the shards of all ranks of the tp axis one behind the other, as a DTensor of them holds them: what
        several ranks have is there several times, and padding where there is any."""
        shards = [self.shard(name, index) for index in range(self.plan.tp)]
        parts = [shard.of(whole) for shard in shards if shard is not None]
        first = shards[0]
        return whole if first is None else torch.cat(parts, first.dim)

    def unstacked(self, name: str, stacked: Tensor) -> Tensor:
        """Return the whole tensor, given what `stacked` makes of it."""
        shards = [self.shard(name, index) for index in range(self.plan.tp)]
        first = shards[0]
        if first is None:
            return stacked
        parts = zip(shards, stacked.chunk(self.plan.tp, first.dim), strict=True)
        return torch.cat([s.unpadded(part) for s, part in parts if s is not None and s.copy == 0], first.dim)

    def owned(self, name: str, shape: torch.Size) -> int:
        """Return how many elements of this rank's part of a parameter, of this shape, count as its own: no padding, and
        only on the first of the ranks that hold the same, so that the sum over the ranks of a model is the whole."""
        if name == "embedding.weight" and not self.first:
            return 0  # the head's copy of it
        shard = self.shard(name)
        if shard is None:
            return math.prod(shape) if self.coordinates["tp"] == 0 else 0
        held = (shard.stop - shard.start) * math.prod(shape) // max(1, shape[shard.dim])
        return held if shard.copy == 0 else 0


def local_spec(spec: ModelSpec, plan: Plan, rank: int) -> ModelSpec:
    """Return what a rank computes, as a model, from which its key-value cache is made. Raises UserError."""
    return Layout(spec, plan, rank).local
