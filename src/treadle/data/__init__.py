"""From files to batches: prepare token shards, read them memory-mapped, pack, mix and order them.

    from treadle.data import Corpus, Mixture, batches

    mixture = Mixture([(Corpus.open("corpus"), 1.0)], sequence_length=2048)
    for microbatches in batches(mixture, cursor=0, global_batch_samples=64, microbatch_samples=8):
        ...

Nothing heavy is imported until a name is first used: the processes that tokenize never load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treadle.data.corpus import Corpus
    from treadle.data.loader import PackedBatch, batches, evaluation_batches
    from treadle.data.mixture import Mixture
    from treadle.data.packing import Sample

__all__ = ["Corpus", "Mixture", "PackedBatch", "Sample", "batches", "evaluation_batches"]

_HOME = {
    "Corpus": "corpus",
    "Mixture": "mixture",
    "PackedBatch": "loader",
    "Sample": "packing",
    "batches": "loader",
    "evaluation_batches": "loader",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'treadle.data' has no attribute {name!r}")
    return getattr(importlib.import_module(f"treadle.data.{_HOME[name]}"), name)
