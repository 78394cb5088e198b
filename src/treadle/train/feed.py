"""The data of a run: one mixture to learn from, the corpora that are held out."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

from treadle.config import UserError
from treadle.data import Corpus, Mixture, PackedBatch, batches, evaluation_batches
from treadle.model.tokenizer import Tokenizer
from treadle.parallel.mesh import Mesh
from treadle.train.settings import Batching, DataSettings


@dataclass(frozen=True)
class Feed:
    """Where a run's tokens come from."""

    mixture: Mixture
    validation: list[Corpus]
    sequence_length: int

    tokenizer: Tokenizer

    def steps(self, cursor: int, cut: Batching, mesh: Mesh) -> Generator[list[PackedBatch]]:
        """Yield this rank's microbatches of each step from the global sample `cursor` on; close it when done."""
        return batches(self.mixture, cursor, cut.global_samples, mesh.rank, mesh.size, cut.microbatch_samples)

    def held_out(self, tokens: int, samples: int, mesh: Mesh) -> Iterator[PackedBatch]:
        """Yield this rank's batches, of `samples` each, of about `tokens` held-out tokens (0: all)."""
        most = None if tokens == 0 else max(1, tokens // self.sequence_length // len(self.validation))
        return itertools.chain.from_iterable(
            evaluation_batches(corpus, self.sequence_length, samples, mesh.rank, mesh.size, max_samples=most)
            for corpus in self.validation
        )

    def bytes_per_token(self) -> float:
        """Return how many bytes of text a held-out token stands for, on average."""
        targets = sum(corpus.tokens - corpus.documents for corpus in self.validation)
        return sum(corpus.text_bytes for corpus in self.validation) / max(1, targets)


def open_feed(settings: DataSettings) -> Feed:
    """Return the data of a run. Raises UserError for a corpus that is missing, empty or of another tokenizer."""
    corpora = [(Corpus.open(corpus.path), corpus.weight) for corpus in settings.train]
    mixture = Mixture(corpora, settings.sequence_length, settings.seed, settings.packing, settings.shuffle)
    if settings.validation is None:
        folders = [corpus.path for corpus in settings.train if "validation" in _splits(corpus.path)]
    else:
        folders = [corpus.path for corpus in settings.validation]
    validation = [Corpus.open(folder, "validation") for folder in folders]
    for corpus in validation:
        mixture.corpora[0].check_tokenizer(corpus.manifest.tokenizer, whose=f"the corpus {corpus.folder}")
    return Feed(mixture, validation, settings.sequence_length, mixture.corpora[0].tokenizer())


def _splits(folder: Path) -> set[str]:
    """Return the splits of a corpus that hold something."""
    try:
        manifest = Corpus.open(folder).manifest
    except UserError:
        return set()
    return {name for name, split in manifest.splits.items() if split.tokens}
