"""An engine step cut into microbatches, which follow each other through the stages of a pipeline."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from treadle.serve.batch import StepBatch

# Fewer tokens than this cost a stage nearly as much as so many: it waits for its weights, not for arithmetic.
LEAST_TOKENS = 128
A_STAGE = (
    4  # microbatches for each stage: of P stages and M microbatches a stage idles (P - 1) / (M + P - 1) of the time
)


def microbatch_count(batch: StepBatch, stages: int) -> int:
    """Return how many microbatches a step should be cut into; 1 where that would cost more than it gains."""
    if stages == 1 or batch.rows != sorted(batch.rows) or batch.pooled != sorted(batch.pooled):
        return 1
    return max(1, min(A_STAGE * stages, len(batch.tokens) // LEAST_TOKENS))


def cut_batch(batch: StepBatch, count: int) -> list[StepBatch]:
    """Return `count` steps which, run one after the other, compute what the whole does: of equally many tokens, but for
    a rest, so that a sequence may lie in several. Their rows, one behind the other, are the whole's (both ascending).
    """
    if count == 1:
        return [batch]
    total, sequences = len(batch.tokens), len(batch.counts)
    ends = np.cumsum(batch.counts)
    begins = ends - batch.counts
    tables = [np.frombuffer(table, dtype=np.int32).reshape(sequences, -1) for table in batch.tables]
    found = []
    for low, high in pairwise(total * part // count for part in range(count + 1)):
        first, last = np.maximum(begins, low), np.minimum(ends, high)
        chosen = np.flatnonzero(last > first)
        found.append(
            StepBatch(
                batch.tokens[low:high],
                (last - first)[chosen].tolist(),
                (np.asarray(batch.pasts) + first - begins)[chosen].tolist(),
                [batch.rope_lengths[index] for index in chosen],
                [row - low for row in batch.rows if low <= row < high],
                [table[chosen].tobytes() for table in tables],
                [batch.adapters[index] for index in chosen] if batch.adapters else [],
                [row - low for row in batch.pooled if low <= row < high],
            )
        )
    return found
