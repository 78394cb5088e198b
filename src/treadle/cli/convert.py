"""`treadle convert`: any model that Treadle loads, written as a Hugging Face directory."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import typer

from treadle.cli import verb_app

app = verb_app(
    "Write a model (a GGUF file, a checkpoint, another dtype, a merged adapter) as a Hugging Face directory."
)


@app.command()
def convert(
    model: Path = typer.Argument(help="A Hugging Face directory, a checkpoint or a GGUF file."),
    out: Path = typer.Argument(help="The folder to write; it must not exist, or be empty."),
    dtype: str = typer.Option(
        "auto", help="auto (the checkpoint's; float32 for a quantized GGUF), float32, bfloat16 or float16."
    ),
    adapter: Path = typer.Option(None, help="A LoRA adapter (PEFT's format) to merge into the weights."),
    shard_gib: float = typer.Option(5.0, min=0.001, help="The largest file of weights, in GiB."),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Show what was read."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    from treadle.config.progress import amount_text
    from treadle.serve.model import parse_dtype
    from treadle.weights.convert import convert_model

    report = (lambda done: print(done, file=sys.stderr)) if verbose else None
    done = convert_model(model, out, parse_dtype(dtype), adapter, int(shard_gib * (1 << 30)), report)
    if as_json:
        print(json.dumps(dataclasses.asdict(done)))
        return
    files = "1 file" if done.weight_files == 1 else f"{done.weight_files} files"
    print(
        f"{done.folder}: {done.family}, {amount_text(done.parameters, '')} parameters in {done.dtype}, "
        f"{files} of weights ({amount_text(done.weight_bytes, 'B')})"
        + (f", adapter merged into {done.adapted_layers} layers" if adapter else "")
        + (", with its tokenizer" if done.tokenizer else ", no tokenizer (the model has none)")
    )
