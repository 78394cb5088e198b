"""Random numbers for initial values, which depend on a parameter's name and the seed alone."""

from __future__ import annotations

import hashlib

import torch


def generator_of(name: str, seed: int) -> torch.Generator:
    """Return the generator of a parameter: its values do not depend on how the model is laid out over devices."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
