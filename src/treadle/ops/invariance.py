"""Row invariance: each row of a matrix product with the same bits, however many rows there are and which ones.

A matrix product sums in an order that its library picks by the shape. Within `row_invariant()` products are computed in
tiles of a fixed number of rows, the last one filled with zeros, so that the shape is always the same; a row's sum does
not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

TILE = 16

_active: ContextVar[bool] = ContextVar("treadle_row_invariant", default=False)


@contextmanager
def row_invariant(active: bool = True) -> Generator[None]:
    """Compute matrix products row by row alike, in this thread, until left."""
    token = _active.set(active)
    try:
        yield
    finally:
        _active.reset(token)


def is_row_invariant() -> bool:
    """Return whether this thread is within `row_invariant()`."""
    return _active.get()


def linear_by_tiles(
    x: Float[Tensor, "T I"], weight: Float[Tensor, "O I"], bias: Float[Tensor, " O"] | None
) -> Float[Tensor, "T O"]:
    """Return x @ weight.T + bias, in tiles of TILE rows."""
    rows = x.shape[0]
    out = x.new_empty(rows, weight.shape[0])
    for start in range(0, rows, TILE):
        tile = x[start : start + TILE]
        count = tile.shape[0]
        if count < TILE or not tile.is_contiguous():
            padded = torch.zeros(TILE, x.shape[1], dtype=x.dtype, device=x.device)
            padded[:count] = tile
            tile = padded
        out[start : start + count] = F.linear(tile, weight, bias)[:count]
    return out
