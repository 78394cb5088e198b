"""Prompt lookup (Saxena 2023): guess that a text goes on as it did where its last tokens occurred before.

The guesses of a sequence are checked in the step that makes its next token; those that equal what is sampled there are
kept. As every token is sampled from the model's own distribution, with the random number of its place, what comes out
is the same with and without guesses. How many are made follows what they brought so far and what a step of that many
tokens costs; where none pays, a few are tried again now and then.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_MATCH, SHORTEST_MATCH = 4, 2  # tokens at the end that must have occurred before
TRIAL_TOKENS, TRIAL_EVERY = 2, 64  # guesses made where none pays, and how many tokens apart
MEMORY = 0.8  # weight of the past in the running share of guesses that held


class Drafter:
    """Guesses for one sequence."""

    def __init__(self, most: int) -> None:
        """At most `most` tokens are guessed at once."""
        self.most = most
        self.share = 0.7  # of guesses that hold where the one before held; at first a hope
        self._ends: dict[tuple[int, ...], int] = {}  # the last tokens of a place -> the place after them
        self._indexed = 0
        self._resting = 0

    def propose(self, tokens: Sequence[int], token_cost: float) -> list[int]:
        """Return guesses for what follows `tokens`; [] where there are none or they do not pay.

        `token_cost` is what one more token adds to a step, as a share of the step without it.
        """
        place = self._find(tokens)
        if place is None:
            return []
        count = self.worthwhile(token_cost)
        if count == 0:
            self._resting += 1
            if self._resting < TRIAL_EVERY:
                return []
            self._resting, count = 0, min(TRIAL_TOKENS, self.most)
        return list(tokens[place : place + count])

    def worthwhile(self, token_cost: float) -> int:
        """Return how many guesses bring the most tokens a second, by the share that held so far."""
        best, best_rate, expected = 0, 1.0, 1.0
        for count in range(1, self.most + 1):
            expected += self.share**count
            rate = expected / (1.0 + count * token_cost)
            if rate > best_rate * 1.02:  # a gain that small is not worth the rejected work
                best, best_rate = count, rate
        return best

    def learn(self, guessed: int, held: int) -> None:
        """Note that the first `held` of `guessed` tokens were right."""
        if guessed:
            tried = held if held == guessed else held + 1  # what came after the first wrong one says nothing
            self.share = MEMORY * self.share + (1 - MEMORY) * held / tried

    def _find(self, tokens: Sequence[int]) -> int | None:
        """Return the place after the latest earlier occurrence of the longest ending."""
        found = None
        # Places before the last one: the ending itself must not be found as its own occurrence.
        for end in range(max(self._indexed, SHORTEST_MATCH), len(tokens)):
            for length in range(SHORTEST_MATCH, min(LONGEST_MATCH, end) + 1):
                self._ends[tuple(tokens[end - length : end])] = end
        self._indexed = max(self._indexed, len(tokens))
        for length in range(min(LONGEST_MATCH, len(tokens)), SHORTEST_MATCH - 1, -1):
            found = self._ends.get(tuple(tokens[len(tokens) - length :]))
            if found is not None:
                return found
        return None
