"""Speed of preparing data and of making batches.

    python benchmarks/data.py [--workers 2 --rounds 3 --vocabulary 8192]

Prepares the Python standard library's own source with a tokenizer trained on it beforehand (median of the rounds, from
the start of reading to the manifest), then times microbatches of 8 x 512 tokens of that corpus, made in place. The
figures go to benchmarks/results/ with date, machine and versions.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

GOAL_MB_PER_SECOND = 4.0


def prepare_speed(folder: Path, workers: int, rounds: int, vocabulary: int) -> dict[str, float]:
    """Return megabytes of text a second, each round into a new folder."""
    from treadle.data.prepare import PrepareSettings, prepare

    source = sysconfig.get_paths()["stdlib"]
    common: dict[str, Any] = {"sources": [f"{source}/**/*.py"], "exclude": ["*/site-packages/*"], "workers": workers}
    prepare(PrepareSettings(out=folder / "first", train_tokenizer=vocabulary, **common))
    speeds = []
    for number in range(rounds):
        started = time.perf_counter()
        settings = PrepareSettings(out=folder / f"round-{number}", tokenizer=str(folder / "first"), **common)
        report = prepare(settings)
        text = sum(split.bytes for split in report.manifest.splits.values())
        speeds.append(text / 1e6 / (time.perf_counter() - started))
    return {"MB_per_second": statistics.median(speeds), "text_MB": text / 1e6}


def batch_milliseconds(corpus: Path, mode: str, steps: int = 400) -> float:
    """Return the median milliseconds of one microbatch of 8 x 512 tokens, made without the thread that works ahead."""
    from treadle.data import Corpus, Mixture, batches

    mixture = Mixture([(Corpus.open(corpus), 1.0)], 512, mode=mode)  # pyrefly: ignore
    stream = batches(mixture, 0, 8, microbatch_samples=8, ahead=0)
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        next(stream)
        times.append(time.perf_counter() - started)
    return 1e3 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        speed = prepare_speed(Path(scratch), chosen.workers, chosen.rounds, chosen.vocabulary)
        batch = {mode: batch_milliseconds(Path(scratch) / "first", mode) for mode in ("concat", "whole")}
    ratio = speed["MB_per_second"] / GOAL_MB_PER_SECOND
    print(f"{ratio:.2f}x the goal of {GOAL_MB_PER_SECOND:.0f} MB/s: {speed}, {chosen.workers} workers")
    print(", ".join(f"{mode} {took:.2f} ms" for mode, took in batch.items()), "for a batch of 8 x 512")
    import tokenizers
    import torch

    from treadle.device.host import this_host

    result = {
        "claim": "data is prepared at 4 MB/s of text or more on two cores, and a batch is made in under 1 ms",
        "ratio": round(ratio, 3),
        "prepare": {key: round(value, 2) for key, value in speed.items()},
        "batch_milliseconds": {mode: round(took, 3) for mode, took in batch.items()},
        "workers": chosen.workers,
        "machine": this_host().facts(),
        "versions": {"tokenizers": tokenizers.__version__, "torch": torch.__version__},
        "command": " ".join(["python", "benchmarks/data.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }
    chosen.out.mkdir(parents=True, exist_ok=True)
    (chosen.out / f"data-{result['date']}.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
