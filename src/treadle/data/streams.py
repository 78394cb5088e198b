"""Opening a source as a stream of bytes: local or remote, decompressed, and what its contents are."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Generator
from pathlib import PurePosixPath
from typing import Any, BinaryIO, Literal

import zstandard

from treadle.config import UserError
from treadle.data.sources import Source

Format = Literal["text", "jsonl", "parquet", "binary"]
SNIFFED_BYTES = 1 << 16
COMPRESSED = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".lzma": "xz", ".zst": "zstd", ".zstd": "zstd"}
MAGIC = {rb"\x1f\x8b": "gzip", rb"BZh[1-9]1AY&SY": "bzip2", rb"\xfd7zXZ\0": "xz", rb"\x28\xb5\x2f\xfd": "zstd"}
FORMATS: dict[str, Format] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".pq": "parquet"}
BINARY_MAGIC = (b"%PDF-", b"PK\x03\x04", b"\x89PNG", b"\x7fELF", b"Rar!", b"7z\xbc\xaf\x27\x1c")
# More than this share of bytes that no text has: it is no text.
BINARY_SHARE = 0.3
DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, zstandard.ZstdError)


class Stream:
    """A source opened for reading. `raw_position` counts bytes as they lie in the file, before decompression."""

    def __init__(self, source: Source, raw: BinaryIO, data: BinaryIO, start: bytes, compression: str | None) -> None:
        """Use `open_stream`."""
        self.source, self.raw, self.start, self.compression = source, raw, start, compression
        self._data = data

    def read(self, count: int) -> bytes:
        """Return up to `count` bytes, fewer only at the end. Raises UserError naming a damaged file."""
        if self.start:
            ready, self.start = self.start[:count], self.start[count:]
            return ready if len(ready) == count else ready + self.read(count - len(ready))
        parts, missing = [], count
        with readable(self.source):
            while missing and (part := self._data.read(missing)):
                parts.append(part)
                missing -= len(part)
        return b"".join(parts)

    def skip(self, count: int) -> None:
        """Go forward by `count` decompressed bytes."""
        if self.compression is None and count > len(self.start):
            with readable(self.source):
                self._data.seek(count - len(self.start), io.SEEK_CUR)
            self.start = b""
            return
        while count > 0:
            passed = len(self.read(min(count, 1 << 20)))
            if not passed:
                return
            count -= passed

    @property
    def raw_position(self) -> int:
        with contextlib.suppress(OSError, ValueError):
            return self.raw.tell()
        return 0


@contextlib.contextmanager
def open_stream(source: Source) -> Generator[Stream]:
    """Yield the source opened, its first bytes looked at. Raises UserError naming a file that cannot be read."""
    with readable(source), _open(source) as raw:
        start = raw.read(SNIFFED_BYTES)
        compression = next((kind for magic, kind in MAGIC.items() if re.match(magic, start)), None)
        if compression is None and _suffixes(source)[-1:] and _suffixes(source)[-1] in COMPRESSED and start:
            kind = COMPRESSED[_suffixes(source)[-1]]
            raise UserError(f"{source.name} is named as {kind} data but is none; rename it or leave it out")
        if compression is None:
            yield Stream(source, raw, raw, start, None)
        else:
            raw.seek(0)
            data = _decompressed(raw, compression)
            yield Stream(source, raw, data, data.read(SNIFFED_BYTES), compression)


def format_of(source: Source, stream: Stream, chosen: str = "auto") -> Format:
    """Return the format of a source by its name, or by what it begins with, unless one is `chosen`.

    Raises UserError for a single JSON array that the user named: it is neither text to learn nor records to stream.
    """
    suffix = next((suffix for suffix in reversed(_suffixes(source)) if suffix not in COMPRESSED), "")
    if chosen in ("jsonl", "parquet"):
        return chosen  # pyrefly: ignore
    if chosen == "auto":
        if suffix in FORMATS:
            return FORMATS[suffix]
        if stream.start.startswith(b"PAR1"):
            return "parquet"
        if suffix == ".json" and re.match(rb"\s*\{[^\n]*\}\r?\n\s*\{", stream.start):
            return "jsonl"
        if suffix == ".json" and source.named and re.match(rb"\s*\[\s*\{", stream.start):
            raise UserError(
                f"{source.name} is one JSON array; write it with one record a line "
                f"(jq -c '.[]' {source.name} > records.jsonl), or add --format text to learn it as it is"
            )
    return "binary" if is_binary(stream.start) else "text"


def is_binary(start: bytes) -> bool:
    """Return whether these first bytes of a file are something else than text in UTF-8 or a relative of ASCII."""
    if b"\0" in start or start.startswith(BINARY_MAGIC):
        return True
    if not start:
        return False
    decoded = start.decode("utf-8", "replace")
    odd = sum(decoded.count(chr(code)) for code in (0xFFFD, *range(1, 8), *range(14, 27), *range(28, 32)))
    return odd > BINARY_SHARE * len(decoded)


@contextlib.contextmanager
def readable(source: Source) -> Generator[None]:
    """Turn what goes wrong while reading into one sentence that names the source."""
    try:
        yield
    except DAMAGED as error:
        raise UserError(
            f"{source.name} is damaged or cut short ({error or type(error).__name__}); fetch it again or leave it out"
        ) from error
    except FileNotFoundError as error:
        raise UserError(f"{source.name} is gone; it was there when the preparation started") from error
    except OSError as error:
        raise UserError(f"{source.name} cannot be read: {error.strerror or error}") from error


@contextlib.contextmanager
def _open(source: Source) -> Generator[BinaryIO]:
    if "://" in source.name or "::" in source.name:
        import fsspec

        opened: Any = fsspec.open(source.name, "rb")
        with opened as file:
            yield file
    else:
        with open(source.name, "rb", buffering=1 << 16) as file:
            yield file


def _suffixes(source: Source) -> list[str]:
    return [suffix.lower() for suffix in PurePosixPath(source.name.split("::")[0]).suffixes[-2:]]


def _decompressed(raw: BinaryIO, compression: str) -> BinaryIO:
    if compression == "gzip":
        return gzip.GzipFile(fileobj=raw, mode="rb")  # pyrefly: ignore
    if compression == "bzip2":
        return bz2.BZ2File(raw)  # pyrefly: ignore
    if compression == "xz":
        return lzma.LZMAFile(raw)  # pyrefly: ignore
    return io.BufferedReader(_Zstandard(raw), buffer_size=1 << 17)  # pyrefly: ignore


class _Zstandard(io.RawIOBase):
    """Frames of Zstandard one after another. The package's own reader takes a file that is cut short for its end."""

    def __init__(self, raw: BinaryIO) -> None:
        self.raw = raw
        self.frame: Any = None
        self.input = b""
        self.ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.ready:
            if not self.input:
                # Four bytes may stand for a block of 128 KiB: fed in small pieces, they stay bounded in memory.
                self.input = self.raw.read(512)
                if not self.input:
                    if self.frame is not None:
                        raise EOFError("the Zstandard frame has no end")
                    return 0
            if self.frame is None:
                self.frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
            self.ready = memoryview(self.frame.decompress(self.input))
            self.input = b""
            if self.frame.eof:
                self.input, self.frame = self.frame.unused_data, None
        count = min(len(buffer), len(self.ready))
        buffer[:count] = self.ready[:count]
        self.ready = self.ready[count:]
        return count
