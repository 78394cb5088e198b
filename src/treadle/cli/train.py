"""`treadle train`: train or fine-tune a model from a YAML file."""

from __future__ import annotations

from pathlib import Path

import typer

from treadle.cli import verb_app

app = verb_app("Train or fine-tune a model from a YAML file. Run it again to go on after an interruption.")


@app.command()
def train(
    run_file: Path = typer.Argument(help="The run's YAML file.", metavar="RUN.YAML"),
    as_json: bool = typer.Option(False, "--json", help="Print how the run ended as one JSON object."),
    overrides: list[str] = typer.Argument(
        None, help="Settings to change, such as train.steps=200.", metavar="[KEY=VALUE]..."
    ),
) -> None:
    from treadle.parallel.mesh import world_from_environment
    from treadle.train.api import train as run

    checkpoint = run(run_file, overrides or [])
    rank, _, _ = world_from_environment()
    if as_json and rank == 0:
        outcome = checkpoint.parent.parent / "outcome.json"
        print(outcome.read_text() if outcome.exists() else '{"reason": "stopped before training began"}', end="")
