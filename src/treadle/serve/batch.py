"""What one engine step computes, as plain data: the runner of this process and those of other ranks take the same."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from jaxtyping import Float
from torch import Tensor

from treadle.model.spec import ModelSpec

# Never given to a sequence: what a block table holds where there is no block (any more).
NULL_BLOCK = 0


@dataclass(frozen=True)
class LayerGroup:
    """Layers that see equally far back (`window`, 0: everything), so that they share one block table a sequence."""

    window: int
    layers: tuple[int, ...]


def layer_groups(spec: ModelSpec) -> tuple[LayerGroup, ...]:
    """Return the groups of a model's layers, in the order of each one's first layer."""
    windows: dict[int, list[int]] = {}
    for index, layer in enumerate(spec.layers):
        windows.setdefault(layer.attention.window, []).append(index)
    return tuple(LayerGroup(window, tuple(layers)) for window, layers in windows.items())


class StepBatch(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of S sequences and where their keys and values live.

    The keys and values of token p of a sequence are in entry p % block_size of the block that the sequence's table
    holds at p // block_size.
    """

    tokens: list[int]  # [T], sequence after sequence
    counts: list[int]  # [S] how many of them are each sequence's
    pasts: list[int]  # [S] tokens before them, already in the cache
    rope_lengths: list[int]  # [S] the length that length-dependent rotary embeddings go by
    rows: list[int]  # [R] the rows of T whose logits are wanted
    tables: list[bytes]  # [G] for each layer group int32 [S, B], row-major, NULL_BLOCK where there is none
    adapters: list[int] = []  # [S] the adapter of each sequence, 0 none; empty: none at all
    pooled: list[int] = []  # [P] the rows of T whose last hidden state is wanted (embeddings)


@dataclass(frozen=True)
class StepOutput:
    """What a step gives: a runner's `step` takes a StepBatch and returns this, on the rank that asked."""

    logits: Float[Tensor, "R V"]  # fp32, of the batch's `rows`
    hidden: Float[Tensor, "P D"]  # fp32, after the final norm, of its `pooled` rows
