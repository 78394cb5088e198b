"""A step cut into microbatches: every token once and in order, where it was before, and the same rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.serve.batch import StepBatch
from treadle.serve.microbatches import LEAST_TOKENS, cut_batch, microbatch_count


@st.composite
def batches(draw: st.DrawFn) -> StepBatch:
    counts = draw(st.lists(st.integers(1, 30), min_size=1, max_size=8))
    total, sequences = sum(counts), len(counts)
    rows = st.lists(st.integers(0, total - 1), max_size=6, unique=True).map(sorted)
    tables = [np.arange(sequences * width, dtype=np.int32) + width for width in (3, 5)]
    pasts = draw(st.lists(st.integers(0, 50), min_size=sequences, max_size=sequences))
    return StepBatch(
        tokens=list(range(1000, 1000 + total)),
        counts=counts,
        pasts=pasts,
        rope_lengths=[1000 + index for index in range(sequences)],
        rows=draw(rows),
        tables=[table.tobytes() for table in tables],
        adapters=draw(st.sampled_from([[], list(range(sequences))])),
        pooled=draw(rows),
    )


def places(batch: StepBatch) -> list[tuple[int, ...]]:
    """Return for each token what says who it is: token, position, rope length, adapter, and its row of each table."""
    tables = [np.frombuffer(table, np.int32).reshape(len(batch.counts), -1) for table in batch.tables]
    found, tokens = [], iter(batch.tokens)
    for index, (count, past) in enumerate(zip(batch.counts, batch.pasts, strict=True)):
        adapter = batch.adapters[index] if batch.adapters else 0
        row = tuple(int(block) for table in tables for block in table[index])
        found += [(next(tokens), past + place, batch.rope_lengths[index], adapter, *row) for place in range(count)]
    assert next(tokens, None) is None
    return found


@settings(deadline=None)
@given(batch=batches(), count=st.integers(1, 9))
def test_what_is_cut_computes_what_the_whole_does(batch: StepBatch, count: int) -> None:
    count = min(count, len(batch.tokens))
    parts = cut_batch(batch, count)
    assert len(parts) == count
    assert [place for part in parts for place in places(part)] == places(batch)
    sizes = [len(part.tokens) for part in parts]
    assert max(sizes) - min(sizes) <= 1 and all(min(part.counts) > 0 for part in parts)
    for name in ("rows", "pooled"):
        wanted = [part.tokens[row] for part in parts for row in getattr(part, name)]
        assert wanted == [batch.tokens[row] for row in getattr(batch, name)]


def test_small_steps_stay_whole() -> None:
    def count(tokens: int, stages: int, rows: tuple[int, ...] = (0,)) -> int:
        return microbatch_count(StepBatch(list(range(tokens)), [tokens], [0], [tokens], list(rows), []), stages)

    assert count(LEAST_TOKENS * 2 - 1, 2) == 1 and count(LEAST_TOKENS * 2, 2) == 2
    assert count(LEAST_TOKENS * 50, 1) == 1, "one stage has nobody to wait for"
    assert count(LEAST_TOKENS * 50, 2) == 8
    assert count(LEAST_TOKENS * 50, 2, rows=(5, 3)) == 1, "rows out of order stay as they are"
