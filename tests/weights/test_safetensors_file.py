"""The header check against hand-made lies, the reader and writer against the safetensors library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, load_file, save, save_file

from treadle.config import UserError
from treadle.weights.safetensors_file import SafetensorsFile, SafetensorsWriter


def written(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


LIES: list[tuple[Any, bytes, str]] = [
    (b"not json", b"", "not valid JSON"),
    (b"[1, 2]", b"", "not a JSON object"),
    (b"[" * 100_000, b"", "not valid JSON"),
    (b'{"a": ' + b"9" * 10_000 + b"}", b"", "not valid JSON"),
    (b'{"a": 1, "a": 2}', b"", "'a' is given twice"),
    ({"a": 7}, b"", "lies about tensor 'a'"),
    ({"a": {"dtype": "F32"}}, b"", "needs dtype, shape and data_offsets"),
    ({"a": entry("F33")}, b"\0" * 8, "unknown dtype 'F33'"),
    ({"a": entry(["F32"])}, b"\0" * 8, "unknown dtype"),
    ({"a": entry(shape=[-2])}, b"\0" * 8, "its shape is [-2]"),
    ({"a": entry(shape=[2.0])}, b"\0" * 8, "its shape is [2.0]"),
    ({"a": entry(shape=[True, 2])}, b"\0" * 8, "its shape is [True, 2]"),
    ({"a": entry(shape=[1] * 99)}, b"\0" * 8, "its shape is"),
    ({"a": entry(shape=[1 << 61, 8])}, b"\0" * 8, "its place has 8"),
    ({"a": entry(shape=[3])}, b"\0" * 8, "is 12 bytes, its place has 8"),
    ({"a": entry(offsets=[8, 0])}, b"\0" * 8, "its place has -8"),
    ({"a": entry(offsets=[0, 8, 9])}, b"\0" * 8, "its offsets are [0, 8, 9]"),
    ({"a": entry(), "b": entry(offsets=[4, 12])}, b"\0" * 12, "tensor 'b' overlaps 'a'"),
    ({"a": entry(), "b": entry()}, b"\0" * 8, "overlaps"),
    ({"a": entry(offsets=[4, 12])}, b"\0" * 12, "4 bytes before 'a' are nobody's"),
    ({"a": entry()}, b"\0" * 12, "4 bytes after its last tensor"),
    ({"a": entry()}, b"\0" * 7, "is cut short: tensor 'a' ends at byte"),
    ({"a": entry(offsets=[1 << 60, (1 << 60) + 8])}, b"\0" * 8, "is cut short"),
]


@pytest.mark.parametrize(("header", "data", "message"), LIES, ids=[message for _, _, message in LIES])
def test_a_header_that_lies_is_refused(header: Any, data: bytes, message: str, tmp_path: Path) -> None:
    path = written(tmp_path / "x.safetensors", header, data)
    with pytest.raises(UserError) as error:
        SafetensorsFile(path)
    assert message in str(error.value) and str(path) in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is missing"):
        SafetensorsFile(tmp_path / "absent")
    with pytest.raises(UserError, match="is missing"):
        SafetensorsFile(tmp_path)
    (tmp_path / "short").write_bytes(b"\0" * 7)
    with pytest.raises(UserError, match="too short"):
        SafetensorsFile(tmp_path / "short")
    for length in (9, 1 << 40, (1 << 64) - 1):
        with pytest.raises(UserError, match=f"its header has {length} bytes"):
            SafetensorsFile(written(tmp_path / "long", b"{}", length=length))


@settings(deadline=None)
@given(st.binary(max_size=200), st.integers(0, 300))
def test_noise_and_cuts_end_in_one_sentence(noise: bytes, cut: int) -> None:
    import tempfile

    whole = save({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)})
    for content in (noise, whole[:cut] + noise, whole[: cut % len(whole)]):
        with tempfile.NamedTemporaryFile() as file:
            file.write(content)
            file.flush()
            try:
                found = SafetensorsFile(file.name)
            except UserError as error:
                assert "\n" not in str(error)
            else:
                # What passes our check the library must be able to read too.
                assert set(load(content)) == set(found.entries)


TENSORS = {
    "w": torch.arange(12.0).reshape(3, 4),
    "scalar": torch.tensor(7.0),
    "empty": torch.empty(0, 5),
    "half": torch.linspace(-1, 1, 7).half(),
    "brain": torch.linspace(-1, 1, 9).bfloat16(),
    "count": torch.arange(5),
    "flag": torch.tensor([True, False]),
}


def test_reads_what_the_library_wrote(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "x", {"format": "pt"})
    file = SafetensorsFile(tmp_path / "x")
    assert set(file.entries) == set(TENSORS)
    assert file.metadata == {"format": "pt"}
    for name, tensor in TENSORS.items():
        found = file.read(name)
        assert found.dtype == tensor.dtype and torch.equal(found, tensor), name
        file.release(name)
        assert torch.equal(file.read(name), tensor)


def test_reads_tensors_at_odd_addresses(tmp_path: Path) -> None:
    data = b"\x01" + torch.arange(3.0).numpy().tobytes()
    header = {"a": entry("BOOL", [1], [0, 1]), "b": entry("F32", [3], [1, 13])}
    for pad in range(4):
        text = json.dumps(header).encode() + b" " * pad
        file = SafetensorsFile(written(tmp_path / f"{pad}", text, data))
        assert torch.equal(file.read("b"), torch.arange(3.0))
        assert file.read("b").data_ptr() % 4 == 0  # not every CPU and kernel reads floats at odd addresses
        assert torch.equal(load_file(tmp_path / f"{pad}")["b"], torch.arange(3.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_library_reads_what_we_wrote(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"é" * 3: torch.randn(3, 5), "b": torch.randn(4, 6).t(), "c": torch.tensor(2.0), "d": torch.empty(0, 2)}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    with SafetensorsWriter(tmp_path / "x", dtype, shapes, {"note": "n"}) as writer:
        for name in reversed(tensors):
            writer.write(name, tensors[name])
    found = load_file(tmp_path / "x")
    assert set(found) == set(tensors)
    assert all(torch.equal(found[name], tensor.to(dtype)) for name, tensor in tensors.items())
    assert SafetensorsFile(tmp_path / "x").metadata == {"format": "pt", "note": "n"}


def test_the_writer_wants_each_tensor_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lacks b"), SafetensorsWriter(tmp_path / "x", torch.float32, {"b": (1,)}):
        pass
    with SafetensorsWriter(tmp_path / "x", torch.float32, {"b": (1,)}) as writer:
        writer.write("b", torch.ones(1))
        with pytest.raises(ValueError, match="written twice"):
            writer.write("b", torch.ones(1))
        with pytest.raises(ValueError, match="not announced"):
            writer.write("c", torch.ones(1))
