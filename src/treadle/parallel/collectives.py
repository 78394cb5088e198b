"""Small agreements between all ranks. Each is called by every rank, or the others wait."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from treadle.config import TreadleError, UserError

T = TypeVar("T")


def sum_over_ranks(values: Sequence[float]) -> list[float]:
    """Return the sum of each value over all ranks, in float64.

    Every rank adds up the same numbers in the same order, so that all get the same bits and decide alike.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [float(value) for value in values]
    own = torch.tensor(values, dtype=torch.float64)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    return [math.fsum(column) for column in zip(*(row.tolist() for row in everyone), strict=True)]


def from_first(value: T) -> T:
    """Return rank 0's value on every rank. It travels as JSON."""
    import json

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    text = json.dumps(value).encode() if dist.get_rank() == 0 else b""
    size = torch.tensor([len(text)])
    dist.broadcast(size, 0)
    content = (
        torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(int(size), dtype=torch.uint8)
    )
    dist.broadcast(content, 0)
    return json.loads(content.numpy().tobytes())


def together(work: Callable[[], T]) -> T:
    """Run `work`, which must not communicate, on every rank; where it fails on any, raise that error on all of them.

    Otherwise the rank that fails would leave the others waiting. Raises the error itself where it happened, elsewhere
    a TreadleError (UserError) with the same sentence.
    """
    error: Exception | None = None
    result: Any = None
    try:
        result = work()
    except Exception as caught:
        error = caught
    failed = first_failure(error)
    if error is not None:
        raise error
    if failed is not None:
        _, is_user_error, message = failed
        raise (UserError if is_user_error else TreadleError)(message)
    return result


def first_failure(error: Exception | None) -> tuple[int, bool, str] | None:
    """Return (rank, whether it is the user's mistake, sentence) of the lowest rank that has an error, or None."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None if error is None else (0, isinstance(error, UserError), str(error))
    limit = 4096
    own = torch.zeros(limit, dtype=torch.uint8)
    if error is not None:
        text = str(error) if isinstance(error, TreadleError) else f"{type(error).__name__}: {error}"
        content = (("u" if isinstance(error, UserError) else "e") + text).encode()[:limit]
        own[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    if sum_over_ranks([float(error is not None)])[0] == 0:
        return None
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    for rank, row in enumerate(everyone):
        content = row.numpy().tobytes().rstrip(b"\0").decode(errors="replace")
        if content:
            return rank, content[0] == "u", content[1:]
    raise AssertionError("a rank said that it failed, but not how")
