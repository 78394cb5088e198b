"""The plan as data: sizes that fit, and sentences for those that do not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.config import UserError
from treadle.parallel.plan import Plan


@given(pp=st.integers(1, 4), replicate=st.integers(1, 16), shard=st.integers(1, 16), tp=st.integers(1, 4))
def test_a_resolved_plan_spans_exactly_the_ranks(pp: int, replicate: int, shard: int, tp: int) -> None:
    ranks = pp * replicate * shard * tp
    explicit = Plan(pp=pp, dp_replicate=replicate, dp_shard=shard, tp=tp).resolve(ranks)
    assert explicit == Plan(pp=pp, dp_replicate=replicate, tp=tp).resolve(ranks)
    assert explicit.ranks() == ranks == explicit.data_ranks() * pp * tp
    assert explicit.resolve(ranks) == explicit


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [(Plan(dp_shard=2), 3), (Plan(dp_replicate=2), 3), (Plan(dp_replicate=4), 2), (Plan(tp=2), 3), (Plan(pp=4), 2)],
)
def test_a_plan_that_does_not_fit_names_the_numbers(plan: Plan, ranks: int) -> None:
    with pytest.raises(UserError, match=rf"the plan [a-z_]+=\d does not fit {ranks} ranks.*nproc"):
        plan.resolve(ranks)
