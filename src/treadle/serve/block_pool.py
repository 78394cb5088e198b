"""Which blocks of the KV cache are free, held or merely remembered; counts, no tensors.

A block is *held* by the sequences whose tables name it (it is counted how many). One that nobody holds but whose
content is known by its hash is *remembered*: it can be held again as it is, and it is given away, the longest unused
first, when no blank one is left.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable

from treadle.serve.batch import NULL_BLOCK


class BlockPool:
    """The blocks 1 to `count` of one layer group."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._blank: deque[int] = deque(range(NULL_BLOCK + 1, count + 1))
        self._remembered: OrderedDict[int, None] = OrderedDict()  # held by nobody, the longest unused first
        self._holders = [0] * (count + 1)
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self.evictions = 0
        self.fresh = count  # blocks that nobody ever had; blank ones are given in turn, so those come first

    @property
    def free(self) -> int:
        """How many blocks can be taken: blank ones and those that are only remembered."""
        return len(self._blank) + len(self._remembered)

    @property
    def held(self) -> int:
        return self.count - self.free

    def take(self) -> int:
        """Return a block of no content, held once. There must be a free one."""
        if self._blank:
            block = self._blank.popleft()
            self.fresh = max(0, self.fresh - 1)
        else:
            block, _ = self._remembered.popitem(last=False)
            self._forget(block)
            self.evictions += 1
        self._holders[block] = 1
        return block

    def find(self, digest: bytes) -> int | None:
        """Return the block of that content, or None."""
        return self._block_of.get(digest)

    def is_free(self, block: int) -> bool:
        """Return whether holding `block` would take it from the free ones."""
        return self._holders[block] == 0

    def hold(self, block: int) -> None:
        """Hold a block once more."""
        if self._holders[block] == 0:
            del self._remembered[block]
        self._holders[block] += 1

    def release(self, block: int) -> None:
        """Give up one hold."""
        assert self._holders[block] > 0, f"block {block} is released but nobody holds it"
        self._holders[block] -= 1
        if self._holders[block] == 0:
            if block in self._hash_of:
                self._remembered[block] = None
            else:
                self._blank.append(block)

    def remember(self, block: int, digest: bytes) -> None:
        """Note what a held block contains. Where another one has the same content, that one keeps the name."""
        assert self._holders[block] > 0
        if digest not in self._block_of and block not in self._hash_of:
            self._block_of[digest] = block
            self._hash_of[block] = digest

    def forget_all(self) -> None:
        """Forget all contents: no block that is held now will be found again, those held by nobody become blank."""
        self._block_of.clear()
        self._hash_of.clear()
        self._blank.extend(self._remembered)
        self._remembered.clear()

    def renew(self) -> None:
        """Note that the cache was made anew: nothing is held, nothing known, no block was ever written."""
        self.forget_all()
        assert len(self._blank) == self.count, "a block is held"
        self.fresh = self.count

    def _forget(self, block: int) -> None:
        del self._block_of[self._hash_of.pop(block)]

    def check(self, tables: Iterable[Iterable[int]]) -> None:
        """Assert that what the pool counts is what the sequences' tables hold."""
        holders = Counter(int(block) for table in tables for block in table if block != NULL_BLOCK)
        for block in range(1, self.count + 1):
            assert self._holders[block] == holders[block], (
                f"block {block} is in {holders[block]} tables but counted {self._holders[block]} times"
            )
        blank, remembered = set(self._blank), set(self._remembered)
        held = {block for block in holders if holders[block]}
        assert len(blank) == len(self._blank), "a block is blank twice"
        assert not blank & remembered and not held & (blank | remembered), "a block is in two states"
        assert len(blank) + len(remembered) + len(held) == self.count, "a block is lost"
        assert remembered <= self._hash_of.keys(), "a remembered block has no content"
        assert {block: digest for digest, block in self._block_of.items()} == self._hash_of
        assert not blank & self._hash_of.keys(), "a blank block has content"
