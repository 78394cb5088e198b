"""Agreements between ranks: the same answer everywhere, whichever rank it came from."""

from __future__ import annotations

import math

import pytest
import torch.distributed as dist

from treadle.config import TreadleError, UserError
from treadle.parallel.collectives import from_first, sum_over_ranks, together


def _sums(values: list[list[float]]) -> list[float]:
    return sum_over_ranks(values[dist.get_rank()])


def test_every_rank_gets_the_same_bits_and_the_exact_sum(ranks) -> None:
    # Added in the order of the list, the first column would lose the small numbers.
    values = [[1e16, 0.1, math.inf], [1.0, 0.2, -1.0], [-1e16, 0.3, 2.0]]
    results = ranks(3).run(_sums, values)
    assert results == [[1.0, math.fsum([0.1, 0.2, 0.3]), math.inf]] * 3


def _sent(value: object) -> object:
    return from_first(value if dist.get_rank() == 0 else "not this")


@pytest.mark.parametrize("value", ["", "ä path", {"a": [1, None]}, "x" * 100_000])
def test_rank_0s_value_reaches_all(ranks, value: object) -> None:
    assert ranks(2).run(_sent, value) == [value, value]


def _fail_on(rank: int, user: bool) -> tuple[str, str]:
    def work() -> str:
        if dist.get_rank() == rank:
            raise (UserError if user else RuntimeError)("the tyre is flat")
        return "fine"

    try:
        return "", together(work)
    except Exception as error:
        return type(error).__name__, str(error)


def test_an_error_on_one_rank_ends_all(ranks) -> None:
    assert ranks(3).run(_fail_on, 1, True) == [("UserError", "the tyre is flat")] * 3
    outcomes = ranks(3).run(_fail_on, 2, False)
    assert outcomes[2] == ("RuntimeError", "the tyre is flat")
    assert outcomes[0] == outcomes[1] == ("TreadleError", "RuntimeError: the tyre is flat")
    assert ranks(3).run(_fail_on, 9, False) == [("", "fine")] * 3


def test_alone_nothing_is_communicated() -> None:
    assert sum_over_ranks([1, 2.5]) == [1.0, 2.5]
    assert from_first({"a": 1}) == {"a": 1}
    with pytest.raises(TreadleError, match="flat"):
        together(lambda: (_ for _ in ()).throw(TreadleError("flat")))
