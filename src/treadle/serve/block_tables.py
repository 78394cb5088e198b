"""Each sequence's blocks: given as it grows, shared where prefixes are equal, freed where no layer sees them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from treadle.serve.batch import NULL_BLOCK, LayerGroup
from treadle.serve.block_pool import BlockPool

GROWTH = 64  # entries by which a table's memory grows


@dataclass
class SequenceBlocks:
    """The blocks of one sequence: for each layer group a table of which the first `given` entries count."""

    root: bytes  # what besides its tokens a prefix must share: weights, adapter, salt
    tables: list[np.ndarray]  # int32
    given: int = 0
    freed: list[int] = field(default_factory=list)  # by group: entries at the front that were freed again
    digests: list[bytes] = field(default_factory=list)  # of its first full blocks
    remembered: int = 0  # how many of those are known to the pools


@dataclass(frozen=True)
class Hit:
    """A prefix that is in the cache: its blocks by group (NULL_BLOCK where not needed), how many were free."""

    blocks: tuple[tuple[int, ...], ...]
    free: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.blocks[0])


class BlockTables:
    """Gives and takes the blocks of all sequences, over one pool for each layer group."""

    def __init__(self, groups: Sequence[LayerGroup], counts: Sequence[int], block_size: int) -> None:
        self.groups, self.block_size = tuple(groups), block_size
        self.pools = [BlockPool(count) for count in counts]
        self.sequences: dict[int, SequenceBlocks] = {}

    @property
    def free(self) -> tuple[int, ...]:
        return tuple(pool.free for pool in self.pools)

    def open(self, root: bytes) -> SequenceBlocks:
        """Return the (empty) blocks of a new sequence."""
        sequence = SequenceBlocks(root, [np.zeros(GROWTH, np.int32) for _ in self.pools], freed=[0] * len(self.pools))
        self.sequences[id(sequence)] = sequence
        return sequence

    def find_prefix(self, sequence: SequenceBlocks, tokens: Sequence[int]) -> Hit:
        """Return the longest prefix of `tokens` in the cache, in whole blocks, that leaves at least one token to do."""
        digests = self._digest(sequence, tokens, (len(tokens) - 1) // self.block_size)
        count = len(digests)
        for pool, group in zip(self.pools, self.groups, strict=True):
            if not group.window:
                count = next((i for i in range(count) if pool.find(digests[i]) is None), count)
        while count and not self._windows_present(digests, count):
            count -= 1
        found, free = [], []
        for pool, group in zip(self.pools, self.groups, strict=True):
            first = self._first_seen(group, count * self.block_size)
            blocks = [NULL_BLOCK] * first + [pool.find(digest) or NULL_BLOCK for digest in digests[first:count]]
            found.append(tuple(blocks))
            free.append(sum(1 for block in blocks if block != NULL_BLOCK and pool.is_free(block)))
        return Hit(tuple(found), tuple(free))

    def take_prefix(self, sequence: SequenceBlocks, hit: Hit) -> int:
        """Hold the blocks of a hit for a sequence that has none; returns the tokens that they contain."""
        assert sequence.given == 0
        for index, (pool, blocks) in enumerate(zip(self.pools, hit.blocks, strict=True)):
            self._reserve(sequence, index, len(blocks))
            sequence.tables[index][: len(blocks)] = blocks
            for block in blocks:
                if block != NULL_BLOCK:
                    pool.hold(block)
            sequence.freed[index] = next((i for i, block in enumerate(blocks) if block != NULL_BLOCK), len(blocks))
        sequence.given = sequence.remembered = hit.count
        return hit.count * self.block_size

    def extend(self, sequence: SequenceBlocks, tokens: int) -> None:
        """Give a sequence the blocks for its first `tokens` tokens. There must be enough free ones."""
        wanted = -(-tokens // self.block_size)
        if wanted <= sequence.given:
            return
        for index, pool in enumerate(self.pools):
            self._reserve(sequence, index, wanted)
            table = sequence.tables[index]
            for entry in range(sequence.given, wanted):
                table[entry] = pool.take()
        sequence.given = wanted

    def advance(self, sequence: SequenceBlocks, tokens: Sequence[int], computed: int, remember: bool) -> None:
        """Note that the first `computed` tokens are in the cache: remember full blocks, free those out of sight."""
        if remember:
            full = computed // self.block_size
            if full > sequence.remembered:
                digests = self._digest(sequence, tokens, full)
                for index, pool in enumerate(self.pools):
                    for entry in range(max(sequence.remembered, sequence.freed[index]), full):
                        pool.remember(int(sequence.tables[index][entry]), digests[entry])
                sequence.remembered = full
        for index, (pool, group) in enumerate(zip(self.pools, self.groups, strict=True)):
            if group.window:
                first = min(self._first_seen(group, computed), sequence.given)
                for entry in range(sequence.freed[index], first):
                    pool.release(int(sequence.tables[index][entry]))
                    sequence.tables[index][entry] = NULL_BLOCK
                sequence.freed[index] = max(sequence.freed[index], first)

    def shrink(self, sequence: SequenceBlocks, tokens: int) -> None:
        """Take back the blocks behind a sequence's first `tokens` tokens."""
        wanted = -(-tokens // self.block_size)
        for index, pool in enumerate(self.pools):
            table = sequence.tables[index]
            for entry in range(sequence.given - 1, max(wanted, sequence.freed[index]) - 1, -1):
                pool.release(int(table[entry]))
                table[entry] = NULL_BLOCK
        sequence.given = min(sequence.given, wanted)
        del sequence.digests[tokens // self.block_size :]
        sequence.remembered = min(sequence.remembered, tokens // self.block_size)

    def release(self, sequence: SequenceBlocks) -> None:
        """Take back all blocks of a sequence, which can then start again."""
        for index, pool in enumerate(self.pools):
            # The end first: of what is remembered, a sequence's beginning is the likeliest to be asked for again.
            for block in sequence.tables[index][: sequence.given][::-1].tolist():
                if block != NULL_BLOCK:
                    pool.release(block)
            sequence.tables[index][: sequence.given] = NULL_BLOCK
            sequence.freed[index] = 0
        sequence.given = sequence.remembered = 0

    def close(self, sequence: SequenceBlocks) -> None:
        """Release a sequence for good."""
        self.release(sequence)
        del self.sequences[id(sequence)]

    def forget_all(self) -> None:
        """Let no prefix be found that is in the cache now."""
        for pool in self.pools:
            pool.forget_all()

    def renew(self) -> None:
        """Note that the cache was made anew. No sequence may have blocks."""
        for pool in self.pools:
            pool.renew()

    def step_tables(self, sequences: Sequence[SequenceBlocks]) -> list[bytes]:
        """Return for each group the tables of `sequences`, one under the other, as a StepBatch holds them."""
        width = max((sequence.given for sequence in sequences), default=0)
        tables = []
        for index in range(len(self.pools)):
            table = np.zeros((len(sequences), width), np.int32)
            for row, sequence in enumerate(sequences):
                table[row, : sequence.given] = sequence.tables[index][: sequence.given]
            tables.append(table.tobytes())
        return tables

    def check(self) -> None:
        """Assert that pools and tables agree."""
        for index, pool in enumerate(self.pools):
            pool.check(sequence.tables[index][: sequence.given].tolist() for sequence in self.sequences.values())

    def _first_seen(self, group: LayerGroup, position: int) -> int:
        """Return the first entry of a table that a token at `position`, or a later one, reads."""
        return max(0, position - group.window + 1) // self.block_size if group.window else 0

    def _windows_present(self, digests: Sequence[bytes], count: int) -> bool:
        for pool, group in zip(self.pools, self.groups, strict=True):
            if group.window:
                first = self._first_seen(group, count * self.block_size)
                if any(pool.find(digest) is None for digest in digests[first:count]):
                    return False
        return True

    def _digest(self, sequence: SequenceBlocks, tokens: Sequence[int], count: int) -> list[bytes]:
        """Return the digests of a sequence's first `count` blocks: each of its tokens and the digest before it."""
        size, digests = self.block_size, sequence.digests
        while len(digests) < count:
            start = len(digests) * size
            content = np.array(tokens[start : start + size], np.int64).tobytes()
            digests.append(
                hashlib.blake2b((digests[-1] if digests else sequence.root) + content, digest_size=16).digest()
            )
        return digests[:count]

    def _reserve(self, sequence: SequenceBlocks, index: int, entries: int) -> None:
        table = sequence.tables[index]
        if entries > len(table):
            grown = np.zeros(max(entries + GROWTH, len(table) * 3 // 2), np.int32)
            grown[: len(table)] = table
            sequence.tables[index] = grown


def prefix_root(parts: Iterable[str]) -> bytes:
    """Return the root of digests for what a prefix must share besides its tokens."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()
