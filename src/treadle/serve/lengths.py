"""Statistics of input lengths, in bounded memory, and the step sizes that suit them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

STEPS_PER_OCTAVE = 4
CLASSES = 24 * STEPS_PER_OCTAVE  # lengths up to 16M tokens
MOST = 8192  # lengths that are remembered; then each counts half, so the recent ones decide
QUANTILES = (0.25, 0.5, 0.75, 0.9, 0.99)


class LengthHistogram:
    """How often which length of prompt came: quarter octaves, the old ones fading."""

    def __init__(self, counts: Sequence[float] = ()) -> None:
        """`counts` are those of an earlier histogram."""
        self.counts = [*counts, *[0.0] * CLASSES][:CLASSES]
        self.total = sum(self.counts)

    def add(self, length: int) -> None:
        """Note one prompt's length in tokens."""
        self.counts[min(CLASSES - 1, math.ceil(STEPS_PER_OCTAVE * math.log2(max(1, length)) - 1e-9))] += 1
        self.total += 1
        if self.total > MOST:
            self.counts = [count / 2 for count in self.counts]
            self.total = sum(self.counts)

    def quantile(self, share: float) -> int:
        """Return the length that `share` of the prompts do not exceed (to a quarter octave), 0 before the first."""
        reached = 0.0
        for place, count in enumerate(self.counts):
            reached += count
            if count and reached >= share * self.total * (1 - 1e-9):
                return math.ceil(2 ** (place / STEPS_PER_OCTAVE) - 1e-9)
        return 0

    def typical(self) -> tuple[int, ...]:
        """Return lengths that many prompts fit into, ascending."""
        return tuple(sorted({self.quantile(share) for share in QUANTILES})) if self.total else ()


@functools.lru_cache(64)
def candidate_sizes(most: int, unit: int, beside: int = 0, typical: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Return the sizes in tokens, ascending, that a step may be given; the last is `most`.

    They are multiples of `unit`, four to an octave, and `beside` decoding tokens with a prompt of a typical length. As
    steps come in few sizes, what is prepared by size (kernels' plans, captured graphs) is little, and each size gets
    measured.
    """
    sizes = {most}
    octaves = math.ceil(STEPS_PER_OCTAVE * math.log2(max(2, most)))
    for place in range(octaves + 1):
        sizes.add(_rounded(2 ** (place / STEPS_PER_OCTAVE), unit))
    sizes.update(_rounded(beside + length, unit) for length in typical)
    return tuple(sorted(size for size in sizes if 0 < size <= most))


def _rounded(size: float, unit: int) -> int:
    return max(1, math.ceil(size / unit - 1e-9)) * unit
