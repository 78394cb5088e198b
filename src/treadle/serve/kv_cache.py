"""Keys and values of running sequences: for each layer a pool of blocks, which the layers of a group use alike.

On a CPU memory is claimed only as it is first written (the operating system hands out zeroed pages).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from treadle.config import UserError
from treadle.config.errors import nearest
from treadle.model.spec import AttentionSpec, ModelSpec
from treadle.ops.paged_cache import MOST_HEAD_SIZE, Record
from treadle.serve.batch import LayerGroup

FORMATS = ("auto", "float32", "bf16", "fp8", "int8", "int4")
BITS = {"int8": 8, "int4": 4}
ALIGNMENT = 64


@dataclass(frozen=True)
class KVFormat:
    """How keys and values are stored: as floats of a dtype or, with `bits`, quantized for each token and head."""

    name: str
    dtype: torch.dtype
    bits: int = 0

    @classmethod
    def of(cls, name: str, model_dtype: torch.dtype, device: torch.device | str = "cpu") -> KVFormat:
        """Return the format of that name, "auto" being the model's own dtype.

        Raises UserError where there is none, or the device does not have it.
        """
        if name not in FORMATS:
            raise UserError(
                f"unknown kv_cache_dtype '{name}'{nearest(name, FORMATS) or '; known: ' + ', '.join(FORMATS)}"
            )
        if name in BITS:
            return cls(name, torch.uint8, BITS[name])
        if name == "fp8":
            if reason := _fp8_missing(torch.device(device)):
                raise UserError(f"kv_cache_dtype fp8 is not possible here: {reason}; use int8, which is as small")
            return cls(name, torch.float8_e4m3fn)
        dtype = {"auto": model_dtype, "float32": torch.float32, "bf16": torch.bfloat16}[name]
        return cls(str(dtype).removeprefix("torch."), dtype)

    def elements(self, head_size: int) -> int:
        """Return the elements of `dtype` that one head's key (or value) of one token takes.

        Raises UserError where heads of this size cannot be stored so.
        """
        if not self.bits:
            return head_size
        if head_size > MOST_HEAD_SIZE:
            raise UserError(
                f"kv_cache_dtype {self.name} stores heads of at most {MOST_HEAD_SIZE} elements, "
                f"this model's have {head_size}; use auto"
            )
        if self.bits == 4 and head_size % 2:
            raise UserError(
                f"kv_cache_dtype {self.name} packs two elements into a byte, but this model's heads have {head_size}; "
                "use int8"
            )
        return Record(head_size, self.bits).bytes

    def entry_bytes(self, head_size: int) -> int:
        """Return the bytes that one head's key (or value) of one token takes. Raises UserError as `elements` does."""
        return self.elements(head_size) * self.dtype.itemsize


def _fp8_missing(device: torch.device) -> str:
    """Return why the device has no 8-bit floats, "" where it has."""
    if device.type != "cuda":
        return f"8-bit floats need a GPU that computes with them, and this is {device.type}"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 9):
        return f"{torch.cuda.get_device_name(device)} has no 8-bit floats"
    return ""


def layer_bytes_per_token(spec: AttentionSpec, format: KVFormat) -> int:
    """Return the bytes that one token's keys and values take in one layer."""
    return 2 * spec.kv_heads * format.entry_bytes(spec.head_size)


def group_bytes_per_token(spec: ModelSpec, group: LayerGroup, format: KVFormat) -> int:
    """Return the bytes that one token's keys and values take in the layers of a group."""
    return sum(layer_bytes_per_token(spec.layers[layer].attention, format) for layer in group.layers)


class KVCache:
    """The tensors: for each layer keys [N blocks, K, R, block_size] and values [N blocks, K, block_size, R], where R is
    what an entry takes (see `ops.paged_cache`); zero where never written.

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
                elements = self.format.elements(spec.head_size)
                keys = blocks, spec.kv_heads, elements, self.block_size
                values = blocks, spec.kv_heads, self.block_size, elements
                self._layers[layer] = (
                    _zeros(keys, self.format.dtype, self.device),
                    _zeros(values, self.format.dtype, self.device),
                )

    def release(self) -> None:
        """Give the memory back; whatever was cached is gone."""
        self._layers.clear()

    def layer(self, layer: int) -> tuple[Shaped[Tensor, "N K R C"], Shaped[Tensor, "N K C R"]]:
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
