"""Decoding one id at a time, so that the pieces joined equal decoding the whole.

Each kind of decoder of the `tokenizers` library gets an incremental twin, linear in the number of ids:

- byte-level (GPT-2, Llama 3, Qwen): tokens are bytes, so a character waits for its last byte;
- byte fallback (Llama 2, Mistral, Gemma): tokens are text, and `<0xE2>` stands for a byte. A run of byte tokens is
  valid UTF-8 as a whole or is replaced as a whole, so it is held back until it ends.

Any other decoder is asked for the whole text again at each step, which is exact wherever later tokens do not change
earlier text.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from typing import Any, Protocol

import tokenizers


class DecodeStream(Protocol):
    """An incremental decoder for one sequence."""

    def push(self, index: int) -> str:
        """Take the next id and return the text that became certain with it, often ""."""
        ...

    def finish(self) -> str:
        """Return what was held back; an unfinished character becomes U+FFFD."""
        ...


def make_stream(backend: tokenizers.Tokenizer, skipped: frozenset[int]) -> DecodeStream:
    """Return the stream that decodes as `backend` does, leaving out the ids in `skipped`."""
    stages = _stages(backend.decoder)
    kinds = [stage["type"] for stage in stages]
    if kinds == ["ByteLevel"]:
        return _ByteLevelStream(backend, skipped)
    if _is_fallback_chain(stages):
        return _ByteFallbackStream(backend, skipped, stages)
    return _WholeStream(backend, skipped)


def vocabulary_bytes(backend: tokenizers.Tokenizer, size: int) -> list[bytes]:
    """Return the bytes that each id below `size` adds to a decoded text, b"" for an id that has no token.

    For a decoder that is neither byte-level nor byte fallback, it is what the token adds behind another one.
    """
    spelled = [backend.id_to_token(index) for index in range(size)]
    stages = _stages(backend.decoder)
    if [stage["type"] for stage in stages] == ["ByteLevel"]:
        return [b"" if token is None else _token_bytes(token) for token in spelled]
    if _is_fallback_chain(stages):
        return [b"" if token is None else _fallback_bytes(token, _replacements(stages)) for token in spelled]
    anchor = next((index for index, token in enumerate(spelled) if token is not None and token.isalpha()), 0)
    before = backend.decode([anchor], skip_special_tokens=False)
    behind = backend.decode_batch([[anchor, index] for index in range(size)], skip_special_tokens=False)
    return [
        b"" if token is None or not text.startswith(before) else text[len(before) :].encode()
        for token, text in zip(spelled, behind, strict=True)
    ]


def _stages(decoder: Any) -> list[dict[str, Any]]:
    if decoder is None:
        return [{"type": "None"}]
    state = json.loads(decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


def _is_fallback_chain(stages: list[dict[str, Any]]) -> bool:
    """Whether the stages are text replacements, then byte fallback, fuse and at most a strip of leading characters."""
    kinds = [stage["type"] for stage in stages]
    while kinds and kinds[0] == "Replace":
        if "String" not in stages[len(stages) - len(kinds)]["pattern"]:
            return False
        kinds.pop(0)
    return kinds == ["ByteFallback", "Fuse"] or (
        kinds == ["ByteFallback", "Fuse", "Strip"] and stages[-1].get("stop", 0) == 0
    )


def byte_of_character() -> dict[str, int]:
    """Return GPT-2's table: each printable character that spells a byte-level vocabulary, and the byte it means."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(256 + rank): byte for rank, byte in enumerate(others)}


_BYTES = byte_of_character()


def _token_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        return token.encode()  # an added token, spelled as it is


class _ByteLevelStream:
    def __init__(self, backend: tokenizers.Tokenizer, skipped: frozenset[int]) -> None:
        self._token: Callable[[int], str | None] = backend.id_to_token
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, index: int) -> str:
        if index in self._skipped or (token := self._token(index)) is None:
            return ""
        return self._decoder.decode(_token_bytes(token))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _ByteFallbackStream:
    def __init__(self, backend: tokenizers.Tokenizer, skipped: frozenset[int], stages: list[dict[str, Any]]) -> None:
        self._token: Callable[[int], str | None] = backend.id_to_token
        self._skipped = skipped
        self._replacements = _replacements(stages)
        strip = stages[-1] if stages[-1]["type"] == "Strip" else None
        self._strip, self._strip_left = (strip["content"], strip["start"]) if strip else ("", 0)
        self._held = bytearray()

    def push(self, index: int) -> str:
        if index in self._skipped or (token := self._token(index)) is None:
            return ""
        for pattern, content in self._replacements:
            token = token.replace(pattern, content)
        if (byte := _fallback_byte(token)) is not None:
            self._held.append(byte)
            return ""
        return self._stripped(self._release() + token)

    def finish(self) -> str:
        return self._stripped(self._release())

    def _release(self) -> str:
        held, self._held = bytes(self._held), bytearray()
        try:
            return held.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(held)

    def _stripped(self, text: str) -> str:
        while self._strip_left and text:
            if not text.startswith(self._strip):
                self._strip_left = 0
                break
            text = text[len(self._strip) :]
            self._strip_left -= 1
        return text


def _replacements(stages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(stage["pattern"]["String"], stage["content"]) for stage in stages if stage["type"] == "Replace"]


def _fallback_bytes(token: str, replacements: list[tuple[str, str]]) -> bytes:
    for pattern, content in replacements:
        token = token.replace(pattern, content)
    byte = _fallback_byte(token)
    return token.encode() if byte is None else bytes([byte])


_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _fallback_byte(token: str) -> int | None:
    match = _FALLBACK.fullmatch(token)
    return int(match[1], 16) if match else None


class _WholeStream:
    def __init__(self, backend: tokenizers.Tokenizer, skipped: frozenset[int]) -> None:
        self._backend, self._skipped = backend, skipped
        self._ids: list[int] = []
        self._given = 0

    def push(self, index: int) -> str:
        if index in self._skipped:
            return ""
        self._ids.append(index)
        return self._advance(self._backend.decode(self._ids, skip_special_tokens=False).rstrip("\ufffd"))

    def finish(self) -> str:
        return self._advance(self._backend.decode(self._ids, skip_special_tokens=False))

    def _advance(self, text: str) -> str:
        new = text[self._given :]
        self._given = max(self._given, len(text))
        return new
