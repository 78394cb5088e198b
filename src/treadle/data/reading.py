"""Sources as blocks of about a mebibyte: the unit that is tokenized, written and gone on from.

Where a block ends depends on the sources and the settings alone, never on how many processes tokenize.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from treadle.config import Settings, UserError
from treadle.config.errors import nearest
from treadle.data.sources import Source, documents_of, shown
from treadle.data.streams import Stream, format_of, open_stream

BLOCK_BYTES = 1 << 20
BLOCK_PIECES = 4096
# A document is tokenized in parts only where that cannot be seen in the tokens; up to this size it is kept in memory
# to look for such a place, beyond it is cut in any case, and counted.
MAX_PART_BYTES = 16 << 20
MAX_RECORD_BYTES = 64 << 20
CUT_WINDOW = 1024
CUTS_TRIED = 12
CHAT_FIELDS = ("messages", "conversations")

# Answers whether the tokens of left + right are those of left and those of right.
SafeCut = Callable[[str, str], bool]


class ReadSettings(Settings):
    """How the bytes of a source become documents."""

    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    text_field: str = "text"
    separator: str | None = None
    document_bytes: int | None = None


class Cursor(Settings):
    """A place in the sources: so many whole files, and `offset` (bytes, or a row group) and `record` in the next one.

    `digest` is that of the document which the place lies within, or "".
    """

    file: int = 0
    offset: int = 0
    record: int = 0
    digest: str = ""


@dataclass(frozen=True)
class Piece:
    """Bytes of one file: a text document or a part of one, or records as JSON, one a line.

    `record` is the number of the first line. A part of a document `continues` one, has `more` to come, or both; then
    `digest` is that of the whole. `forced` says that the cut after it may show in the tokens.
    """

    kind: Literal["text", "lines"]
    name: str
    data: bytes
    record: int = 0
    continues: bool = False
    more: bool = False
    digest: str = ""
    forced: bool = False


@dataclass
class Block:
    """Some pieces in order. `cursor` is the place after them, `position` the bytes of the sources before it."""

    cursor: Cursor
    pieces: list[Piece] = field(default_factory=list)
    position: int = 0
    skipped: list[str] = field(default_factory=list)
    size: int = 0


def read_blocks(
    found: Sequence[Source], settings: ReadSettings, start: Cursor = Cursor(), safe_cut: SafeCut | None = None
) -> Iterator[Block]:
    """Yield the sources from `start` on as blocks; the same from any start that an earlier block gave as its cursor.

    Raises UserError for a source that cannot be read, and for a binary one that the user named.
    """
    before = sum(source.bytes or 0 for source in found[: start.file])
    block = Block(cursor=start)
    for index in range(start.file, len(found)):
        source = found[index]
        at = start if index == start.file else Cursor(file=index)
        for piece, cursor, position in _pieces(source, settings, at, safe_cut or (lambda left, right: True)):
            if piece is None:
                block.skipped.append(shown(source.name))
                continue
            block.pieces.append(piece)
            block.size += len(piece.data)
            if block.size >= BLOCK_BYTES or len(block.pieces) >= BLOCK_PIECES:
                block.cursor, block.position = cursor, before + position
                yield block
                block = Block(cursor=cursor)
        before += source.bytes or 0
        block.cursor, block.position = Cursor(file=index + 1), before
    if block.pieces or block.skipped:
        yield block


# A piece (None: the file is skipped), the place after it, and how far the file was read.
_Step = tuple[Piece | None, Cursor, int]


def _pieces(source: Source, settings: ReadSettings, at: Cursor, safe_cut: SafeCut) -> Iterator[_Step]:
    if source.part is not None:
        rest = itertools.islice(documents_of(source), at.record, None)
        lines = (_record_line(document, settings.text_field, source) for document in rest)
        yield from _record_pieces(source, lines, at, 0)
        return
    with open_stream(source) as stream:
        kind = format_of(source, stream, settings.format)
        if kind == "binary":
            if source.named:
                raise UserError(
                    f"{source.name} is not text but binary, or not in UTF-8; leave it out, or convert it "
                    "(iconv -t UTF-8)"
                )
            yield None, at, 0
        elif kind == "jsonl":
            yield from _json_lines(source, stream, at)
        elif kind == "parquet":
            yield from _parquet(source, stream, settings, at)
        elif settings.separator or settings.document_bytes:
            yield from _cut_documents(source, stream, settings, at)
        else:
            yield from _whole_text(source, stream, at, safe_cut)


def _whole_text(source: Source, stream: Stream, at: Cursor, safe_cut: SafeCut) -> Iterator[_Step]:
    """One document, in parts where it is long."""
    stream.skip(at.offset)
    offset, digest = at.offset, at.digest
    data = stream.read(BLOCK_BYTES + CUT_WINDOW)
    if not offset and len(data) <= BLOCK_BYTES:
        yield Piece("text", source.name, data), Cursor(file=at.file + 1), stream.raw_position
        return
    digest = digest or _digest_of(source)
    wanted = BLOCK_BYTES
    while True:
        ended = len(data) < wanted + CUT_WINDOW
        cut, forced = (len(data), False) if ended else _find_cut(data, safe_cut)
        if not cut:
            wanted *= 2
            data += stream.read(wanted + CUT_WINDOW - len(data))
            continue
        piece = Piece("text", source.name, data[:cut], 0, offset > 0, not ended, digest, forced)
        offset += cut
        data = data[cut:]
        after = Cursor(file=at.file + 1) if ended else Cursor(file=at.file, offset=offset, digest=digest)
        yield piece, after, stream.raw_position
        if ended:
            return
        wanted = BLOCK_BYTES
        data += stream.read(wanted + CUT_WINDOW - len(data))


def _digest_of(source: Source) -> str:
    hasher = hashlib.sha256()
    with open_stream(source) as stream:
        while part := stream.read(1 << 20):
            hasher.update(part)
    return hasher.hexdigest()


def _find_cut(data: bytes, safe_cut: SafeCut) -> tuple[int, bool]:
    """Return (where to cut `data`, whether it may show); 0 where more data should be read first."""
    half = len(data) // 2
    last = len(data) - CUT_WINDOW
    for pattern in (rb"\n(?=\S)", rb"[^\s](?= \S)"):
        places = [match.end() for match in re.finditer(pattern, data[half : last + 1])]
        for place in reversed(places[-CUTS_TRIED:]):
            cut = half + place
            left = data[cut - CUT_WINDOW : cut].decode("utf-8", "ignore")
            right = data[cut : cut + CUT_WINDOW].decode("utf-8", "ignore")
            if safe_cut(left, right):
                return cut, False
    if last < MAX_PART_BYTES:
        return 0, False
    cut = data.rfind(b"\n", half, last) + 1 or data.rfind(b" ", half, last) or last
    return _character_start(data, cut if cut > 0 else last), True


def _character_start(data: bytes, place: int) -> int:
    """Return the place, or the one of up to three bytes before it that it lies within a UTF-8 character of."""
    for start in range(place, max(place - 4, 0), -1):
        if data[start] & 0xC0 != 0x80:
            return start
    return place


def _cut_documents(source: Source, stream: Stream, settings: ReadSettings, at: Cursor) -> Iterator[_Step]:
    """Documents as a separator or a size divides them."""
    stream.skip(at.offset)
    separator = (settings.separator or "").encode()
    offset, data, begin, ended = at.offset, b"", 0, False
    while begin < len(data) or not ended:
        cut = _document_end(data, begin, separator, settings.document_bytes, ended)
        if cut is None:
            part = stream.read(max(BLOCK_BYTES, settings.document_bytes or 0))
            ended = not part
            data, begin = data[begin:] + part, 0
            continue
        end, following, forced = cut
        offset += following - begin
        piece = Piece("text", source.name, data[begin:end], forced=forced)
        yield piece, Cursor(file=at.file, offset=offset), stream.raw_position
        begin = following


def _document_end(
    data: bytes, begin: int, separator: bytes, size: int | None, ended: bool
) -> tuple[int, int, bool] | None:
    """Return (where the document at `begin` ends, where the next begins, was it too long), or None: read on."""
    if separator:
        place = data.find(separator, begin)
        if place >= 0:
            return place, place + len(separator), False
    elif size is not None and len(data) - begin > size:
        place = data.find(b"\n", begin + size - 1)
        if place >= 0:
            return place + 1, place + 1, False
    if ended:
        return len(data), len(data), False
    if len(data) - begin > MAX_RECORD_BYTES:
        cut = _character_start(data, begin + MAX_RECORD_BYTES)
        return cut, cut, True
    return None


def _json_lines(source: Source, stream: Stream, at: Cursor) -> Iterator[_Step]:
    stream.skip(at.offset)
    offset, record, data = at.offset, at.record, b""
    while True:
        part = stream.read(BLOCK_BYTES)
        data += part
        cut = data.rfind(b"\n") + 1 if part else len(data)
        if not cut and part:
            if len(data) > MAX_RECORD_BYTES:
                raise UserError(
                    f"{source.name}: line {record + 1} is longer than {MAX_RECORD_BYTES >> 20} MiB; "
                    "is it JSON with one record a line?"
                )
            continue
        if cut:
            piece = Piece("lines", source.name, data[:cut], record)
            offset += cut
            record += piece.data.count(b"\n")
            data = data[cut:]
            yield piece, Cursor(file=at.file, offset=offset, record=record), stream.raw_position
        if not part:
            return


def _parquet(source: Source, stream: Stream, settings: ReadSettings, at: Cursor) -> Iterator[_Step]:
    import pyarrow
    import pyarrow.parquet

    if stream.compression is not None:
        raise UserError(f"{source.name} is a compressed Parquet file; decompress it first (Parquet compresses inside)")
    stream.raw.seek(0)
    try:
        file = pyarrow.parquet.ParquetFile(stream.raw)
        columns = _columns(source, file.schema_arrow.names, settings.text_field)
        first_row = 0
        for group in range(file.num_row_groups):
            rows_after = first_row + file.metadata.row_group(group).num_rows
            if group >= at.offset:
                skip = at.record - first_row if group == at.offset and at.record else 0
                rows = _parquet_rows(file, group, columns, skip)
                lines = (_record_line(row, settings.text_field, source) for row in rows)
                here = Cursor(file=at.file, offset=group, record=first_row + skip)
                yield from _record_pieces(source, lines, here, (source.bytes or 0) * group // file.num_row_groups)
            first_row = rows_after
    except pyarrow.ArrowException as error:
        raise UserError(f"{source.name} is not a Parquet file that can be read: {error}") from error


def _parquet_rows(file: Any, group: int, columns: list[str], skip: int) -> Iterator[dict[str, Any]]:
    for batch in file.iter_batches(batch_size=512, row_groups=[group], columns=columns):
        if skip >= batch.num_rows:
            skip -= batch.num_rows
            continue
        yield from batch.slice(skip).to_pylist()
        skip = 0


def _columns(source: Source, names: list[str], text_field: str) -> list[str]:
    """Return the columns to read: the chat where there is one, else the text."""
    chat = [name for name in CHAT_FIELDS if name in names]
    if chat and text_field not in names:
        return chat[:1]
    if text_field not in names:
        raise UserError(
            f"{source.name} has no column '{text_field}'{nearest(text_field, names)}; it has {', '.join(names)}: "
            "choose one with --text-field"
        )
    return [text_field]


def _record_pieces(source: Source, lines: Iterable[bytes], at: Cursor, position: int) -> Iterator[_Step]:
    """Join lines of JSON to pieces of about a block."""
    joined: list[bytes] = []
    size, record = 0, at.record
    for line in lines:
        joined.append(line)
        size += len(line)
        if size >= BLOCK_BYTES:
            piece = Piece("lines", source.name, b"".join(joined), record)
            record += len(joined)
            yield piece, Cursor(file=at.file, offset=at.offset, record=record), position
            joined, size = [], 0
    if joined:
        piece = Piece("lines", source.name, b"".join(joined), record)
        yield piece, Cursor(file=at.file, offset=at.offset, record=record + len(joined)), position


def _record_line(document: str | Mapping[str, Any], text_field: str, source: Source) -> bytes:
    if isinstance(document, str):
        document = {text_field: document}
    try:
        return json.dumps(document).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise UserError(f"{source.name} gave a document that is neither a text nor plain data: {error}") from error
