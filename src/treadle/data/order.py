"""The order of the data as arithmetic: a keyed permutation and an exact interleaving, with no table in memory.

Both are pure functions of their key and an index, so any rank finds any sample by itself, a run resumes anywhere from
one number, and a corpus of any size costs nothing to shuffle.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

from treadle.config import UserError
from treadle.config.mixing import mix64

ROUNDS = 8
# Permutations of few items are cut out of one of this many, so that the halves are wide enough to mix.
LEAST_BITS = 6
MAX_WINDOW = 1_000_000


class Permutation:
    """A permutation of range(size) that depends on `key` (numbers and words).

    An alternating Feistel network over the next power of two, walked until it lands inside the range again (Black and
    Rogaway, "Ciphers with arbitrary finite domains", 2002). It shuffles; it keeps no secret.
    """

    def __init__(self, size: int, *key: int | str) -> None:
        assert size > 0
        self.size = size
        bits = max((size - 1).bit_length(), LEAST_BITS)
        self._left_bits, self._right_bits = bits // 2, bits - bits // 2
        digest = hashlib.blake2b("\0".join(map(str, key)).encode(), digest_size=8 * ROUNDS).digest()
        self._keys = [int.from_bytes(digest[8 * r : 8 * r + 8], "little") for r in range(ROUNDS)]

    def __call__(self, index: int) -> int:
        """Return where `index` goes; both lie in range(size)."""
        if not 0 <= index < self.size:
            raise IndexError(f"{index} is outside of 0 to {self.size - 1}")
        right_bits = self._right_bits
        left_mask, right_mask = (1 << self._left_bits) - 1, (1 << right_bits) - 1
        value = index
        while True:
            left, right = value >> right_bits, value & right_mask
            for number, key in enumerate(self._keys):
                if number % 2:
                    right ^= mix64(left + key) & right_mask
                else:
                    left ^= mix64(right + key) & left_mask
            value = left << right_bits | right
            if value < self.size:
                return value


class Interleaving:
    """Which corpus each global sample comes from, in exact proportion to the weights over every window.

    The weights become the smallest whole numbers in the same proportion; a window is their sum. Within each window
    every corpus has exactly its number of samples, in an order that the seed permutes anew.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        """Raises UserError for a weight that is not above 0, or too small to appear once in a million samples."""
        for weight in weights:
            if not (math.isfinite(weight) and weight > 0):
                raise UserError(
                    f"a corpus has weight {weight}; a weight is a number above 0, leave the corpus out instead"
                )
        self.counts = _whole_numbers(weights)
        self.seed = seed
        self.window = sum(self.counts)
        self._ends = list(itertools.accumulate(self.counts))
        self._shuffle = functools.lru_cache(maxsize=4)(lambda number: Permutation(self.window, seed, "window", number))

    def __call__(self, index: int) -> tuple[int, int]:
        """Return (which corpus, how many samples were taken from it before) for the global sample `index`."""
        if len(self.counts) == 1:
            return 0, index
        number, offset = divmod(index, self.window)
        slot = self._shuffle(number)(offset)
        corpus = bisect.bisect_right(self._ends, slot)
        return corpus, number * self.counts[corpus] + slot - (self._ends[corpus] - self.counts[corpus])


def _whole_numbers(weights: Sequence[float]) -> list[int]:
    """Return the smallest whole numbers in the proportion of `weights`, rounded where they sum above the limit."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    divisor = math.gcd(*whole)
    whole = [count // divisor for count in whole]
    total = sum(whole)
    if total <= MAX_WINDOW:
        return whole
    shares = [count * MAX_WINDOW // total for count in whole]
    missing = MAX_WINDOW - sum(shares)
    by_remainder = sorted(range(len(whole)), key=lambda c: (-(whole[c] * MAX_WINDOW % total), c))
    for corpus in by_remainder[:missing]:
        shares[corpus] += 1
    if 0 in shares:
        raise UserError(
            f"the weight {weights[shares.index(0)]} is less than a millionth of all the weights, so its corpus would "
            "never be seen; raise it or leave the corpus out"
        )
    return shares
