"""Reading checkpoints: finding the newest whole one, and its tensors, memory-mapped, in any layout."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from treadle.config import UserError
from treadle.config.files import read_json
from treadle.model.families import family_of, read_spec
from treadle.model.spec import ModelSpec
from treadle.train.checkpoints.format import (
    STATE,
    DamagedCheckpoint,
    folder_of,
    name_of,
    steps_in,
    verify,
)


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of some safetensors files by name, each memory-mapped when it is asked for.

    A tensor takes memory only for the parts of it that are read, so every rank may take its shard from here.
    """

    def __init__(self, files: Sequence[Path], names: Mapping[str, str] | None = None) -> None:
        """`names` maps the names to offer to those in the files (default: the same). Raises DamagedCheckpoint."""
        self._places: dict[str, Any] = {}
        for path in files:
            try:
                file = safe_open(path, "pt")
            except (SafetensorError, OSError) as error:
                raise DamagedCheckpoint(f"{path} is not a readable safetensors file: {error}") from error
            for name in file.keys():  # noqa: SIM118 - the file is no mapping
                self._places[name] = file
        self._names = {name: name for name in self._places} if names is None else dict(names)
        missing = [stored for stored in self._names.values() if stored not in self._places]
        if missing:
            raise DamagedCheckpoint(f"{files[0].parent if files else 'the checkpoint'} has no tensor '{missing[0]}'")

    def __getitem__(self, name: str) -> Tensor:
        stored = self._names[name]
        return self._places[stored].get_tensor(stored)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint: where it is, the step it was made after, and the state of the run as plain data."""

    path: Path
    step: int
    state: Mapping[str, Any]
    files: tuple[str, ...]

    def config(self) -> dict[str, Any]:
        """Return the model's config.json."""
        return _read(self.path, "config.json")

    def weights(self) -> StoredTensors:
        """Return the model's parameters, under our names."""
        config = self.config()
        names = family_of(config).names(read_spec(config))
        return StoredTensors([self.path / name for name in self.files if _is_weight_file(name)], names)

    def tensors(self, group: str = "optimizer") -> StoredTensors:
        """Return a group of training tensors, as it was saved; empty where there is none."""
        name = f"training/{group}.safetensors"
        return StoredTensors([self.path / name] if name in self.files else [])


def open_checkpoint(path: str | Path, checksums: bool = True) -> Checkpoint:
    """Return the checkpoint at `path`, verified. Raises DamagedCheckpoint naming the file that is wrong."""
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"{path} is not a folder; give a checkpoint such as run/checkpoints/latest")
    manifest = verify(path, checksums)
    return Checkpoint(path.resolve(), manifest["step"], _read(path, STATE), tuple(manifest["files"]))


def latest_good(run: str | Path, checksums: bool = True) -> Checkpoint | None:
    """Return the newest whole checkpoint of a run, or None where it has none at all.

    Each damaged one on the way is named on stderr. Raises UserError where there are some and all are damaged: starting
    over would be the user's decision.
    """
    folder = folder_of(run)
    steps = steps_in(folder)
    problem = ""
    for step in reversed(steps):
        try:
            found = open_checkpoint(folder / name_of(step), checksums)
        except DamagedCheckpoint as error:
            problem = str(error)
            print(f"warning: {problem}; looking for the one before it", file=sys.stderr)
            continue
        if problem:
            print(f"using {found.path.name}; remove the damaged one to be rid of this warning", file=sys.stderr)
        return found
    if steps:
        raise UserError(
            f"no checkpoint in {folder} is whole (the oldest: {problem}); restore one from a copy, or remove that "
            "folder to start over"
        )
    return None


# Keys of config.json that change nothing of the model.
_COSMETIC = frozenset({"architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "_name_or_path"})


def check_same_model(checkpoint: Checkpoint, spec: ModelSpec, tokenizer: str | None = None) -> None:
    """Raise UserError, naming every key that differs, where a checkpoint is not of the model of `spec`.

    `tokenizer` is the fingerprint of the run's tokenizer, None where it has none.
    """
    theirs = read_spec(checkpoint.config())
    way_out = "continue with the settings that it was made with, or set another folder for this run"
    if theirs != spec:
        keys = sorted({*theirs.config, *spec.config} - _COSMETIC)
        differing = ", ".join(
            f"{key} {theirs.config.get(key)!r} there, {spec.config.get(key)!r} here"
            for key in keys
            if theirs.config.get(key) != spec.config.get(key)
        )
        raise UserError(f"{checkpoint.path} is a checkpoint of another model ({differing}); {way_out}")
    saved = checkpoint.state.get("tokenizer")
    if saved != tokenizer and saved is not None and tokenizer is not None:
        raise UserError(
            f"{checkpoint.path} was trained with another tokenizer (fingerprint {saved[:12]} there, {tokenizer[:12]} "
            f"here); {way_out}"
        )


def _read(folder: Path, name: str) -> dict[str, Any]:
    try:
        content = read_json(folder / name)
    except UserError as error:
        raise DamagedCheckpoint(f"{folder} is damaged: {error}") from error
    if content is None:
        raise DamagedCheckpoint(f"{folder} is damaged: {name} is missing")
    return content


def _is_weight_file(name: str) -> bool:
    return "/" not in name and name.endswith(".safetensors")
