"""Which replica gets a prompt: a pure decision that weighs what is in its cache against what waits there already."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PIECE = 64  # tokens by which prefixes are told apart
REMEMBERED = 4096  # pieces of each replica, the longest unused forgotten


@dataclass(frozen=True)
class Replica:
    """What is known of a replica: tokens of the prompt that it saw before, tokens that it has still to compute."""

    cached: int
    pending: int


def choose_replica(prompt_tokens: int, replicas: Sequence[Replica]) -> tuple[int, str]:
    """Return the replica that will be done with the prompt first, and why; the first of several that are equal."""
    work = [prompt_tokens - replica.cached + replica.pending for replica in replicas]
    best = min(range(len(replicas)), key=work.__getitem__)
    chosen = replicas[best]
    why = f"{chosen.cached} of {prompt_tokens} tokens seen before, {chosen.pending} to compute before it"
    return best, f"replica {best}: {why}"


class Memory:
    """The prefixes that were sent to one replica."""

    def __init__(self) -> None:
        self._pieces: OrderedDict[bytes, None] = OrderedDict()

    def seen(self, digests: Sequence[bytes]) -> int:
        """Return how many tokens of a prompt of these digests were sent before."""
        count = next((i for i, digest in enumerate(digests) if digest not in self._pieces), len(digests))
        return count * PIECE

    def note(self, digests: Sequence[bytes]) -> None:
        """Remember a prompt that is sent now."""
        for digest in digests:
            self._pieces[digest] = None
            self._pieces.move_to_end(digest)
        while len(self._pieces) > REMEMBERED:
            self._pieces.popitem(last=False)


def prefix_digests(tokens: Sequence[int], salt: str) -> list[bytes]:
    """Return the digest of each prefix that is a multiple of PIECE tokens long."""
    digest = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16)
    digests = []
    for start in range(0, len(tokens) - PIECE + 1, PIECE):
        digest.update(np.array(tokens[start : start + PIECE], np.int64).tobytes())
        digests.append(digest.copy().digest())
    return digests
