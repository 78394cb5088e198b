"""Batches for one rank: the share of each global batch that is its own, made ahead of time by a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from treadle.config import UserError
from treadle.data.corpus import Corpus
from treadle.data.mixture import Mixture
from treadle.data.packing import Mode, Sample, pack

T = TypeVar("T")


@dataclass(frozen=True)
class PackedBatch:
    """Samples laid side by side, as the model takes them: sequence s holds rows starts[s] to starts[s + 1]."""

    tokens: Int[Tensor, " T"]
    targets: Int[Tensor, " T"]
    positions: Int[Tensor, " T"]
    starts: Int[Tensor, " S_plus_1"]
    max_length: int
    token_weights: Float[Tensor, " T"]
    samples: int
    padding: int


def collate(samples: Sequence[Sample]) -> PackedBatch:
    """Return the samples as one packed batch: tokens, targets, positions int64; starts int32; weights float32."""
    starts, base = [np.zeros(1, np.int32)], 0
    for sample in samples:
        starts.append(sample.starts[1:] + base)
        base += len(sample.tokens)
    edges = np.concatenate(starts)
    return PackedBatch(
        tokens=torch.from_numpy(np.concatenate([sample.tokens for sample in samples])),
        targets=torch.from_numpy(np.concatenate([sample.targets for sample in samples])),
        positions=torch.from_numpy(np.concatenate([sample.positions for sample in samples]).astype(np.int64)),
        starts=torch.from_numpy(edges),
        max_length=int(np.diff(edges).max()),
        token_weights=torch.from_numpy(np.concatenate([sample.token_weights for sample in samples])),
        samples=len(samples),
        padding=sum(sample.padding for sample in samples),
    )


def batches(
    mixture: Mixture,
    cursor: int,
    global_batch_samples: int,
    rank: int = 0,
    world_size: int = 1,
    microbatch_samples: int = 1,
    ahead: int = 2,
) -> Generator[list[PackedBatch]]:
    """Yield, for each step from the global sample `cursor` on, the microbatches of this rank. It never ends.

    A step consists of the samples [cursor, cursor + global_batch_samples), whatever the number of ranks; rank r has the
    r-th of `world_size` equal runs of them. The next `ahead` steps are made by a thread meanwhile; `close()` ends it.
    The cursor of the following step is the caller's to keep: it is the only state.
    Raises UserError for a global batch that cannot be divided.
    """
    own = share(global_batch_samples, world_size, microbatch_samples)

    def steps() -> Iterator[list[PackedBatch]]:
        first = cursor + rank * own
        while True:
            yield [
                collate([mixture.sample(index) for index in range(start, start + microbatch_samples)])
                for start in range(first, first + own, microbatch_samples)
            ]
            first += global_batch_samples

    return made_ahead(steps, ahead)


def share(global_batch_samples: int, world_size: int, microbatch_samples: int) -> int:
    """Return how many samples of a global batch are one rank's. Raises UserError naming numbers that do not divide."""
    if min(global_batch_samples, world_size, microbatch_samples) < 1:
        raise UserError(
            f"a batch of {global_batch_samples} samples in microbatches of {microbatch_samples} on {world_size} ranks "
            "makes no sense; each of the numbers must be at least 1"
        )
    unit = world_size * microbatch_samples
    if global_batch_samples % unit:
        near = unit * max(1, round(global_batch_samples / unit))
        raise UserError(
            f"a global batch of {global_batch_samples} samples cannot be divided among {world_size} ranks in "
            f"microbatches of {microbatch_samples}; make it a multiple of {unit}, such as {near}"
        )
    return global_batch_samples // world_size


def evaluation_batches(
    corpus: Corpus,
    sequence_length: int,
    batch_samples: int = 1,
    rank: int = 0,
    world_size: int = 1,
    mode: Mode = "concat",
    max_samples: int | None = None,
    ahead: int = 2,
) -> Generator[PackedBatch]:
    """Yield this rank's batches of one pass over `corpus`, in order: every target once, over all ranks.

    The samples do not depend on `batch_samples` or `world_size`, so neither does the loss. Every rank yields equally
    many batches of equally many samples: where samples run out, empty ones with no weight stand in, so that ranks
    that compute together stay together. `max_samples` takes that many, spread evenly over the corpus.
    """
    packing = pack(corpus, sequence_length, mode)
    count = packing.samples if max_samples is None else min(packing.samples, max_samples)
    rounds = -(-count // (batch_samples * world_size))

    def chosen(index: int) -> Sample:
        return packing.sample(index * packing.samples // count) if index < count else _empty(sequence_length)

    def made() -> Iterator[PackedBatch]:
        for number in range(rounds):
            first = (number * world_size + rank) * batch_samples
            # The last batch of a single rank is just shorter; several ranks must agree on the shape.
            last = first + batch_samples if world_size > 1 else min(first + batch_samples, count)
            yield collate([chosen(index) for index in range(first, last)])

    return made_ahead(made, ahead)


def _empty(length: int) -> Sample:
    zeros = np.zeros(length, np.int64)
    weights, positions = np.zeros(length, np.float32), np.arange(length, dtype=np.int32)
    return Sample(zeros, zeros, positions, np.array([0, length], np.int32), weights, length)


def made_ahead(make: Callable[[], Iterator[T]], ahead: int) -> Generator[T]:
    """Yield what `make()` yields, computed up to `ahead` items early in a thread that ends with the generator.

    An error in the thread is raised here, after the items that came before it. `ahead` 0 computes in place.
    """
    if ahead <= 0:
        yield from make()
        return
    ready: queue.Queue[tuple[bool, object]] = queue.Queue(maxsize=ahead)
    stopped = threading.Event()

    def put(item: tuple[bool, object]) -> bool:
        while not stopped.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for item in make():
                if not put((True, item)):
                    return
            put((False, None))
        except BaseException as error:
            put((False, error))

    thread = threading.Thread(target=work, name="treadle-loader", daemon=True)
    thread.start()
    try:
        while True:
            more, item = ready.get()
            if not more:
                if isinstance(item, BaseException):
                    raise item
                return
            yield item  # pyrefly: ignore
    finally:
        stopped.set()
        thread.join(timeout=5)
