"""Any model that can be loaded, written as a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from treadle.config.files import atomic_folder
from treadle.weights.adapter import load_adapter
from treadle.weights.checkpoint import open_checkpoint
from treadle.weights.ledger import LoadReport
from treadle.weights.load import load_model, load_tokenizer, stream_model
from treadle.weights.save import save_model


@dataclass(frozen=True)
class Converted:
    """What was written."""

    folder: str
    family: str
    parameters: int
    dtype: str
    weight_files: int
    weight_bytes: int
    tokenizer: bool
    adapted_layers: int


def convert_model(
    path: str | Path,
    folder: str | Path,
    dtype: torch.dtype | None = None,
    adapter: str | Path | None = None,
    shard_bytes: int = 5 << 30,
    report: Callable[[LoadReport], None] | None = None,
) -> Converted:
    """Write the model at `path` into `folder`, which appears whole or not at all.

    `dtype` defaults to the checkpoint's own (for quantized GGUF files fp32). One parameter is in memory at a time,
    unless an `adapter` (a PEFT folder) is to be merged, which needs the whole model. Raises UserError where anything is
    wrong with the model or `folder` is not empty, TreadleError when the disk is full.
    """
    folder = Path(folder)
    with atomic_folder(folder) as aside:
        checkpoint = open_checkpoint(path)
        stream = stream_model(checkpoint, dtype, report)
        tokenizer = load_tokenizer(checkpoint, stream.spec.vocabulary)
        state, adapted = stream.parameters, []
        if adapter is not None:
            model = load_model(checkpoint, stream.dtype, report=report)
            adapted = load_adapter(model, adapter, merge=True)
            state = model.named_parameters()
        save_model(aside, stream.spec, state, tokenizer, shard_bytes, stream.dtype, stream.generation)
        files = sorted(aside.glob("*.safetensors"))
        return Converted(
            folder=str(folder),
            family=stream.spec.family,
            parameters=stream.spec.parameters_count(),
            dtype=str(stream.dtype).removeprefix("torch."),
            weight_files=len(files),
            weight_bytes=sum(file.stat().st_size for file in files),
            tokenizer=tokenizer is not None,
            adapted_layers=len(adapted),
        )
