"""Stirring the bits of a number, for hashing and for random numbers that are a function of a key."""

from __future__ import annotations

MASK = (1 << 64) - 1


def mix64(value: int) -> int:
    """Return the low 64 bits of `value` stirred: the finalizer of SplitMix64 (Steele, Lea and Flood 2014)."""
    value &= MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31
