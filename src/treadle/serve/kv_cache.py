"""Keys and values of running sequences: for each layer a pool of blocks, which the layers of a group use alike.

On a CPU memory is claimed only as it is first written (the operating system hands out zeroed pages).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from treadle.config import UserError
from treadle.config.errors import nearest
from treadle.model.spec import AttentionSpec, ModelSpec
from treadle.serve.batch import LayerGroup

FORMATS = ("auto", "float32", "bf16", "fp8", "int8", "int4")
ALIGNMENT = 64


@dataclass(frozen=True)
class KVFormat:
    """How a key or value is stored."""

    name: str
    dtype: torch.dtype

    @classmethod
    def of(cls, name: str, model_dtype: torch.dtype, device: torch.device | str = "cpu") -> KVFormat:
        """Return the format of that name, "auto" being the model's own dtype. Raises UserError."""
        if name not in FORMATS:
            raise UserError(
                f"unknown kv_cache_dtype '{name}'{nearest(name, FORMATS) or '; known: ' + ', '.join(FORMATS)}"
            )
        if name in ("fp8", "int8", "int4"):
            raise UserError(f"kv_cache_dtype {name} is not there yet; use auto")
        dtype = {"auto": model_dtype, "float32": torch.float32, "bf16": torch.bfloat16}[name]
        return cls(str(dtype).removeprefix("torch."), dtype)

    @property
    def quantized(self) -> bool:
        """Whether what is read differs from what was written by more than a rounding to a float dtype."""
        return False

    def entry_bytes(self, head_size: int) -> int:
        """Return the bytes that one head's key (or value) of one token takes."""
        return head_size * self.dtype.itemsize


def layer_bytes_per_token(spec: AttentionSpec, format: KVFormat) -> int:
    """Return the bytes that one token's keys and values take in one layer."""
    return 2 * spec.kv_heads * format.entry_bytes(spec.head_size)


def group_bytes_per_token(spec: ModelSpec, group: LayerGroup, format: KVFormat) -> int:
    """Return the bytes that one token's keys and values take in the layers of a group."""
    return sum(layer_bytes_per_token(spec.layers[layer].attention, format) for layer in group.layers)


class KVCache:
    """The tensors: for each layer keys and values [N blocks, K, block_size, E], zero where never written.

    `blocks` is the number of blocks of each group, block 0 (which no sequence ever has) included.
    """

    def __init__(
        self,
        spec: ModelSpec,
        groups: Sequence[LayerGroup],
        blocks: Sequence[int],
        block_size: int,
        format: KVFormat,
        device: torch.device | str = "cpu",
    ) -> None:
        self.spec, self.groups, self.blocks = spec, tuple(groups), tuple(blocks)
        self.block_size, self.format, self.device = block_size, format, torch.device(device)
        self.group_of = {layer: index for index, group in enumerate(groups) for layer in group.layers}
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.allocate()

    @property
    def allocated(self) -> bool:
        return bool(self._layers)

    @property
    def nbytes(self) -> int:
        """The bytes that the tensors take when every block is in use."""
        return sum(
            blocks * self.block_size * group_bytes_per_token(self.spec, group, self.format)
            for group, blocks in zip(self.groups, self.blocks, strict=True)
        )

    def allocate(self) -> None:
        """Make the tensors, all zero, where they do not exist."""
        if self.allocated:
            return
        for group, blocks in zip(self.groups, self.blocks, strict=True):
            for layer in group.layers:
                spec = self.spec.layers[layer].attention
                shape = blocks, spec.kv_heads, self.block_size, spec.head_size
                self._layers[layer] = (
                    _zeros(shape, self.format.dtype, self.device),
                    _zeros(shape, self.format.dtype, self.device),
                )

    def release(self) -> None:
        """Give the memory back; whatever was cached is gone."""
        self._layers.clear()

    def layer(self, layer: int) -> tuple[Float[Tensor, "N K C E"], Float[Tensor, "N K C E"]]:
        """Return the keys and the values of a layer."""
        return self._layers[layer]

    def copy_block(self, group: int, source: int, target: int) -> None:
        """Copy a block of every layer of a group over another."""
        for layer in self.groups[group].layers:
            for tensor in self._layers[layer]:
                tensor[target] = tensor[source]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros writes every page, numpy's calloc none.
    size = math.prod(shape) * dtype.itemsize
    pages = np.zeros(size + ALIGNMENT, dtype=np.uint8)
    offset = -pages.ctypes.data % ALIGNMENT
    return torch.from_numpy(pages[offset : offset + size]).view(dtype).view(shape)
