"""What an engine step takes, learned from the steps that were run.

A step's seconds are fitted as a sum of five parts, none of them negative: a constant (reading the weights), and so much
for each token, for each row of logits (a sequence that gets a token, or a guess that is checked), for each token in the
cache that is read, and for each pair of a token and one that it attends to.

The usual choice would be recursive least squares with forgetting. But a server decodes for minutes between two long
prompts, and an exponential memory has lost by then what a prompt's token costs, because nothing renewed it. So the
memory is by size instead: of every class of steps (half an octave of tokens) the last KEEP are kept, and all of them
are fitted again every few steps. Errors count relative to the step, since noise grows with it, and Huber's weights
(Huber 1964), taken within each class so that common steps do not outvote rare ones, let a disturbed step (the first
ones, which compile; another program's burst) count for little. What five parts cannot say, each class adds by itself:
the median of measured over fitted corrects what is expected of it. The time that a step rarely exceeds is a quantile of
the deviations from that, those of the nearest sizes where a class has too few of its own, so that one disturbed step
does not make a size look bad. As old measurements lose their weight, a size that was avoided is tried again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

KEEP = 128  # steps of each size class
UPPER = 0.98  # share of the steps of a class that take no longer than `upper` says
LIFETIME = 1000.0  # steps after which a measurement counts 1/e where there are newer ones
LEAST_WEIGHT = 0.05  # in the fit: the only measurements of a size stay, however old
KNOWN = 0.5  # weight of a class's measurements from which its own median counts
ENOUGH = 128.0  # weight of the measurements that an upper quantile is taken from, where there are so many
UNKNOWN_MARGIN = 1.5  # over the fit, where no class is known
READY = 8  # measurements from which the fit is used
REFIT_EVERY = 32  # steps
SURPRISE, SURPRISED_EVERY = 1.2, 4  # a step that took so much longer than said is learned from sooner
GROWTH = 2  # a step may hold so many times the tokens of the largest that was measured
FIRST_TOKENS = 64  # what is allowed before anything was measured
HUBER = 1.5
ROUNDS = 3
FEATURES = 5
SHORTEST, LONGEST = 1e-7, 1e5  # seconds that a step can take


@dataclass(frozen=True)
class StepWork:
    """What a step computes, as far as its time depends on it."""

    tokens: int = 0
    rows: int = 0  # of logits
    context: int = 0  # tokens in the cache, of all sequences in the step
    pairs: int = 0  # of a token and one that it attends to

    @classmethod
    def of(cls, computed: int, tokens: int, rows: int) -> StepWork:
        """Return the work of `tokens` tokens of one sequence that has `computed` in the cache."""
        return cls(tokens, rows, computed, tokens * computed + tokens * (tokens + 1) // 2)

    def __add__(self, other: StepWork) -> StepWork:
        return StepWork(
            self.tokens + other.tokens,
            self.rows + other.rows,
            self.context + other.context,
            self.pairs + other.pairs,
        )


def size_class(tokens: int) -> int:
    """Return the class of a step of so many tokens: half octaves."""
    return round(2 * math.log2(max(1, tokens)))


@dataclass(frozen=True)
class Fit:
    """What was learned, as a value: all decisions are functions of it."""

    weights: tuple[float, ...] = (0.0,) * FEATURES  # seconds: constant, a token, a row, a token read, a pair
    ratios: tuple[tuple[int, float, float], ...] = ()  # by size class, ascending: measured / fitted, median and upper
    largest: int = 0  # tokens of the largest step that was measured, more than once
    count: int = 0  # of the measurements that it is made of

    @property
    def ready(self) -> bool:
        return self.count >= READY

    @property
    def trusted(self) -> int:
        """Tokens of the largest step that may be tried; doubling it each time leaves no surprise too big."""
        return max(FIRST_TOKENS, GROWTH * self.largest)

    def linear(self, work: StepWork) -> float:
        constant, token, row, read, pair = self.weights
        return constant + token * work.tokens + row * work.rows + read * work.context + pair * work.pairs

    def expected(self, work: StepWork) -> float:
        """Return the seconds that such a step takes, in the middle."""
        return self.linear(work) * self._ratio(work.tokens, 1)

    def upper(self, work: StepWork) -> float:
        """Return the seconds that such a step rarely exceeds."""
        return self.linear(work) * self._ratio(work.tokens, 2)

    def token_cost(self, work: StepWork, more: int = 4) -> float:
        """Return what one more guess adds to such a step, as a share of it: the mean over `more` of them."""
        if not self.ready or not work.tokens:
            return DEFAULT_TOKEN_COST
        each = work.context // work.tokens
        longer = work + StepWork(more, more, 0, more * (each + 1))
        without = self.expected(work)
        return max(0.0, self.expected(longer) - without) / (more * without) if without > 0 else DEFAULT_TOKEN_COST

    def _ratio(self, tokens: int, which: int) -> float:
        """Return a quantile of the class of a size; between two known classes the larger of both."""
        wanted = size_class(tokens)
        below = above = None
        for entry in self.ratios:
            if entry[0] == wanted:
                return entry[which]
            if entry[0] < wanted:
                below = entry
            elif above is None:
                above = entry
        near = [entry[which] for entry in (below, above) if entry is not None]
        return max(near) if near else (1.0 if which == 1 else UNKNOWN_MARGIN)


DEFAULT_TOKEN_COST = 0.1  # before anything was measured


class _Ring:
    """The last KEEP measurements of one size class, with the number of the step that each is of."""

    def __init__(self) -> None:
        self.rows = np.zeros((KEEP, FEATURES + 2))  # the step's number, seconds, features
        self.count = self._next = 0

    def add(self, row: Sequence[float]) -> None:
        self.rows[self._next] = row
        self._next = (self._next + 1) % KEEP
        self.count = min(KEEP, self.count + 1)

    @property
    def filled(self) -> np.ndarray:
        return self.rows[: self.count]


class CostModel:
    """Collects measurements, and fits them when it is asked."""

    def __init__(self) -> None:
        self.steps = 0
        self._fit = Fit()
        self._rings: dict[int, _Ring] = {}
        self._since_fit = 0
        self._surprised = False

    @property
    def fit(self) -> Fit:
        """The fit to what was measured, up to the last few steps."""
        due = min(REFIT_EVERY, max(1, self.steps // 8))
        if self._since_fit >= (min(due, SURPRISED_EVERY) if self._surprised else due):
            self.refit()
        return self._fit

    def observe(self, work: StepWork, seconds: float) -> None:
        """Note what a step took. Nonsense (no tokens, no time) is left out."""
        if work.tokens < 1 or not SHORTEST <= seconds <= LONGEST:
            return
        self._add(work, seconds)
        self._since_fit += 1
        self._surprised = self._surprised or seconds > SURPRISE * self._fit.upper(work)

    def refit(self) -> None:
        """Fit all that is kept."""
        self._since_fit, self._surprised = 0, False
        rings = sorted(self._rings.items())
        if not rings:
            return
        data = np.concatenate([ring.filled for _, ring in rings])
        fresh = np.exp((data[:, 0] - self.steps) / LIFETIME)
        counts = [ring.count for _, ring in rings]
        parts = [slice(end - count, end) for end, count in zip(itertools.accumulate(counts), counts, strict=True)]
        weights = _robust_fit(data[:, 2:], data[:, 1], np.maximum(fresh, LEAST_WEIGHT), counts)
        ratios = data[:, 1] / np.maximum(data[:, 2:] @ weights, 1e-12)
        seen_twice = [ring.filled[:, 3].max() for _, ring in rings if ring.count > 1]
        self._fit = Fit(
            tuple(float(weight) for weight in weights),
            _corrections([key for key, _ in rings], [(ratios[part], fresh[part]) for part in parts]),
            int(max(seen_twice, default=0)),
            len(data),
        )

    def samples(self) -> Iterator[tuple[StepWork, float]]:
        """Yield all that is kept, the oldest first."""
        rows = itertools.chain.from_iterable(ring.filled for ring in self._rings.values())
        for row in sorted(rows, key=lambda row: row[0]):
            yield StepWork(*(int(value) for value in row[3:])), float(row[1])

    @classmethod
    def remembering(cls, samples: Sequence[tuple[StepWork, float]]) -> CostModel:
        """Return a model that begins with measurements of an earlier run; they count as old ones."""
        model = cls()
        for work, seconds in samples:
            model._add(work, seconds)
        model.steps += int(LIFETIME / 2)
        model.refit()
        return model

    def _add(self, work: StepWork, seconds: float) -> None:
        self.steps += 1
        ring = self._rings.setdefault(size_class(work.tokens), _Ring())
        ring.add((self.steps, seconds, 1.0, work.tokens, work.rows, work.context, work.pairs))


def _robust_fit(features: np.ndarray, seconds: np.ndarray, weights: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """Return the non-negative weights of the least relative error, by Huber's iterated reweighting in each class.

    `counts` are the classes' rows, which lie one after the other.
    """
    which = np.repeat(np.arange(len(counts)), counts)
    relative = features / seconds[:, None]
    solution = _non_negative(relative, weights)
    for _ in range(ROUNDS):
        error = -np.log(np.maximum(relative @ solution, 1e-9))
        distance = np.abs(error - _medians(error, which, counts)[which])
        scale = np.maximum(1.4826 * _medians(distance, which, counts), 1e-2)[which]
        factors = np.minimum(1.0, HUBER * scale / np.maximum(distance, 1e-9))
        solution = _non_negative(relative, weights * factors)
    return solution


def _medians(values: np.ndarray, which: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """Return the median of each class, all at once."""
    starts = np.cumsum(counts) - counts
    table = np.full((len(counts), max(counts)), np.inf)
    table[which, np.arange(len(values)) - starts[which]] = values
    table.sort(1)
    half = np.asarray(counts)
    rows = np.arange(len(counts))
    return (table[rows, (half - 1) // 2] + table[rows, half // 2]) / 2


SUBSETS = np.array(list(itertools.product((0.0, 1.0), repeat=FEATURES)))[1:]  # all but the empty one


def _non_negative(relative: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Return x >= 0 that minimizes the weighted sum of (relative @ x - 1)^2.

    The optimum is the unconstrained one of the features that it uses, and those of other subsets that happen to be
    non-negative are no better; so the best of the 31 subsets' is exact (Lawson and Hanson 1974, chapter 23).
    """
    weighted = relative * factors[:, None]
    gram, target = weighted.T @ relative, weighted.sum(0)
    size = np.sqrt(np.maximum(np.diag(gram), 1e-300))
    gram, target = gram / np.outer(size, size), target / size
    # A touch of ridge: features that never differed share what they explain, instead of cancelling each other.
    gram[np.diag_indices(FEATURES)] += 1e-4
    masked = gram * SUBSETS[:, :, None] * SUBSETS[:, None, :]
    masked[:, np.arange(FEATURES), np.arange(FEATURES)] += 1.0 - SUBSETS
    found = np.linalg.solve(masked, (SUBSETS * target)[:, :, None])[:, :, 0]
    loss = np.einsum("si,ij,sj->s", found, gram, found) - 2 * found @ target
    loss[(found < 0).any(1)] = np.inf
    return found[loss.argmin()] / size


def _corrections(
    keys: Sequence[int], classes: Sequence[tuple[np.ndarray, np.ndarray]]
) -> tuple[tuple[int, float, float], ...]:
    """Return (key, median, upper ratio) of each class (ratios, weights) that has measurements recent enough."""
    known = [place for place, (_, weights) in enumerate(classes) if weights.sum() >= KNOWN]
    if not known:
        return ()
    medians: list[float] = []
    for place in known:
        # One voice for what the sizes below show, so that a single measurement is not believed where it is better.
        before = medians[-1] if medians else 1.0
        ratios, weights = classes[place]
        medians.append(_quantile(np.append(ratios, before), np.append(weights, 1.0), 0.5 + 1e-9))
    deviations = [classes[place][0] / median for place, median in zip(known, medians, strict=True)]
    result = []
    for index, place in enumerate(known):
        nearest = sorted(range(len(known)), key=lambda other: abs(keys[known[other]] - keys[place]))
        total, count = 0.0, 0
        while count < len(nearest) and total < ENOUGH:
            total += float(classes[known[nearest[count]]][1].sum())
            count += 1
        around = nearest[:count]
        upper = _quantile(
            np.concatenate([deviations[other] for other in around]),
            np.concatenate([classes[known[other]][1] for other in around]),
            UPPER,
        )
        result.append((keys[place], medians[index], medians[index] * upper))
    return tuple(result)


def _quantile(values: np.ndarray, weights: np.ndarray, share: float) -> float:
    """Return a weighted quantile, of two in the middle the larger."""
    order = values.argsort()
    ranks = weights[order].cumsum()
    return float(values[order[min(int(np.searchsorted(ranks, share * ranks[-1])), len(order) - 1)]])
