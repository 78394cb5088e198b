"""Reading checkpoints: finding the newest whole one, and its tensors, memory-mapped, in any layout."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from treadle.config import UserError
from treadle.config.files import read_json
from treadle.model.families import read_spec
from treadle.model.spec import ModelSpec
from treadle.train.checkpoints.format import (
    STATE,
    DamagedCheckpoint,
    folder_of,
    name_of,
    steps_in,
    verify,
)
from treadle.weights.checkpoint import open_checkpoint as open_model
from treadle.weights.ledger import settle
from treadle.weights.safetensors_file import SafetensorsFile


class StoredTensors(Mapping[str, Tensor]):
    """Tensors on disk by name, each a view of its mapped file when it is asked for.

    It takes memory only for the parts that are read, so every rank may take its own shard from here.
    """

    def __init__(self, readers: Mapping[str, Callable[[], Tensor]]) -> None:
        self._readers = dict(readers)

    def __getitem__(self, name: str) -> Tensor:
        return self._readers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


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
        """Return the model's parameters, whole, under our names. Raises UserError where they do not fit config.json."""
        model = open_model(self.path)
        ledger = settle(model, read_spec(model.config), model.dtype)
        return StoredTensors({name: stored.read for name, stored in ledger.sources.items()})

    def tensors(self, group: str = "optimizer") -> StoredTensors:
        """Return a group of training tensors, as it was saved; empty where there is none."""
        name = f"training/{group}.safetensors"
        if name not in self.files:
            return StoredTensors({})
        file = SafetensorsFile(self.path / name)
        return StoredTensors({name: partial(file.read, name) for name in file.entries})


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


def check_same_model(checkpoint: Checkpoint, spec: ModelSpec, tokenizer: str | None = None) -> None:
    """Raise UserError, naming every key that differs, where a checkpoint is not of the model of `spec`.

    `tokenizer` is the fingerprint of the run's tokenizer, None where it has none.
    """
    theirs = read_spec(checkpoint.config())
    way_out = "continue with the settings that it was made with, or set another folder for this run"
    if theirs != spec:
        differing = ", ".join(
            f"{key} {theirs.config.get(key)!r} there, {spec.config.get(key)!r} here"
            for key in _differing_keys(theirs, spec)
        )
        raise UserError(f"{checkpoint.path} is a checkpoint of another model ({differing}); {way_out}")
    saved = checkpoint.state.get("tokenizer")
    if saved != tokenizer and saved is not None and tokenizer is not None:
        raise UserError(
            f"{checkpoint.path} was trained with another tokenizer (fingerprint {saved[:12]} there, {tokenizer[:12]} "
            f"here); {way_out}"
        )


def _differing_keys(theirs: ModelSpec, ours: ModelSpec) -> list[str]:
    """Return the keys of config.json that make two specs differ: those that each alone would change ours."""
    keys = [key for key in sorted({*theirs.config, *ours.config}) if theirs.config.get(key) != ours.config.get(key)]

    def matters(key: str) -> bool:
        try:
            return read_spec({**ours.config, key: theirs.config.get(key)}) != ours
        except UserError:
            return True

    return [key for key in keys if matters(key)] or keys


def _read(folder: Path, name: str) -> dict[str, Any]:
    try:
        content = read_json(folder / name)
    except UserError as error:
        raise DamagedCheckpoint(f"{folder} is damaged: {error}") from error
    if content is None:
        raise DamagedCheckpoint(f"{folder} is damaged: {name} is missing")
    return content
