"""Where sequences begin and how attention reads keys and values: the only thing that training and serving differ in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from treadle import ops
from treadle.model.rope import rope_table
from treadle.model.spec import AttentionSpec, RopeSpec


class Context(Protocol):
    """What a block asks of its surroundings."""

    @property
    def rope(self) -> Callable[[RopeSpec], tuple[Float[Tensor, "T R"], Float[Tensor, "T R"]]]:
        """The function that returns cos and sin of every token of the batch for one kind of rotary embedding."""
        ...

    def attend(
        self,
        layer: int,
        spec: AttentionSpec,
        query: Float[Tensor, "T H E"],
        key: Float[Tensor, "T K E"],
        value: Float[Tensor, "T K E"],
        sinks: Float[Tensor, "H"] | None,
    ) -> Float[Tensor, "T H E"]:
        """Return what each token's query reads from the keys and values of its own sequence up to itself."""
        ...


class RopeTables:
    """Computes the rotary tables of a batch once for each kind that its layers use."""

    def __init__(self, positions: Int[Tensor, "T"], lengths: Int[Tensor, "T"] | None = None) -> None:
        self.positions, self.lengths = positions, lengths
        self._tables: dict[RopeSpec, tuple[Tensor, Tensor]] = {}

    def __call__(self, spec: RopeSpec) -> tuple[Float[Tensor, "T R"], Float[Tensor, "T R"]]:
        if spec not in self._tables:
            self._tables[spec] = rope_table(spec, self.positions, self.lengths)
        return self._tables[spec]


class PackedContext:
    """Whole sequences side by side, as in training and evaluation: sequence s holds rows starts[s] to starts[s+1]."""

    def __init__(
        self, starts: Int[Tensor, "S_plus_1"], max_length: int, positions: Int[Tensor, "T"] | None = None
    ) -> None:
        self.starts, self.max_length = starts, max_length
        lengths = torch.diff(starts).long()
        if positions is None:
            tokens = int(starts[-1])
            rows = torch.arange(tokens, device=starts.device)
            positions = rows - torch.repeat_interleave(starts[:-1].long(), lengths, output_size=tokens)
        self.positions = positions
        self.rope = RopeTables(positions, torch.repeat_interleave(lengths, lengths, output_size=len(positions)))

    @classmethod
    def of_lengths(cls, lengths: list[int], device: torch.device | str = "cpu") -> PackedContext:
        """Return the context of sequences of these lengths."""
        starts = torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
        return cls(starts, max(lengths, default=0))

    def attend(
        self,
        layer: int,
        spec: AttentionSpec,
        query: Float[Tensor, "T H E"],
        key: Float[Tensor, "T K E"],
        value: Float[Tensor, "T K E"],
        sinks: Float[Tensor, "H"] | None,
    ) -> Float[Tensor, "T H E"]:
        """Causal attention within each sequence."""
        return ops.packed_attention(
            query, key, value, self.starts, self.max_length, spec.scale, spec.window, spec.softcap, sinks
        )
