"""One safetensors file: a header that is checked before it is believed, the mapped tensors, and a writer.

The format: eight bytes that give the header's length, a JSON header that gives each tensor's dtype, shape and place,
then the tensors without gaps (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor

from treadle.config import UserError
from treadle.config.errors import shortened

MAX_HEADER_BYTES = 100 << 20  # the format's own limit
MAX_DIMS = 16
# Bits of one element of each dtype that the format knows.
BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8}
BITS |= {"I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64}
BITS |= {"C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
DTYPES |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
DTYPES |= {"BOOL": torch.bool}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: `begin` and `end` are bytes counted from the file's start."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """A mapped file. Safe to read from many threads."""

    def __init__(self, path: str | Path) -> None:
        """Map the file and check its header. Raises UserError naming the file and the tensor that is wrong."""
        self.path = Path(path)
        if not self.path.is_file():
            raise UserError(f"{self.path} is missing; download the model again")
        try:
            with self.path.open("rb") as file:
                size = self.path.stat().st_size
                if size < 8:
                    self._fail("is too short to be a safetensors file")
                # Copy on write: torch wants memory that it may write to; the file itself never changes.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {error.strerror or error}") from error
        self.entries: dict[str, Entry] = {}
        self.metadata: dict[str, str] = {}
        self._read_header(size)

    def _fail(self, problem: str) -> NoReturn:
        raise UserError(f"{self.path} {problem}; the file is damaged, download or copy it again")

    def _read_header(self, size: int) -> None:
        length = int.from_bytes(self._map[:8], "little")
        if length > min(size - 8, MAX_HEADER_BYTES):
            self._fail(f"says that its header has {length} bytes, the file has {size}")
        try:
            header = json.loads(self._map[8 : 8 + length], object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            self._fail(f"has a header that is not valid JSON ({error})")
        if not isinstance(header, dict):
            self._fail("has a header that is not a JSON object")
        metadata = header.pop("__metadata__", {})
        if isinstance(metadata, dict):
            self.metadata = {str(key): str(value) for key, value in metadata.items()}
        start = 8 + length
        for name, given in header.items():
            self.entries[name] = self._entry(name, given, start)
        self._check_places(start, size)

    def _entry(self, name: str, given: Any, start: int) -> Entry:
        what = f"has a header that lies about tensor '{shortened(name)}'"
        if not isinstance(given, dict) or set(given) != {"dtype", "shape", "data_offsets"}:
            self._fail(f"{what} (it needs dtype, shape and data_offsets)")
        dtype, shape, offsets = given["dtype"], given["shape"], given["data_offsets"]
        if not isinstance(dtype, str) or dtype not in BITS:
            self._fail(f"has tensor '{shortened(name)}' of the unknown dtype {shortened(repr(dtype))}")
        if not _whole_numbers(shape) or len(shape) > MAX_DIMS:
            self._fail(f"{what} (its shape is {shortened(repr(shape))})")
        if not _whole_numbers(offsets) or len(offsets) != 2:
            self._fail(f"{what} (its offsets are {shortened(repr(offsets))})")
        begin, end = offsets
        bits = math.prod(shape) * BITS[dtype]
        if begin > end or (end - begin) * 8 != bits:
            self._fail(f"{what} (shape {shape} of {dtype} is {bits / 8:g} bytes, its place has {end - begin})")
        return Entry(dtype, tuple(shape), start + begin, start + end)

    def _check_places(self, start: int, size: int) -> None:
        """The tensors must fill the file without gaps and without lying on top of one another."""
        end, previous = start, ""
        for name, entry in sorted(self.entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            if entry.end > size:
                raise UserError(
                    f"{self.path} is cut short: tensor '{shortened(name)}' ends at byte {entry.end}, "
                    f"the file at {size}; download or copy it again"
                )
            if entry.begin < end:
                self._fail(f"has a header that lies: tensor '{shortened(name)}' overlaps '{shortened(previous)}'")
            if entry.begin > end:
                self._fail(f"has a header that lies: {entry.begin - end} bytes before '{shortened(name)}' are nobody's")
            end, previous = entry.end, name
        if end != size:
            self._fail(f"has {size - end} bytes after its last tensor")

    def read(self, name: str) -> Tensor:
        """Return a tensor as a view of the mapped file (a copy where it lies at an odd address)."""
        entry = self.entries[name]
        dtype = DTYPES[entry.dtype]
        count = math.prod(entry.shape)
        if count == 0:
            return torch.empty(entry.shape, dtype=dtype)
        if entry.begin % dtype.itemsize:
            raw = torch.frombuffer(self._map, dtype=torch.uint8, count=entry.end - entry.begin, offset=entry.begin)
            return raw.clone().view(dtype).reshape(entry.shape)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=entry.begin).reshape(entry.shape)

    def release(self, name: str) -> None:
        """Give back the memory of the pages that only this tensor lies on; they are read again if asked for again."""
        entry, page = self.entries[name], mmap.PAGESIZE
        begin, end = -(-entry.begin // page) * page, entry.end // page * page
        if end > begin and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)


class SafetensorsWriter:
    """Writes a file tensor by tensor, in any order, so that only one needs to be in memory.

        with SafetensorsWriter(path, torch.bfloat16, {"a": (2, 3), "b": (4,)}) as writer:
            writer.write("b", b)
            writer.write("a", a)

    Raises ValueError for a tensor that was not announced, has another shape, comes twice, or never came: the shapes
    are the caller's own. Making the file appear whole or not at all is the caller's business (config.files).
    """

    def __init__(
        self,
        path: str | Path,
        dtype: torch.dtype,
        shapes: Mapping[str, Sequence[int]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.path, self.dtype = Path(path), dtype
        header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
        ends = itertools.accumulate((math.prod(shape) * dtype.itemsize for shape in shapes.values()), initial=0)
        for (name, shape), (begin, end) in zip(shapes.items(), itertools.pairwise(ends), strict=True):
            header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # so that the tensors begin at a multiple of 8
        self._places = {
            name: (8 + len(text) + header[name]["data_offsets"][0], tuple(shape)) for name, shape in shapes.items()
        }
        self._file = self.path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor, converted to the file's dtype."""
        if name not in self._places:
            raise ValueError(f"tensor '{name}' was not announced for {self.path}, or is written twice")
        place, shape = self._places.pop(name)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"tensor '{name}' has shape {list(tensor.shape)}, {list(shape)} was announced")
        whole = tensor.detach().to("cpu", self.dtype).contiguous()
        self._file.seek(place)
        self._file.write(whole.reshape(-1).view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Finish the file. Raises ValueError naming the tensors that never came."""
        self._file.close()
        if self._places:
            raise ValueError(f"{self.path} lacks {', '.join(self._places)}")

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._file.close()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"'{shortened(twice)}' is given twice")
    return found


def _whole_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 62 for value in values)
