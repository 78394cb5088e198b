"""Several corpora as one endless sequence of samples, each a pure function of its global index."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

from treadle.config import UserError
from treadle.data.corpus import Corpus
from treadle.data.order import Interleaving, Permutation
from treadle.data.packing import Mode, Sample, pack


class Mixture:
    """Corpora mixed by weight. It has no state: `sample(index)` depends on what the mixture was made of, and the index.

    Each corpus goes through its own epochs, in a new order each time. `samples_per_epoch` counts each corpus once.
    """

    def __init__(
        self,
        corpora: Sequence[tuple[Corpus, float]],
        sequence_length: int,
        seed: int = 0,
        mode: Mode = "concat",
        shuffle: bool = True,
    ) -> None:
        """Raises UserError for no corpus, a weight not above 0, a length below 2, corpora of different tokenizers."""
        if not corpora:
            raise UserError("a mixture needs at least one corpus")
        first = corpora[0][0]
        for corpus, _ in corpora[1:]:
            first.check_tokenizer(corpus.manifest.tokenizer, whose=f"the corpus {corpus.folder}")
        self.sequence_length, self.seed, self.mode, self.shuffle = sequence_length, seed, mode, shuffle
        self.corpora = [corpus for corpus, _ in corpora]
        self.weights = [weight for _, weight in corpora]
        self.packings = [pack(corpus, sequence_length, mode) for corpus in self.corpora]
        self.samples_per_epoch = sum(packing.samples for packing in self.packings)
        self._interleaving = Interleaving(self.weights, seed)
        self._order = functools.lru_cache(maxsize=4 * len(corpora))(self._make_order)

    @property
    def vocabulary_size(self) -> int:
        """One more than the largest id that a sample may hold."""
        return self.corpora[0].vocabulary_size

    @property
    def fingerprint(self) -> str:
        """A SHA-256 of everything that decides the samples; runs with the same one see the same data."""
        parts = [self.sequence_length, self.seed, self.mode, self.shuffle, self._interleaving.counts]
        parts += [corpus.fingerprint for corpus in self.corpora]
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def locate(self, index: int) -> tuple[int, int, int]:
        """Return (which corpus, its epoch, which of its samples) the global sample `index` is."""
        number, taken = self._interleaving(index)
        epoch, offset = divmod(taken, self.packings[number].samples)
        return number, epoch, self._order(number, epoch)(offset) if self.shuffle else offset

    def sample(self, index: int) -> Sample:
        """Return the global sample `index`, any number from 0 on."""
        number, _, sample = self.locate(index)
        return self.packings[number].sample(sample)

    def _make_order(self, number: int, epoch: int) -> Permutation:
        # Keyed by the corpus itself, so that its order stays when another corpus joins the mixture.
        return Permutation(self.packings[number].samples, self.seed, self.corpora[number].fingerprint, epoch)
