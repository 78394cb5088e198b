"""`treadle ops`: the operators, and which kernel each one runs on this machine."""

from __future__ import annotations

import shutil
import textwrap
from typing import Any

import typer

from treadle.cli import verb_app

app = verb_app("List the operators and which kernel each one runs here, and why.")


@app.command()
def ops(
    as_json: bool = typer.Option(False, "--json", help="Print JSON: the schema and every kernel of each operator."),
) -> None:
    from treadle.ops import listing, native
    from treadle.ops.registry import allowed_kernels

    entries = listing.listing()
    allowed = allowed_kernels()
    if as_json:
        import json

        state = {"native": native.variant(), "native_missing": native.missing(), "allowed_kernels": allowed}
        print(json.dumps({**state, "operators": entries}, indent=2))
        return
    show(entries)
    print(f"\nnative kernels: {native.variant() or native.missing()}")
    if allowed is not None:
        print(f"TREADLE_KERNELS is set: only {', '.join(allowed)} and the references run")


def show(entries: list[dict[str, Any]]) -> None:
    """Print a table, no wider than the terminal."""
    name_width = max(len(entry["operator"]) for entry in entries) + 2
    runs_width = max(len(entry.get("runs", "")) for entry in entries) + 2
    width = max(name_width + runs_width + 30, min(shutil.get_terminal_size().columns, 120))

    def row(name: str, runs: str, text: str) -> None:
        indent = " " * (name_width + runs_width)
        print(
            textwrap.fill(
                text, width, initial_indent=f"{name:<{name_width}}{runs:<{runs_width}}", subsequent_indent=indent
            )
        )

    row("operator", "runs", "for what (else the reference)")
    for entry in entries:
        if "error" in entry:
            row(entry["operator"], "-", entry["error"])
            continue
        notes = [kernel["takes"] for kernel in entry["kernels"] if not kernel["refused"]]
        notes += [f"{kernel['name']} not here: {kernel['refused']}" for kernel in entry["kernels"] if kernel["refused"]]
        first, *rest = notes or [entry["note"] or "has no kernel yet"]
        row(entry["operator"], entry["runs"], first)
        for note in rest:
            row("", "", note)
