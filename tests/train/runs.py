"""Small runs for tests: a corpus of real text with both splits and a tokenizer, and settings of a tiny model on it."""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from treadle.config import parse_settings
from treadle.config.files import write_atomically
from treadle.data.shards import Manifest, TokenizerRecord, token_dtype
from treadle.data.writer import SplitWriter, TokenizedDocuments
from treadle.model.tokenizer import Tokenizer
from treadle.parallel.mesh import join
from treadle.train.feed import open_feed
from treadle.train.loop import Outcome, Run
from treadle.train.settings import RunSettings
from treadle.train.signals import StopRequest
from treadle.train.sinks import read_metrics

TINY = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


@functools.cache
def texts() -> list[str]:
    """Return a few source files of the standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    names = (
        "argparse",
        "ast",
        "calendar",
        "cgi",
        "cmd",
        "configparser",
        "csv",
        "difflib",
        "fractions",
        "heapq",
        "shlex",
    )
    return [path.read_text("utf-8") for name in names if (path := folder / f"{name}.py").exists()]


def write_run_corpus(folder: Path, vocabulary_size: int = 512, masked: bool = False, some: int | None = None) -> Path:
    """Write a corpus of `texts` into `folder`; the last document is held out. With `masked` only half is learnt."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.train(texts(), vocabulary_size)
    tokenizer.save(folder / "tokenizer")
    dtype = token_dtype(tokenizer.vocabulary_size)
    splits = {}
    for split, part in (("train", texts()[:-1][:some]), ("validation", texts()[-1:])):
        writer = SplitWriter(folder, split, dtype, 1 << 20)
        for text in part:
            tokens = np.array(tokenizer.encode(text), dtype)
            mask = (np.arange(len(tokens)) // 50 % 2).astype(np.uint8) if masked else None
            lengths = np.array([len(tokens)], np.int64)
            writer.add(TokenizedDocuments(tokens, lengths, mask, False, len(text.encode()), len(text.split())))
        splits[split] = writer.finish()
    record = TokenizerRecord(
        fingerprint=tokenizer.fingerprint, vocabulary_size=tokenizer.vocabulary_size, bos_id=None, eos_id=None
    )
    manifest = Manifest(dtype=dtype, tokenizer=record, splits=splits)
    write_atomically(folder / "manifest.json", manifest.model_dump_json().encode())
    return folder


def run_settings(run: Path, corpus: Path, **changes: Any) -> dict[str, Any]:
    """Return the settings of a tiny fp32 run; `changes` replace keys, sections are merged: train={"steps": 3}."""
    tree: dict[str, Any] = {
        "run": str(run),
        "model": {"config": TINY},
        "data": {"train": [{"path": str(corpus)}], "sequence_length": 32},
        "train": {"steps": 6, "batch_tokens": 384, "precision": "fp32", "device": "cpu"},
        "optimizer": {"lr": 0.01},
        "schedule": {"name": "cosine", "warmup_steps": 2},
        "evaluation": {"every": 0, "tokens": 512},
        "checkpoint": {"every": 0, "asynchronous": False},
    }
    for section, values in changes.items():
        tree[section] = {**tree.get(section, {}), **values} if isinstance(values, dict) else values
    return tree


class Interrupt(StopRequest):
    """Asks a run to stop before it takes its step number `step`."""

    def __init__(self, run: Path, step: int | None) -> None:
        self.metrics, self.step, self.interrupts = run / "metrics.jsonl", step, 0

    @property
    def reason(self) -> str:  # pyrefly: ignore
        if self.step is None or not self.metrics.exists():
            return ""
        return "interrupted" if len(self.metrics.read_text().splitlines()) >= self.step else ""


def go(tree: dict[str, Any], interrupt_at: int | None = None, feed: Any = None) -> Outcome:
    """Carry out a run in this process, up to step `interrupt_at`; the process group may be that of a pool of ranks."""
    settings = parse_settings(RunSettings, tree)
    with join(settings.plan, torch.device("cpu")) as mesh:
        stop = Interrupt(settings.run, interrupt_at)
        return Run(settings, feed or open_feed(settings.data), mesh, stop).go()


def metrics(run: Path) -> list[dict[str, Any]]:
    """Return what a run measured of its steps, without what depends on the clock."""
    keep = ("step", "loss", "gradient_norm", "learning_rate", "tokens", "validation_loss", "skipped", "loss_scale")
    return [{k: v for k, v in record.items() if k in keep} for record in read_metrics(run / "metrics.jsonl")]


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a checkpoint, weights and optimizer."""
    found = {}
    for file in sorted(checkpoint.rglob("*.safetensors")):
        found |= {f"{file.name}/{name}": tensor for name, tensor in load_file(file).items()}
    return found
