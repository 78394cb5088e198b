"""What a model on disk holds, before any of it is read: a Hugging Face directory or a GGUF file, in one form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treadle.config import UserError
from treadle.config.files import read_json
from treadle.weights.safetensors_file import DTYPES, SafetensorsFile

if TYPE_CHECKING:
    from treadle.weights.gguf import GgufFile

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_SHARDS = 10_000


@dataclass(frozen=True)
class Stored:
    """A tensor on disk, under its Hugging Face name.

    `read` returns it, or given a slice those of its rows, as a view of the mapped file or dequantized; `release` gives
    back the pages that it was read from. `dtype` is what it is when read.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stored_as: str
    nbytes: int
    file: str
    read: Callable[..., Tensor] = field(repr=False)
    release: Callable[[], None] = field(repr=False, default=lambda: None)


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk: its config.json's content, its tensors in the order in which they lie, its generation settings.

    `dtype` is the one that a model takes when none is asked for: that of most of its bytes; for a GGUF file bf16 where
    that is, else fp32. `gguf` is that file, opened, which also holds the tokenizer.
    """

    path: Path
    config: Mapping[str, Any]
    tensors: tuple[Stored, ...]
    dtype: torch.dtype
    generation: Mapping[str, Any] = field(default_factory=dict)
    gguf: GgufFile | None = field(default=None, repr=False)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Return what the Hugging Face directory or GGUF file at `path` holds; no tensor is read yet.

    Raises UserError naming what is missing or wrong.
    """
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise UserError(f"{path} does not exist; give a Hugging Face directory, a checkpoint or a GGUF file")
    if path.suffix.lower() == ".safetensors":
        raise UserError(f"{path} is one file of a model; give the folder that also holds its config.json")
    return _open_gguf(path)


def _open_gguf(path: Path) -> Checkpoint:
    from treadle.weights.gguf import GgufFile
    from treadle.weights.gguf_model import gguf_config, gguf_weights

    file = GgufFile.open(path)
    config = gguf_config(file)
    tensors = []
    for name, weight in gguf_weights(file, config).items():
        stored_as = file.tensors[weight.tensor].type
        dtype = torch.bfloat16 if stored_as == "BF16" else torch.float32
        read = lambda rows=None, weight=weight, dtype=dtype: weight.read(dtype, rows)  # noqa: E731
        tensors.append(Stored(name, weight.shape, dtype, stored_as, weight.nbytes, path.name, read))
    # fp16 is dequantized as well: fp32 holds it exactly, and most CPUs cannot compute in it.
    return Checkpoint(path, config, tuple(tensors), most_common_dtype(tensors), gguf=file)


def _open_folder(folder: Path) -> Checkpoint:
    config = read_json(folder / "config.json")
    if config is None:
        raise UserError(f"{folder} has no config.json{_instead(folder)}")
    tensors = [
        Stored(
            name,
            entry.shape,
            _readable(file, name, entry.dtype),
            entry.dtype,
            entry.end - entry.begin,
            file.path.name,
            lambda rows=None, file=file, name=name: file.read(name)[rows] if rows else file.read(name),
            lambda file=file, name=name: file.release(name),
        )
        for file in _shards(folder)
        for name, entry in sorted(file.entries.items(), key=lambda item: item[1].begin)
    ]
    generation = read_json(folder / "generation_config.json") or {}
    return Checkpoint(folder, config, tuple(tensors), most_common_dtype(tensors), generation)


def _instead(folder: Path) -> str:
    """Say what the folder is where it is not a model."""
    if (folder / "adapter_config.json").is_file():
        return "; it holds a LoRA adapter: give the base model, and this folder as the adapter"
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs:
        return f"; give the GGUF file itself, such as {ggufs[0]}"
    inner = sorted(path.parent for path in folder.glob("*/config.json"))
    if inner:
        return f"; did you mean {inner[-1]}?"
    return "; give a Hugging Face directory, a checkpoint or a GGUF file"


def _shards(folder: Path) -> list[SafetensorsFile]:
    if (folder / SINGLE).is_file():
        return [SafetensorsFile(folder / SINGLE)]
    index = read_json(folder / INDEX)
    if index is None:
        raise UserError(f"{folder} has neither {SINGLE} nor {INDEX}{_other_weights(folder)}")
    placed = index.get("weight_map")
    if not isinstance(placed, dict) or not placed or not all(isinstance(name, str) for name in placed.values()):
        raise UserError(f"{folder / INDEX} has no weight_map of tensor names to files; download it again")
    names = sorted(set(placed.values()))
    if len(names) > MAX_SHARDS:
        raise UserError(f"{folder / INDEX} names {len(names)} files, more than {MAX_SHARDS}")
    files = {}
    for name in names:
        # By its text: a link that the user's own cache put in place of a file may well lead elsewhere.
        if Path(name).is_absolute() or ".." in Path(name).parts or "\\" in name or "\0" in name:
            raise UserError(
                f"{folder / INDEX} names '{name}', which leads out of the folder; only files in it are read"
            )
        if not name.endswith(".safetensors"):
            raise UserError(f"{folder / INDEX} names '{name}', which is not a safetensors file")
        files[name] = SafetensorsFile(folder / name)
    for tensor, name in placed.items():
        if tensor not in files[name].entries:
            raise UserError(
                f"{folder / name} lacks tensor '{tensor}', which {INDEX} says is in it; download both again"
            )
    return list(files.values())


def _other_weights(folder: Path) -> str:
    pickled = sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])
    if pickled:
        return (
            f"; {pickled[0].name} is a pickle, which may run any program when read, so it never is: "
            "take the model's safetensors version, or save it as safetensors with Transformers"
        )
    others = sorted(folder.glob("*.safetensors"))
    if others:
        return f"; {others[0].name} alone does not say which files belong to the model, download the index too"
    return "; download the model's weights"


def _readable(file: SafetensorsFile, name: str, dtype: str) -> torch.dtype:
    if dtype not in DTYPES:
        raise UserError(
            f"{file.path}: tensor '{name}' is of dtype {dtype}, which is not supported; "
            "use a version of the model in float32, bfloat16 or float16"
        )
    return DTYPES[dtype]


def most_common_dtype(tensors: list[Stored]) -> torch.dtype:
    """Return the floating dtype that most bytes are stored in (fp32 where there is none)."""
    totals: dict[torch.dtype, int] = {}
    for tensor in tensors:
        if tensor.dtype in (torch.float32, torch.bfloat16, torch.float16):
            totals[tensor.dtype] = totals.get(tensor.dtype, 0) + tensor.nbytes
    return max(totals, key=totals.__getitem__, default=torch.float32)
