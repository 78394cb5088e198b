"""The two kinds of error that a person is meant to read.

Each message is one sentence that names the thing and says the way out. The command line prints it without a
traceback and exits with `exit_code`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TreadleError(Exception):
    """Something outside the user's control went wrong (a full disk, a lost rank)."""

    exit_code = 1


class UserError(TreadleError, ValueError):
    """The request cannot be carried out as it was made."""

    exit_code = 2


def shortened(text: str, longest: int = 60) -> str:
    """Return untrusted text in a form that fits a message of one line."""
    text = text if len(text) <= longest else text[: longest - 3] + "..."
    return text if text.isprintable() else repr(text)[1:-1]


def in_short(value: object) -> str:
    """Return an untrusted value as Python writes it, shortened."""
    return shortened(repr(value))


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ", did you mean 'x'?" for the known word closest to `word`, or "" where none is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f", did you mean '{close[0]}'?" if close else ""
