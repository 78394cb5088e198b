"""A model from disk: a Hugging Face directory (every checkpoint is one) or a GGUF file."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treadle.config import UserError
from treadle.config.progress import progress
from treadle.model.families import read_spec
from treadle.model.spec import ModelSpec
from treadle.model.tokenizer import Tokenizer, check_vocabulary
from treadle.model.transformer import Transformer
from treadle.parallel.tensor import TensorShard
from treadle.weights.checkpoint import Checkpoint, Stored, open_checkpoint
from treadle.weights.ledger import Ledger, LoadReport, settle

CHUNK_ELEMENTS = 4 << 20  # of a tensor that is cut along its rows
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def load_model(
    path: str | Path | Checkpoint,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    report: Callable[[LoadReport], None] | None = None,
    lay_out: Callable[[Transformer], None] | None = None,
) -> Transformer:
    """Return the model at `path` (or that was opened) with its weights, without gradients, in `dtype` on `device`.

    The default dtype is the checkpoint's own (see `Checkpoint.dtype`). Tensors are read once, by several threads,
    straight into the parameters; beside the model itself only the tensors in flight take memory. `report` is called
    with what was done. `lay_out` may leave a part of the model (see model/parallel.py), of which alone the weights are
    read. Raises UserError naming the file, key or tensor that is wrong.
    """
    started = time.monotonic()
    checkpoint = opened(path)
    spec, kind = read_spec(checkpoint.config), chosen_dtype(checkpoint, dtype)
    ledger = settle(checkpoint, spec, kind)
    if lay_out is None:
        model = Transformer(spec, device=device, dtype=kind)
    else:
        model = Transformer(spec, device="meta", dtype=kind)
        lay_out(model)
        model.to_empty(device=device)
    parameters = dict(model.named_parameters())
    layout = model.layout
    if layout is not None:
        ledger = ledger.part(parameters, f"rank {layout.rank} of {layout.plan.ranks()}")

    def fill(ours: str, stored: Stored) -> Stored:
        shard = None if layout is None else layout.shard(ours)
        with torch.no_grad():
            copy_checked(parameters[ours], stored, checkpoint.path, shard)
        return stored

    _for_each(ledger, fill, f"Loading {checkpoint.path.name}")
    closed = ledger.close(time.monotonic() - started)
    if report is not None:
        report(closed)
    return model.requires_grad_(False).eval()


@dataclass(frozen=True)
class ModelStream:
    """A model that is read parameter by parameter: `parameters` yields each once, under our name, on the CPU."""

    spec: ModelSpec
    dtype: torch.dtype
    generation: Mapping[str, Any]
    parameters: Iterator[tuple[str, Tensor]]


def stream_model(
    path: str | Path | Checkpoint,
    dtype: torch.dtype | None = None,
    report: Callable[[LoadReport], None] | None = None,
) -> ModelStream:
    """Return the model at `path` (or that was opened) as a stream, in `dtype` (default as in `load_model`).

    Only one parameter is in memory at a time, so that a model larger than memory can be converted or sharded. `report`
    is called once the last one was taken. Raises UserError.
    """
    started = time.monotonic()
    checkpoint = opened(path)
    spec, kind = read_spec(checkpoint.config), chosen_dtype(checkpoint, dtype)
    ledger = settle(checkpoint, spec, kind)

    def parameters() -> Iterator[tuple[str, Tensor]]:
        total = sum(stored.nbytes for stored in ledger.sources.values())
        with progress(f"Reading {checkpoint.path.name}", total, "B") as step:
            for ours, stored in ledger.sources.items():
                whole = torch.empty(stored.shape, dtype=kind)
                copy_checked(whole, stored, checkpoint.path)
                yield ours, whole
                ledger.written(ours)
                step(stored.nbytes, stored.file)
        closed = ledger.close(time.monotonic() - started)
        if report is not None:
            report(closed)

    return ModelStream(spec, kind, checkpoint.generation, parameters())


def opened(path: str | Path | Checkpoint) -> Checkpoint:
    """Return the model at `path`, opened, if it is not yet. Raises UserError."""
    return path if isinstance(path, Checkpoint) else open_checkpoint(path)


def load_tokenizer(path: str | Path | Checkpoint, vocabulary: int | None = None) -> Tokenizer | None:
    """Return the tokenizer of a Hugging Face directory or GGUF file; None for a directory that has none at all.

    `vocabulary` is the number of the embedding's rows, which then must hold every token. Raises UserError.
    """
    gguf = path.gguf if isinstance(path, Checkpoint) else None
    path = path.path if isinstance(path, Checkpoint) else Path(path)
    if path.is_file():
        from treadle.weights.gguf import GgufFile
        from treadle.weights.gguf_tokenizer import gguf_tokenizer

        tokenizer = gguf_tokenizer(gguf or GgufFile.open(path))
    elif path.is_dir() and not any((path / name).is_file() for name in TOKENIZER_FILES):
        return None
    else:
        tokenizer = Tokenizer.load(path)
    if vocabulary is not None:
        check_vocabulary(tokenizer, vocabulary)
    return tokenizer


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "tokenizer_config.json")


def chosen_dtype(checkpoint: Checkpoint, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype asked for, or the checkpoint's own. Raises UserError for one that models are not computed in."""
    if dtype is None:
        return checkpoint.dtype
    if dtype not in DTYPES:
        known = ", ".join(str(one).removeprefix("torch.") for one in DTYPES)
        raise UserError(f"a model cannot be computed in {str(dtype).removeprefix('torch.')}; choose one of {known}")
    return dtype


@torch.no_grad()
def copy_checked(target: Tensor, stored: Stored, path: Path, shard: TensorShard | None = None) -> None:
    """Copy a stored tensor, or a shard of it, into `target`, converted to its dtype. Raises UserError where fp16 cannot
    hold a value."""
    if shard is None:
        target.copy_(stored.read())
    else:
        _copy_shard(target, stored, shard)
    if target.dtype == torch.float16 and stored.dtype != torch.float16 and not torch.isfinite(target).all():
        raise UserError(f"{path}: tensor '{stored.name}' has values too large for float16; choose bfloat16 or float32")
    stored.release()


def _copy_shard(target: Tensor, stored: Stored, shard: TensorShard) -> None:
    held = shard.unpadded(target)
    if shard.dim == 0:
        held.copy_(stored.read(slice(shard.start, shard.stop)))
    else:
        # Some rows at a time: what is stored quantized can only be read by whole rows.
        each = max(1, CHUNK_ELEMENTS // math.prod(stored.shape[1:]))
        for begin in range(0, stored.shape[0], each):
            rows = slice(begin, min(begin + each, stored.shape[0]))
            held[rows].copy_(stored.read(rows).narrow(shard.dim, shard.start, shard.stop - shard.start))
    if shard.padding:
        target.narrow(shard.dim, shard.stop - shard.start, shard.padding).zero_()


def _for_each(ledger: Ledger, fill: Callable[[str, Stored], Stored], title: str) -> None:
    """Call `fill` for every parameter on several threads, in the order in which the tensors lie on disk."""
    workers = min(8, os.cpu_count() or 1)
    total = sum(stored.nbytes for stored in ledger.sources.values())
    with progress(title, total, "B") as step, ThreadPoolExecutor(workers, "load") as pool:
        futures = {pool.submit(fill, ours, stored): ours for ours, stored in ledger.sources.items()}
        try:
            for future in as_completed(futures):
                stored = future.result()
                ledger.written(futures[future])
                step(stored.nbytes, stored.file)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
