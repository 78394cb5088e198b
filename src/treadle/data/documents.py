"""From the bytes of a block to tokens: decoding, records, chats, train or validation, BOS and EOS."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from treadle.config import Settings, UserError
from treadle.config.errors import nearest
from treadle.data.reading import CHAT_FIELDS, Piece
from treadle.data.shards import token_dtype
from treadle.data.sources import shown
from treadle.data.writer import TokenizedDocuments

if TYPE_CHECKING:
    from treadle.model.tokenizer import Tokenizer

NAMES_KEPT = 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# ShareGPT's names for who speaks.
SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}


class TokenizeSettings(Settings):
    """How documents become tokens."""

    text_field: str = "text"
    validation: float = 0.01
    invalid_utf8: Literal["replace", "skip", "error"] = "replace"
    bad_records: Literal["error", "skip"] = "error"
    bos_id: int | None = None
    eos_id: int | None = None


class Counts(Settings):
    """What was met on the way, with the first names of each kind."""

    empty: int = 0
    invalid_utf8: int = 0
    bad_records: int = 0
    forced_cuts: int = 0
    chats: int = 0
    names: dict[str, list[str]] = {}

    def plus(self, other: Counts) -> Counts:
        """Return the sum."""
        names = {
            kind: [*self.names.get(kind, []), *other.names.get(kind, [])][:NAMES_KEPT]
            for kind in sorted(self.names.keys() | other.names.keys())
        }
        numbers = {key: getattr(self, key) + getattr(other, key) for key in type(self).model_fields if key != "names"}
        return Counts(**numbers, names=names)


@dataclass
class TokenizedBlock:
    """The documents of a block by split, and what was met."""

    splits: dict[str, TokenizedDocuments]
    counts: Counts


@dataclass
class _Document:
    """A text, a part of one, or a chat; `digest` decides its split."""

    text: str
    name: str
    digest: bytes
    messages: list[dict[str, Any]] | None = None
    continues: bool = False
    more: bool = False


@dataclass
class _Met:
    numbers: dict[str, int] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)

    def note(self, kind: str, name: str = "") -> None:
        self.numbers[kind] = self.numbers.get(kind, 0) + 1
        kept = self.names.setdefault(kind, []) if name else None
        if kept is not None and len(kept) < NAMES_KEPT:
            kept.append(shown(name))

    def counts(self) -> Counts:
        return Counts(**self.numbers, names=self.names)


def split_of(digest: bytes, validation: float) -> str:
    """Return the split of a document by its content alone, so that order, names and other documents do not matter."""
    return "validation" if int.from_bytes(digest[:8], "big") < validation * 2.0**64 else "train"


def threshold(validation: float, digests: Iterator[bytes]) -> float:
    """Return the share to hold out so that something is: `validation`, or in a small corpus enough for one document.

    Reads `digests` until one falls to validation, so in a corpus of any size about 1 / `validation` of them. Where none
    does, the smallest takes that part, unless there is only one document.
    """
    if not validation:
        return validation
    seen: set[bytes] = set()
    for digest in digests:
        if split_of(digest, validation) == "validation":
            return validation
        seen = set(sorted({*seen, digest})[:2])
    if len(seen) < 2:
        return validation
    return math.nextafter(int.from_bytes(min(seen)[:8], "big") / 2.0**64, 1.0)


def digests_of(pieces: list[Piece], settings: TokenizeSettings) -> Iterator[bytes]:
    """Yield what decides the split of each document of these pieces."""
    for document in _documents(pieces, settings, _Met()):
        yield document.digest


def texts_of(pieces: list[Piece], settings: TokenizeSettings) -> Iterator[tuple[str, str]]:
    """Yield (split, text) of each document of these pieces; what a tokenizer is trained on."""
    met = _Met()
    for document in _documents(pieces, settings, met):
        text = document.text
        if document.messages is not None:
            text = "\n".join(str(message.get("content")) for message in document.messages)
        yield split_of(document.digest, settings.validation), text


def tokenize(pieces: list[Piece], settings: TokenizeSettings, tokenizer: Tokenizer) -> TokenizedBlock:
    """Return the tokens of the pieces' documents. Raises UserError naming the file and line of one that is refused."""
    met = _Met()
    documents = list(_documents(pieces, settings, met))
    plain = [document.text for document in documents if document.messages is None]
    encoded = iter(tokenizer.encode_batch(plain, special_tokens=False, parse_special=False))
    dtype = token_dtype(tokenizer.vocabulary_size)
    parts: dict[str, list[tuple[_Document, NDArray, NDArray | None]]] = {"train": [], "validation": []}
    for document in documents:
        mask = None
        if document.messages is None:
            ids = np.array(_framed(next(encoded), document, settings), dtype)
        else:
            ids, mask = _chat(document, document.messages, tokenizer, settings, met)
        if len(ids):
            parts[split_of(document.digest, settings.validation)].append((document, ids, mask))
    splits = {name: _joined(found, dtype) for name, found in parts.items() if found}
    return TokenizedBlock(splits, met.counts())


def _framed(ids: list[int], document: _Document, settings: TokenizeSettings) -> list[int]:
    if settings.bos_id is not None and not document.continues:
        ids.insert(0, settings.bos_id)
    if settings.eos_id is not None and not document.more:
        ids.append(settings.eos_id)
    return ids


def _chat(
    document: _Document, messages: list[dict[str, Any]], tokenizer: Tokenizer, settings: TokenizeSettings, met: _Met
) -> tuple[NDArray, NDArray]:
    from treadle.model.chat_answers import encode_chat_with_answers

    if tokenizer.chat_template is None:
        raise UserError(
            f"{document.name} is a chat, but the tokenizer has no chat template; give --tokenizer one that has"
        )
    try:
        ids, answers = encode_chat_with_answers(tokenizer, messages)
    except UserError as error:
        if settings.bad_records == "error":
            raise UserError(f"{document.name}: {error}") from error
        met.note("bad_records", document.name)
        ids, answers = [], []
    else:
        met.note("chats")
    return np.array(ids, np.int64), np.array(answers, np.uint8)


def _joined(found: list[tuple[_Document, NDArray, NDArray | None]], dtype: str) -> TokenizedDocuments:
    mask = None
    if any(m is not None for _, _, m in found):
        mask = np.concatenate([np.ones(len(ids), np.uint8) if m is None else m for _, ids, m in found])
    lengths: list[int] = []
    text_bytes = words = 0
    for number, (document, ids, _) in enumerate(found):
        if document.continues and number:
            lengths[-1] += len(ids)
        else:
            lengths.append(len(ids))
        messages = document.messages
        for text in [document.text] if messages is None else [str(m.get("content") or "") for m in messages]:
            text_bytes += len(text.encode(errors="replace"))
            words += len(text.split())
    return TokenizedDocuments(
        tokens=np.concatenate([ids for _, ids, _ in found]).astype(dtype),
        lengths=np.array(lengths, np.int64),
        mask=mask,
        continues=found[0][0].continues,
        text_bytes=text_bytes,
        words=words,
    )


def _documents(pieces: list[Piece], settings: TokenizeSettings, met: _Met) -> Iterator[_Document]:
    for piece in pieces:
        if piece.kind == "lines":
            yield from _records(piece, settings, met)
        else:
            if piece.forced:
                met.note("forced_cuts", piece.name)
            data = piece.data if piece.continues else piece.data.removeprefix(BYTE_ORDER_MARK)
            text = _decoded(data, piece.name, settings, met, part=bool(piece.digest))
            if text is None:
                continue
            if not text.strip() and not piece.digest:
                met.note("empty", piece.name)
                continue
            digest = bytes.fromhex(piece.digest) if piece.digest else hashlib.sha256(data).digest()
            yield _Document(text, piece.name, digest, continues=piece.continues, more=piece.more)


def _decoded(data: bytes, name: str, settings: TokenizeSettings, met: _Met, part: bool = False) -> str | None:
    """Return the text, or None where it is skipped; a part of a document is not, the rest would be out of place."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        met.note("invalid_utf8", name)
        if settings.invalid_utf8 == "error":
            raise UserError(
                f"{name} is not valid UTF-8 (byte {data[error.start]:#04x} at {error.start}); convert it, or choose "
                "--invalid-utf8 replace or skip"
            ) from None
        return data.decode(errors="replace") if settings.invalid_utf8 == "replace" or part else None


def _records(piece: Piece, settings: TokenizeSettings, met: _Met) -> Iterator[_Document]:
    data = piece.data if piece.record else piece.data.removeprefix(BYTE_ORDER_MARK)
    for number, line in enumerate(data.split(b"\n"), start=piece.record + 1):
        if not line.strip():
            continue
        name = f"{piece.name} line {number}"
        text = _decoded(line, name, settings, met)
        if text is None:
            continue
        try:
            document = _record(text, name, settings, met)
        except UserError:
            if settings.bad_records == "error":
                raise
            met.note("bad_records", name)
            continue
        if document is not None:
            yield document


def _record(line: str, name: str, settings: TokenizeSettings, met: _Met) -> _Document | None:
    way_out = "; repair it, or add --bad-records skip"
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} is not valid JSON: {error}{way_out}") from None
    if not isinstance(record, dict):
        raise UserError(f"{name} is JSON, but not an object with a field '{settings.text_field}'{way_out}")
    if settings.text_field not in record:
        for chat_field in CHAT_FIELDS:
            if chat_field in record:
                return _chat_document(record[chat_field], name, settings, met)
        known = [key for key in record if isinstance(record[key], str)]
        hint = nearest(settings.text_field, known) or (f"; its text fields are {', '.join(known)}" if known else "")
        raise UserError(f"{name} has no field '{settings.text_field}'{hint}: choose one with --text-field")
    text = record[settings.text_field]
    if text is None or (isinstance(text, str) and not text.strip()):
        met.note("empty", name)
        return None
    if not isinstance(text, str):
        raise UserError(f"{name}: the field '{settings.text_field}' is a {type(text).__name__}, not a text{way_out}")
    data = text.encode("utf-8", "surrogatepass")
    try:
        data.decode()
    except UnicodeDecodeError:
        # JSON can spell half of a surrogate pair, which no text holds.
        cleaned = _decoded(data, name, settings, met)
        if cleaned is None:
            return None
        text, data = cleaned, cleaned.encode()
    return _Document(text, name, hashlib.sha256(data).digest())


def _chat_document(turns: Any, name: str, settings: TokenizeSettings, met: _Met) -> _Document | None:
    """Return a chat in either of the two usual forms: role and content, or ShareGPT's from and value."""
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        raise UserError(f"{name}: the chat is not a list of messages; repair it, or add --bad-records skip")
    messages = []
    for turn in turns:
        if "role" in turn:
            messages.append(turn)
        elif turn.get("from") in SPEAKERS and isinstance(turn.get("value"), str):
            messages.append({"role": SPEAKERS[turn["from"]], "content": turn["value"]})
        else:
            raise UserError(
                f"{name}: a message has neither 'role' and 'content' nor 'from' and 'value'; repair it, or add "
                "--bad-records skip"
            )
    canonical = json.dumps(messages, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")
    cleaned = _decoded(canonical, name, settings, met)
    if cleaned is None:
        return None
    data = cleaned.encode()
    return _Document("", name, hashlib.sha256(data).digest(), messages if data == canonical else json.loads(data))
