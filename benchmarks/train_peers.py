"""Training speed beside Transformers: a 15.7M-parameter Llama, the same batch, optimizer and precision, alternating.

    python benchmarks/train_peers.py                 prints the ratio first, then each side's median tokens a second
    python benchmarks/train_peers.py --rounds 5 --processes 2

Each round starts a fresh process of each side in turn, which trains a few steps and reports its median step. Both run
AdamW with clipping on batches of 8 x 512 random tokens, bf16 with fp32 masters (Transformers by autocast), eagerly.
The figures go to benchmarks/results/ with the date, machine and versions.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BATCH, LENGTH, VOCABULARY = 8, 512, 8192
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": True,
}


def transformers_side(precision: str, steps: int, threads: int) -> dict[str, Any]:
    """Train with Transformers' own model in the usual loop."""
    started = time.perf_counter()
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return timed(step, steps, started)


def treadle_side(precision: str, steps: int, threads: int, microbatches: int) -> dict[str, Any]:
    """Train with Treadle's own step, as `treadle train` does, on this process's share of the batch."""
    started = time.perf_counter()
    import torch

    from treadle.data.loader import PackedBatch
    from treadle.model.families import read_spec
    from treadle.model.transformer import Transformer
    from treadle.parallel import Plan, join
    from treadle.train.build import initialize, lay_out
    from treadle.train.optimizers import OptimizerSettings, build_optimizer
    from treadle.train.state import TrainState
    from treadle.train.step import train_step

    torch.set_num_threads(threads)
    with join(Plan(), torch.device("cpu")) as mesh:
        model = Transformer(read_spec(CONFIG), device="meta")
        lay_out(model, mesh, precision, "none", False)
        initialize(model, seed=0)
        optimizer = build_optimizer(OptimizerSettings(lr=3e-4), list(model.named_parameters()))
        state = TrainState(model, optimizer)
        torch.manual_seed(mesh.rank)
        sequences = BATCH // mesh.size // microbatches
        batches = []
        for _ in range(microbatches):
            tokens = torch.randint(0, VOCABULARY, (sequences * LENGTH,))
            starts = torch.arange(0, len(tokens) + 1, LENGTH, dtype=torch.int32)
            positions = torch.arange(LENGTH).repeat(sequences)
            batches.append(
                PackedBatch(tokens, tokens.roll(-1), positions, starts, LENGTH, torch.ones(len(tokens)), sequences, 0)
            )
        result = timed(lambda: train_step(state, batches, mesh.device, 1.0), steps, started)
        return result if mesh.first else {}


def timed(step: Callable[[], Any], steps: int, started: float) -> dict[str, Any]:
    """Return the median speed of `steps` steps, after two that are not counted."""
    step()
    first = time.perf_counter() - started
    step()
    seconds = []
    for _ in range(steps):
        before = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - before)
    speed = BATCH * LENGTH / statistics.median(seconds)
    return {"tokens_per_second": round(speed, 1), "seconds_to_first_step": round(first, 1)}


def run_side(side: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one side in fresh processes and return what it reports."""
    threads = arguments.threads or max(1, len(os.sched_getaffinity(0)))
    processes = arguments.processes if side == "treadle" else 1
    words = [sys.executable, __file__, "--side", side, "--precision", arguments.precision]
    words += ["--steps", str(arguments.steps), "--threads", str(max(1, threads // processes))]
    words += ["--microbatches", str(arguments.microbatches)]
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for rank in range(processes):
            environment = dict(os.environ)
            if processes > 1:
                environment.update(RANK=str(rank), WORLD_SIZE=str(processes), LOCAL_RANK=str(rank))
                environment.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(20000 + os.getpid() % 20000))
            out = Path(folder, f"{rank}.json")
            with out.open("w") as file:
                running.append((out, subprocess.Popen(words, stdout=file, env=environment)))
        for _, process in running:
            if process.wait():
                sys.exit(f"{side} failed")
        return json.loads(running[0][0].read_text().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--threads", type=int, default=0, help="all together (default: this machine's cores)")
    parser.add_argument("--processes", type=int, default=1, help="of Treadle; Transformers runs in one")
    parser.add_argument("--microbatches", type=int, default=1, help="into which Treadle cuts the batch")
    parser.add_argument("--no-save", action="store_true", help="write nothing into benchmarks/results")
    parser.add_argument("--side", choices=("treadle", "transformers"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side == "transformers":
        print(json.dumps(transformers_side(arguments.precision, arguments.steps, arguments.threads)))
        return
    if arguments.side == "treadle":
        print(json.dumps(treadle_side(arguments.precision, arguments.steps, arguments.threads, arguments.microbatches)))
        return
    rounds: dict[str, list[dict[str, Any]]] = {"treadle": [], "transformers": []}
    for number in range(arguments.rounds):
        for side in ("treadle", "transformers") if number % 2 == 0 else ("transformers", "treadle"):
            rounds[side].append(run_side(side, arguments))
            print(f"round {number + 1}: {side} {rounds[side][-1]['tokens_per_second']:,.0f} tokens/s", file=sys.stderr)
    medians = {side: statistics.median(run["tokens_per_second"] for run in runs) for side, runs in rounds.items()}
    ratio = medians["treadle"] / medians["transformers"]
    print(f"ratio {ratio:.2f}  treadle {medians['treadle']:,.0f}  transformers {medians['transformers']:,.0f} tokens/s")
    if not arguments.no_save:
        save(arguments, ratio, medians, rounds)


def save(arguments: argparse.Namespace, ratio: float, medians: dict[str, float], rounds: dict[str, Any]) -> None:
    """Write the figures with all that is needed to judge and repeat them."""
    import torch
    import transformers

    import treadle
    from treadle.device.host import cores, processor

    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    result = {
        "ratio": round(ratio, 3),
        "tokens_per_second": medians,
        "what": "training a 15.7M-parameter Llama, 8 x 512 tokens a step; Treadle against Transformers eager",
        "precision": arguments.precision,
        "treadle_processes": arguments.processes,
        "date": today,
        "machine": f"{processor()}, {cores()} cores",
        "versions": {
            "treadle": treadle.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "command": " ".join(["python", "benchmarks/train_peers.py", *sys.argv[1:]]),
        "rounds": rounds,
    }
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    name = f"train_peers-{arguments.precision}-{arguments.processes}p-{today}.json"
    (folder / name).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
