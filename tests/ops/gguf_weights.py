"""Random weights as GGUF files have them."""

from __future__ import annotations

import gguf
import numpy as np
import torch
from torch import Tensor

from treadle.ops.quantized_layout import FORMATS

SHAPES = [
    (1, 256),
    (17, 512),
    (48, 768),
    (33, 256),
]  # one row, odd rows, whole tiles; the K formats' blocks have 256 columns


def gguf_bytes(format: str, rows: int, columns: int, seed: int = 0, size: float = 0.01) -> Tensor:
    """Return the bytes of a tensor whose values, 6-bit scales and high bits are uniform and whose scales are normal."""
    random = np.random.default_rng(seed)
    if format == "BF16":
        values = torch.from_numpy(random.standard_normal((rows, columns)).astype(np.float32) * size)
        return values.bfloat16().view(torch.uint8).flatten()
    known = FORMATS[format]
    blocks = random.integers(0, 256, (rows * columns // known.columns, known.file_bytes), dtype=np.uint8)

    def halves() -> np.ndarray:
        return (random.standard_normal((len(blocks), 1)) * size).astype(np.float16).view(np.uint8)

    if format == "Q6_K":
        blocks[:, 208:210] = halves()
    else:
        blocks[:, :2] = halves()
    if known.minimum:
        blocks[:, 2:4] = halves()
    return torch.from_numpy(blocks.reshape(-1))


def dequantized(file: Tensor, format: str, rows: int, columns: int) -> Tensor:
    """Return the float32 weights, by the gguf package."""
    kind = gguf.GGMLQuantizationType[format]
    with np.errstate(invalid="ignore"):  # infinity times zero
        values = np.array(gguf.dequantize(file.numpy().reshape(rows, -1), kind))
    return torch.from_numpy(values).view(rows, columns)
