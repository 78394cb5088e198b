"""`treadle eval`: a model's loss and perplexity on held-out text, or lm-eval tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from treadle.cli import verb_app
from treadle.config import UserError

app = verb_app("Measure a model: loss and perplexity on a prepared corpus or on text files, or lm-eval tasks.")


@app.command()
def evaluate(
    model: str = typer.Argument(help="A Hugging Face directory, a checkpoint or a GGUF file."),
    data: Path = typer.Option(None, help="A prepared corpus (treadle data prepare)."),
    split: str = typer.Option("validation", help="The split of the corpus."),
    text: list[Path] = typer.Option([], help="A text file; repeat it for more."),
    stride: int = typer.Option(
        None, help="With --text: tokens between windows; less gives more context to each token."
    ),
    tasks: str = typer.Option(None, help="Tasks of lm-evaluation-harness, separated by commas (the extra 'eval')."),
    fewshot: int = typer.Option(None, "--num-fewshot", help="With --tasks: examples before each question."),
    limit: int = typer.Option(None, help="With --tasks: only so many questions a task."),
    task_folder: Path = typer.Option(None, "--include-path", help="With --tasks: a folder with more task files."),
    online: bool = typer.Option(False, help="With --tasks: let the harness download data sets."),
    tokens: int = typer.Option(0, min=0, help="Measure on about so many tokens (0: all)."),
    sequence_length: int = typer.Option(
        None, help="Tokens that the model sees at once (default: its own, up to 2048)."
    ),
    batch_tokens: int = typer.Option(8192, min=1, help="Tokens computed at once; it changes speed and memory only."),
    dtype: str = typer.Option("float32", help="float32, bfloat16, float16, or auto (the checkpoint's)."),
    device: str = typer.Option("cpu", help="cpu, cuda, ..."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    if sum(map(bool, (data, text, tasks))) != 1:
        raise UserError("say what to measure on: one of --data CORPUS, --text FILE and --tasks NAMES")
    from treadle.serve.model import load, parse_dtype

    if tasks:
        from treadle.train.harness import run_tasks

        names = [name.strip() for name in tasks.split(",") if name.strip()]
        results = run_tasks(load(model, dtype, device), names, fewshot, limit, task_folder, online, batch_tokens)
        print(json.dumps(results, indent=2) if as_json else "\n".join(_rows(results)))
        return
    from treadle.train.held_out import HeldOut

    held_out = HeldOut(model, parse_dtype(dtype), device, sequence_length, batch_tokens)
    report = held_out.corpus(data, split, tokens) if data else held_out.texts(text, stride, tokens)
    print(json.dumps(report) if as_json else _told(report))


def _told(report: dict[str, Any]) -> str:
    names = {
        "loss": "loss (nats a token)",
        "perplexity": "perplexity a token",
        "perplexity_per_word": "perplexity a word",
        "perplexity_per_byte": "perplexity a byte",
        "bits_per_byte": "bits a byte",
    }
    lines = [f"{text:<20} {report[name]:.4f}" for name, text in names.items() if name in report]
    size = f"{report['bytes']:,} bytes, " if "bytes" in report else ""
    speed = report["tokens"] / max(report["seconds"], 1e-9)
    lines.append(
        f"on {report['data']}: {report['tokens']:,} tokens, {size}at most {report['sequence_length']} at once, "
        f"{report['dtype']}, {report['seconds']:.1f} s ({speed:,.0f} tokens/s)"
    )
    return "\n".join(lines)


def _rows(results: dict[str, dict[str, Any]]) -> list[str]:
    return [
        f"{task:<28} {name:<24} {value:.4f}" for task, metrics in results.items() for name, value in metrics.items()
    ]
