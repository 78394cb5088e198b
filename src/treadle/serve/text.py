"""Tokens to text as they come: no half characters, and nothing of a stop string ever gets out."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.model.tokenizer_stream import DecodeStream


class TextOutput:
    """Decodes one sequence and watches for its stop strings.

    The text ends before the stop string whose last character comes first, however the tokens split it. What could be
    the beginning of one is held back until it is decided.
    """

    def __init__(self, decoder: DecodeStream | None, stops: Sequence[str] = ()) -> None:
        """Without a decoder (a model that has no tokenizer) there is no text."""
        self._decoder, self._stops = decoder, tuple(stops)
        self._held = ""

    def push(self, token: int, watch: bool = True) -> tuple[str, str | None]:
        """Take a token; return the text that is now certain, and the stop string if one is complete.

        With `watch` off (a minimum length is not reached) what the token gives is text, whatever it is.
        """
        return self._add("" if self._decoder is None else self._decoder.push(token), watch)

    def finish(self) -> tuple[str, str | None]:
        """Return what was held back, up to a stop string if the last bytes complete one.

        A character that the last token left unfinished is dropped, not shown as U+FFFD.
        """
        tail = "" if self._decoder is None else self._decoder.finish()
        text, stop = self._add(tail if tail.strip("\ufffd") else "", watch=True)
        if stop is None:
            text, self._held = text + self._held, ""
        return text, stop

    def _add(self, new: str, watch: bool) -> tuple[str, str | None]:
        text = self._held + new
        if not watch or not self._stops:
            self._held = ""
            return text, None
        found = [(begin + len(stop), begin, stop) for stop in self._stops if (begin := text.find(stop)) >= 0]
        if found:
            _, begin, stop = min(found)
            self._held = ""
            return text[:begin], stop
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that `stop` begins with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
