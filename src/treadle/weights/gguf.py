"""Reading GGUF files (versions 2 and 3, little-endian), split ones too. Nothing in a header is believed.

    file = GgufFile.open("model.gguf")
    file.metadata["general.architecture"]
    file.read("token_embd.weight")      # fp32, dequantized
    file.raw("token_embd.weight")       # the bytes, not copied

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import itertools
import mmap
import re
import struct
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from treadle.config import UserError
from treadle.config.errors import nearest, shortened
from treadle.weights.gguf_quants import PLAIN, READABLE, TYPES, GgmlType, dequantize

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 20
MAX_NAME_BYTES = 1 << 16
MAX_STRING_BYTES = 16 << 20
MAX_ITEMS = 1 << 24
MAX_DEPTH = 4
MAX_SHARDS = 1 << 12
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 16

# Number of a metadata type: its numpy dtype; 8 is a string and 9 an array.
SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
STRING, ARRAY = 8, 9
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies: `shape` in torch's order, `offset` from the file's start; `shard` counts from 0."""

    name: str
    shape: tuple[int, ...]
    kind: GgmlType
    offset: int
    nbytes: int
    shard: int = 0

    @property
    def type(self) -> str:
        """The name of the tensor's type, such as "Q4_K"."""
        return self.kind.name


class GgufFile:
    """An open GGUF file, or the shards of a split one as if they were one. Safe to read from many threads."""

    def __init__(self, path: Path, metadata: dict[str, Any], tensors: dict[str, GgufTensor], data: list[torch.Tensor]):
        self.path, self.metadata, self.tensors, self._data = path, metadata, tensors, data

    @classmethod
    def open(cls, path: str | Path) -> GgufFile:
        """Map the file (of a split model: the first shard's path) and read its header.

        Raises UserError naming the file and the key or tensor that is wrong.
        """
        path = Path(path)
        metadata, tensors, bytes_ = _open_one(path, 0)
        data = [bytes_]
        for number, sibling in enumerate(_other_shards(path, metadata), start=1):
            more, found, bytes_ = _open_one(sibling, number)
            if more.get("split.no") != number or more.get("split.count") != metadata["split.count"]:
                raise UserError(f"{sibling} is not shard {number + 1} of {path}; download all shards again")
            for name in found:
                if name in tensors:
                    raise UserError(f"{sibling}: tensor '{name}' is in another shard too; download all shards again")
            tensors |= found
            data.append(bytes_)
        stated = metadata.get("split.tensors.count", len(tensors))
        if len(data) > 1 and stated != len(tensors):
            raise UserError(f"{path}: the shards hold {len(tensors)} tensors, the header says {stated}")
        return cls(path, metadata, tensors, data)

    def tensor(self, name: str) -> GgufTensor:
        """Return where the tensor `name` lies. Raises UserError naming the nearest one that there is."""
        if name not in self.tensors:
            raise UserError(f"{self.path} has no tensor '{name}'{nearest(name, self.tensors)}")
        return self.tensors[name]

    def check_readable(self, name: str) -> None:
        """Raise UserError where the tensor `name` is of a type that Treadle does not read."""
        tensor = self.tensor(name)
        if tensor.kind.decode is None and tensor.type not in PLAIN:
            raise UserError(
                f"{self.path}: tensor '{name}' is of type {tensor.type}, which is not supported "
                f"({', '.join(READABLE)} are); use another quantization of the model"
            )

    def raw(self, name: str) -> torch.Tensor:
        """Return the bytes of a tensor, uint8 [nbytes], as a view of the mapped file. It must not be written to."""
        tensor = self.tensor(name)
        return self._data[tensor.shard][tensor.offset : tensor.offset + tensor.nbytes]

    def read(self, name: str, dtype: torch.dtype | None = torch.float32, rows: slice | None = None) -> torch.Tensor:
        """Return a tensor dequantized to `dtype` in memory of its own; None keeps the dtype of a plain type.

        `rows` picks a contiguous part of the first dim, of which alone the bytes are read.
        Raises UserError for a type that Treadle does not read.
        """
        tensor = self.tensor(name)
        raw, shape = self.raw(name), tensor.shape
        if rows is not None and shape:
            start, stop, step = rows.indices(shape[0])
            assert step == 1, "rows must be contiguous"
            row = tensor.nbytes // shape[0]
            raw, shape = raw[start * row : max(start, stop) * row], (max(start, stop) - start, *shape[1:])
        if tensor.type in PLAIN:
            # From the bytes through numpy: their place in the file need not suit torch's alignment.
            plain = torch.from_numpy(raw.numpy().view(np.dtype(_NUMPY[tensor.type])).copy()).reshape(shape)
            return plain if dtype is None else plain.to(dtype)
        self.check_readable(name)
        out = torch.empty(shape, dtype=dtype or torch.float32)
        dequantize(raw, tensor.kind, out)
        return out


_NUMPY = {"F32": "<f4", "F64": "<f8", "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}


def _other_shards(path: Path, metadata: dict[str, Any]) -> list[Path]:
    count = metadata.get("split.count", 0)
    if not isinstance(count, int) or not 0 <= count <= MAX_SHARDS:
        raise UserError(f"{path}: key 'split.count' is {count!r}, not a number of shards")
    if count <= 1:
        return []
    match = _SHARD.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise UserError(f"{path} is one of {count} shards; give it its name back, NAME-00001-of-{count:05}.gguf")
    if metadata.get("split.no") != 0 or int(match[2]) != 1:
        raise UserError(f"{path} is not the first shard; give {match[1]}-00001-of-{match[3]}.gguf")
    return [path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf") for number in range(2, count + 1)]


def _open_one(path: Path, shard: int) -> tuple[dict[str, Any], dict[str, GgufTensor], torch.Tensor]:
    if not path.is_file():
        raise UserError(f"{path} is not a file" + ("; all shards must lie in one folder" if shard else ""))
    try:
        with path.open("rb") as file:
            head = file.read(24)
            if head[:4] == b"GGUF"[: len(head)] and len(head) < 24:
                raise UserError(f"{path} is {'cut short' if head else 'empty'}; download it again")
            if len(head) < 24:
                raise UserError(f"{path} is not a GGUF file; give another file")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    header = _Header(path, mapped)
    metadata, tensors = header.read(shard)
    with warnings.catch_warnings():  # the mapping is read-only, as `GgufFile.raw` says
        warnings.simplefilter("ignore", UserWarning)
        return metadata, tensors, torch.frombuffer(mapped, dtype=torch.uint8)


class _Header:
    """A cursor over the header; each read is checked against the file's end before anything is made of it."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.size = path, data, len(data)
        self.place, self.items = 0, 0
        self.what = "the header"

    def fail(self, problem: str) -> UserError:
        return UserError(f"{self.path}: {self.what} {problem}; the file is damaged, download it again")

    def read(self, shard: int) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        tensor_count, key_count = self._start()
        metadata: dict[str, Any] = {}
        for number in range(key_count):
            self.what = f"metadata key {number + 1} of {key_count}"
            key = self._string(MAX_NAME_BYTES)
            self.what = f"metadata key '{shortened(key)}'"
            if key in metadata:
                raise self.fail("is given twice")
            metadata[key] = self._value(self._unsigned(4), 0)
        alignment = self._alignment(metadata)
        tensors: dict[str, GgufTensor] = {}
        for number in range(tensor_count):
            self.what = f"tensor {number + 1} of {tensor_count}"
            tensor = self._tensor(shard, alignment)
            if tensor.name in tensors:
                raise self.fail("is given twice")
            tensors[tensor.name] = tensor
        return metadata, self._placed(list(tensors.values()), alignment)

    def _start(self) -> tuple[int, int]:
        magic = self.data[:4]
        if magic != b"GGUF":
            older = magic in (b"lmgg", b"fmgg", b"tjgg", b"algg")
            raise UserError(
                f"{self.path} is not a GGUF file"
                + (" but of the older GGML format; convert the model to GGUF again" if older else "; give another file")
            )
        self.place = 4
        version = self._unsigned(4)
        if version & 0xFFFF == 0:
            raise UserError(f"{self.path} is a big-endian GGUF file; convert it with gguf-convert-endian first")
        if version not in (2, 3):
            raise UserError(f"{self.path} is GGUF version {version}; versions 2 and 3 are read, convert it again")
        tensor_count, key_count = self._unsigned(8), self._unsigned(8)
        if key_count > min(MAX_KEYS, self.size // 12):
            raise self.fail(f"promises {key_count} metadata keys, more than the file can hold")
        if tensor_count > min(MAX_TENSORS, self.size // 24):
            raise self.fail(f"promises {tensor_count} tensors, more than the file can hold")
        return tensor_count, key_count

    def _take(self, count: int) -> bytes:
        end = self.place + count
        if end > self.size:
            raise self.fail("goes beyond the end of the file")
        taken = self.data[self.place : end]
        self.place = end
        return taken

    def _unsigned(self, width: int) -> int:
        return int.from_bytes(self._take(width), "little")

    def _string(self, limit: int = MAX_STRING_BYTES) -> str:
        length = self._unsigned(8)
        if length > limit:
            raise self.fail(f"has a text of {length} bytes, more than the allowed {limit}")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError:
            raise self.fail("holds a text that is not UTF-8") from None

    def _value(self, kind: int, depth: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            return self._array(depth)
        if kind not in SCALARS:
            raise self.fail(f"has a value of the unknown type {kind}")
        dtype = np.dtype(SCALARS[kind])
        return np.frombuffer(self._take(dtype.itemsize), dtype)[0].item()

    def _array(self, depth: int) -> list[Any]:
        kind, count = self._unsigned(4), self._unsigned(8)
        self.items += count
        if self.items > MAX_ITEMS:
            raise self.fail(f"has an array of {count} items, more than is allowed")
        if kind in SCALARS:
            dtype = np.dtype(SCALARS[kind])
            return np.frombuffer(self._take(dtype.itemsize * count), dtype).tolist()
        if count * 8 > self.size - self.place:
            raise self.fail(f"has an array of {count} items, more than the file can hold")
        if kind == STRING:
            return self._strings(count)
        if depth == MAX_DEPTH:
            raise self.fail(f"has arrays within arrays, more than {MAX_DEPTH} deep")
        return [self._value(kind, depth + 1) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        """Many short strings: `_string`, inlined, since vocabularies and merges are most of a header's time."""
        data, place, size, found = self.data, self.place, self.size, []
        length_of = struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                start = place + 8
                (length,) = length_of(data, place)
                place = start + length
                if place > size or length > MAX_STRING_BYTES:
                    raise self.fail(f"has a text of {length} bytes that goes beyond what is there or allowed")
                found.append(data[start:place].decode())
        except struct.error:
            raise self.fail("goes beyond the end of the file") from None
        except UnicodeDecodeError:
            raise self.fail(f"holds a text that is not UTF-8 (item {len(found)})") from None
        self.place = place
        return found

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        self.what = "metadata key 'general.alignment'"
        if not isinstance(alignment, int) or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self.fail(f"is {shortened(str(alignment))}, not a power of two up to {MAX_ALIGNMENT}")
        return alignment

    def _tensor(self, shard: int, alignment: int) -> GgufTensor:
        """Read one entry of the tensor table; its offset still counts from the start of the tensor data."""
        name = self._string(MAX_NAME_BYTES)
        self.what = f"tensor '{shortened(name)}'"
        dims = self._unsigned(4)
        if dims > 4:
            raise self.fail(f"has {dims} dims, more than 4")
        shape = tuple(self._unsigned(8) for _ in range(dims))[::-1]
        number, offset = self._unsigned(4), self._unsigned(8)
        if number not in TYPES:
            raise UserError(
                f"{self.path}: {self.what} is of the unknown type {number}; "
                "it is newer than this Treadle, or the file is damaged"
            )
        kind = TYPES[number]
        if any(length == 0 for length in shape):
            raise self.fail(f"has the shape {list(shape)}, which holds nothing")
        if kind.size > 1 and (not shape or shape[-1] % kind.size):
            raise self.fail(f"has the shape {list(shape)}, whose rows are not whole {kind.name} blocks of {kind.size}")
        if offset % alignment:
            raise self.fail(f"starts at {offset}, which is not a multiple of the alignment {alignment}")
        count = 1
        for length in shape:
            count *= length
        return GgufTensor(name, shape, kind, offset, count // kind.size * kind.nbytes, shard)

    def _placed(self, tensors: list[GgufTensor], alignment: int) -> dict[str, GgufTensor]:
        """Turn offsets into places in the file; refuse what lies beyond its end or on top of another tensor."""
        start = -(-self.place // alignment) * alignment
        placed = {}
        for tensor in tensors:
            end = start + tensor.offset + tensor.nbytes
            if end > self.size:
                raise UserError(
                    f"{self.path} is cut short: tensor '{shortened(tensor.name)}' ends at byte {end}, "
                    f"the file at {self.size}; download it again"
                )
            placed[tensor.name] = GgufTensor(
                tensor.name, tensor.shape, tensor.kind, start + tensor.offset, tensor.nbytes, tensor.shard
            )
        for left, right in itertools.pairwise(sorted(placed.values(), key=lambda tensor: tensor.offset)):
            if left.offset + left.nbytes > right.offset:
                self.what = f"tensor '{shortened(left.name)}'"
                raise self.fail(f"overlaps tensor '{shortened(right.name)}'")
        return placed
