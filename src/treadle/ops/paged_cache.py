"""Keys and values in blocks: a cache is [N blocks, K, block_size, R], entry o of block n is row n * block_size + o.

A block holds each key-value head's entries side by side, so that one head's attention reads memory in order.
"""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from treadle.ops.registry import Operator


def paged_write_reference(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, rows: Tensor) -> None:
    for new, cache in ((key, key_cache), (value, value_cache)):
        cache[rows // cache.shape[2], :, rows % cache.shape[2]] = new.to(cache.dtype)


PAGED_WRITE = Operator(
    "paged_write",
    "(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor rows) -> ()",
    paged_write_reference,
    fake=lambda *_: None,
)


def gather(cache: Float[Tensor, "N K C E"], blocks: Int[Tensor, "B"]) -> Float[Tensor, "K B*C E"]:
    """Return the entries of these blocks, one after the other."""
    return cache.transpose(0, 1).index_select(1, blocks).flatten(1, 2)


def paged_write(
    key: Float[Tensor, "T K E"],
    value: Float[Tensor, "T K E"],
    key_cache: Float[Tensor, "N K C E"],
    value_cache: Float[Tensor, "N K C E"],
    rows: Int[Tensor, "T"],
) -> None:
    """Write the keys and values of T tokens into these rows of the caches, rounded to the caches' dtype."""
    PAGED_WRITE.call(key, value, key_cache, value_cache, rows)
