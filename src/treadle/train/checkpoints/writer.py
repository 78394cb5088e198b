"""Writing checkpoints: a snapshot within the step, the files in the background, a rename when all of it is on disk."""

from __future__ import annotations

import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor

import treadle
from treadle.config import Settings, TreadleError
from treadle.config.files import atomic_folder
from treadle.model.spec import ModelSpec
from treadle.model.tokenizer import Tokenizer
from treadle.parallel.collectives import from_first, together
from treadle.train.checkpoints.format import FORMAT, STATE, folder_of, name_of, steps_in, write_manifest
from treadle.train.checkpoints.retention import remove_old
from treadle.train.checkpoints.snapshot import Snapshots
from treadle.weights.save import save_model


class CheckpointSettings(Settings):
    """When checkpoints are made and which are kept.

    One is made each `every` steps (0: only at the end and when the run is stopped). The last `keep_last` are kept, and
    those whose step is a multiple of `keep_every` (0: no others). With `asynchronous` training goes on while the files
    are written. `verify` compares the checksums of a checkpoint before a run continues from it.
    """

    every: int = Field(500, ge=0)
    keep_last: int = Field(2, ge=1)
    keep_every: int = Field(0, ge=0)
    asynchronous: bool = True
    verify: bool = True


@dataclass(frozen=True)
class Content:
    """What a checkpoint is to hold.

    `weights` are the model's parameters by our names; `tensors` maps groups (a file each) to tensors by name; any of
    them may be DTensors. `state` is plain JSON. `tokenizer` belongs to the model. `beside` writes further files into
    the folder that it is given, from the copies of `tensors`.
    """

    step: int
    spec: ModelSpec
    weights: Mapping[str, Tensor]
    tensors: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Tokenizer | None = None
    beside: Callable[[Path, Mapping[str, Mapping[str, Tensor]]], None] | None = None


@dataclass(frozen=True)
class SaveReport:
    """What a save cost the step: seconds in all, of which waiting for the checkpoint before, and bytes copied."""

    step: int
    seconds: float
    waited_seconds: float
    bytes: int


class CheckpointWriter:
    """Writes the checkpoints of a run; every rank has one and calls it alike, rank 0 writes.

        with CheckpointWriter(run, settings) as writer:
            writer.save(content)
            writer.check()      # each step: raises what went wrong in the background

    At most one checkpoint is being written; the next save waits for it.
    """

    def __init__(self, run: str | Path, settings: CheckpointSettings) -> None:
        self.folder, self.settings = folder_of(run), settings
        self.first = not dist.is_initialized() or dist.get_rank() == 0
        self._snapshots = Snapshots(self.first)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.last_step: int | None = None
        steps = steps_in(self.folder) if self.first else []
        if steps:
            # A kill between a checkpoint's own rename and the link's leaves the link behind.
            _point_at(self.folder / "latest", name_of(steps[-1]))

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self.close()
        except TreadleError as problem:
            if error is None:
                raise
            print(f"treadle: {problem}", file=sys.stderr)

    def save(self, content: Content, wait: bool = False) -> SaveReport:
        """Take a snapshot of `content` and write it, in the background unless `wait`. Every rank calls it.

        Raises on every rank the error of this save, or of the one before it, that rank 0 met: TreadleError, naming
        the folder (a full disk). A step that was just saved is not saved again.
        """
        started = time.monotonic()
        together(self._finish)
        waited = time.monotonic() - started
        size = 0
        # Rank 0 decides for all: only it knows whether the last one was written.
        if from_first(content.step != self.last_step):
            snapshot, size = self._snapshot(content)
            self.last_step = content.step
            if self.first:
                self._thread = threading.Thread(target=self._run, args=(snapshot,), name="checkpoint", daemon=True)
                self._thread.start()
        if wait or not self.settings.asynchronous:
            together(self._finish)
        return SaveReport(content.step, time.monotonic() - started, waited, size)

    def check(self) -> None:
        """Raise the error of a checkpoint that failed in the background, on rank 0, without waiting for one."""
        if self._thread is not None and not self._thread.is_alive():
            self._finish()

    def close(self) -> None:
        """Wait for the checkpoint that is being written. Raises its error (on rank 0)."""
        self._finish()

    def _finish(self) -> None:
        if self._thread is not None:
            self._thread.join(timeout=2)
            if self._thread.is_alive():
                print(f"waiting for the checkpoint of step {self.last_step} to be written", file=sys.stderr)
                self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error, self.last_step = self._error, None, None
            raise error

    def _snapshot(self, content: Content) -> tuple[Content, int]:
        copies, size = self._snapshots.take({"": content.weights, **content.tensors})
        weights = copies.pop("")
        # The state goes through JSON now: later steps may change what it refers to.
        state = json.loads(json.dumps(content.state)) if self.first else {}
        return replace(content, weights=weights, tensors=copies, state=state), size

    def _run(self, content: Content) -> None:
        try:
            write_checkpoint(self.folder, content)
            remove_old(self.folder, content.step, self.settings.keep_last, self.settings.keep_every)
        except TreadleError as error:
            self._error = error
        except BaseException as error:
            target = self.folder / name_of(content.step)
            self._error = TreadleError(f"could not write {target}: {type(error).__name__}: {error}")
            self._error.__cause__ = error


def write_checkpoint(folder: Path, content: Content) -> None:
    """Write a checkpoint of whole CPU tensors into `folder`, where it is seen only once it is whole.

    One of the same step makes way for it. Raises TreadleError where the disk is full, UserError where it is denied.
    """
    target = folder / name_of(content.step)
    with atomic_folder(target, replace=True) as aside:
        kinds = {tensor.dtype for tensor in content.weights.values()}
        dtype = kinds.pop() if len(kinds) == 1 else torch.float32
        save_model(aside, content.spec, content.weights, content.tokenizer, dtype=dtype)
        (aside / "training").mkdir()
        for group, tensors in content.tensors.items():
            if tensors:
                save_file(dict(tensors), aside / "training" / f"{group}.safetensors")
        if content.beside is not None:
            content.beside(aside, content.tensors)
        versions = {"treadle": treadle.__version__, "torch": torch.__version__, "python": platform.python_version()}
        state = {
            **content.state,
            "format": FORMAT,
            "step": content.step,
            "tokenizer": content.tokenizer.fingerprint if content.tokenizer else None,
            "versions": versions,
        }
        (aside / STATE).write_text(json.dumps(state, indent=1) + "\n")
        write_manifest(aside, content.step)
    _point_at(folder / "latest", target.name)


def _point_at(link: Path, name: str) -> None:
    """Make `link` point at the newest checkpoint, for people; Treadle itself looks at the folders."""
    aside = link.with_name(f".latest.{os.getpid()}.tmp")
    with suppress(OSError):  # a file system without links
        aside.unlink(missing_ok=True)
        aside.symlink_to(name)
        os.replace(aside, link)
