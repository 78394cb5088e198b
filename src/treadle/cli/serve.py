"""`treadle serve`: a model over HTTP, OpenAI's API."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import typer

from treadle.cli import verb_app
from treadle.config import UserError

app = verb_app("Serve a model over HTTP (OpenAI's chat and text completions, streaming or not).")


@app.command()
def serve(
    model: str = typer.Argument(help="A Hugging Face directory, a checkpoint or a GGUF file."),
    host: str = typer.Option("127.0.0.1", help="The address to listen on; the default is reached from here only."),
    port: int = typer.Option(8000, help="The port; 0 takes any free one and says which."),
    api_key: str = typer.Option("", envvar="TREADLE_API_KEY", help="Require this key (Authorization: Bearer KEY)."),
    served_model_name: list[str] = typer.Option(
        [], help="The name that clients ask for (default: the file's or folder's); repeat it for more."
    ),
    max_num_seqs: int = typer.Option(None, min=1, help="Sequences at once (default: 16, fewer if memory is short)."),
    max_model_len: int = typer.Option(
        None,
        min=1,
        help="Tokens of the longest sequence with its answer (default: the model's, less if memory is short).",
    ),
    max_num_batched_tokens: int = typer.Option(2048, min=1, help="A step starts no prompt beyond this many tokens."),
    dtype: str = typer.Option("auto", help="auto (the checkpoint's), float32, bfloat16 or float16."),
    device: str = typer.Option(None, help="cpu, cuda, ... (default: the accelerator, where there is one)."),
    seed: int = typer.Option(None, help="Makes requests that carry no seed repeatable, in their order."),
    shutdown_timeout: float = typer.Option(30.0, min=0, help="Seconds that running requests get to finish at the end."),
) -> None:
    # Until requests are served there is nothing to finish: being asked to stop is a good end at once.
    settings = {
        "max_num_seqs": max_num_seqs,
        "max_model_len": max_model_len,
        "max_num_batched_tokens": max_num_batched_tokens,
        "seed": seed,
    }
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        _serve(model, host, port, api_key, served_model_name, shutdown_timeout, dtype, device, settings)
    finally:
        signal.signal(signal.SIGTERM, before)


def _serve(
    model: str,
    host: str,
    port: int,
    api_key: str,
    served_model_name: list[str],
    shutdown_timeout: float,
    dtype: str,
    device: str | None,
    settings: dict[str, Any],
) -> None:
    """Take the port, then load the model, then serve it until asked to stop."""
    from treadle.serve.api.server import address_of, is_loopback, open_socket, run_server

    if any(not name.strip() for name in served_model_name):
        raise UserError("--served-model-name is empty; give the name that clients ask for, or leave it out")
    opened = open_socket(host, port)
    if not is_loopback(opened) and not api_key:
        print(
            f"warning: {host} is reached from other machines and there is no --api-key: whoever reaches it can use it",
            file=sys.stderr,
            flush=True,
        )

    from treadle.serve.api.app import create_app
    from treadle.serve.engine import Engine
    from treadle.serve.model import load
    from treadle.serve.summary import engine_summary

    names = served_model_name or [default_name(model)]
    with Engine(load(model, dtype, device), **settings) as engine:
        for line in engine_summary(engine):
            print(line, flush=True)
        ready = [f"Serving {', '.join(names)} at {address_of(opened)} (OpenAI's API below /v1)"]
        run_server(create_app(engine, names, api_key or None), engine, opened, ready, shutdown_timeout)
    print("Stopped.", flush=True)


def default_name(model: str) -> str:
    """Return the name that a model is served under: that of its folder or file, without what follows the last dot."""
    path = Path(os.path.abspath(model))
    return path.stem if path.suffix == ".gguf" else path.name
