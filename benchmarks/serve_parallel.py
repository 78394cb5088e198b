"""What it costs to share a model among processes of one machine: sums between ranks, and decoding with 1 and 2 ranks.

    python benchmarks/serve_parallel.py [--ranks 2 --rounds 5 --tokens 64]

The sums of a decode step and of a prompt, through shared memory and through Gloo, alternating; then the same random
model decodes in one process, tensor-parallel and pipelined, with the same number of threads in all. Ratios come first.
The figures go to benchmarks/results/ with date, machine and versions.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPES = ((1, 576), (16, 576), (1, 4096), (16, 4096), (512, 4096))
CONFIG = {
    "model_type": "llama",
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}


def measure_sums(rank: int, ranks: int, store: str, rounds: int, results: Any) -> None:
    """Run as one rank: put the median seconds of a sum, by shape and way, on the queue."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    from treadle.parallel.exchange import open_exchange

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    exchange = open_exchange(dist.group.WORLD, torch.device("cpu"), 60.0)
    assert exchange is not None, "this machine has no shared memory or no native library"
    found: dict[str, dict[str, float]] = {}
    for shape in SHAPES:
        x, times = torch.ones(shape), {"shared memory": [], "Gloo": []}
        for _ in range(rounds * (10 if shape[0] > 100 else 100)):
            for way, add in (("shared memory", exchange.sum), ("Gloo", dist.all_reduce)):
                begun = time.perf_counter()
                add(x)
                times[way].append(time.perf_counter() - begun)
                x.fill_(1.0)
        found[f"{shape[0]}x{shape[1]}"] = {way: statistics.median(all_) for way, all_ in times.items()}
    if rank == 0:
        results.put(found)
    dist.barrier()
    dist.destroy_process_group()


def sums(ranks: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return the median seconds of a sum by shape and way."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes = [
            context.Process(target=measure_sums, args=(r, ranks, store, rounds, results)) for r in range(ranks)
        ]
        for process in processes:
            process.start()
        found = results.get()
        for process in processes:
            process.join()
    return found


def decode(ranks: int, threads: int, rounds: int, tokens: int) -> dict[str, float]:
    """Return the median tokens a second by layout, one sequence."""
    import torch

    import treadle
    from treadle.model.families import read_spec
    from treadle.model.transformer import Transformer
    from treadle.serve.model import Model

    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        module = Transformer(read_spec(CONFIG), dtype=torch.bfloat16)
        module.initialize(0)
        Model(module).save(Path(folder) / "model")
        for name, layout in (
            ("one process", {}),
            (f"tp={ranks}", {"tensor_parallel_size": ranks}),
            (f"pp={ranks}", {"pipeline_parallel_size": ranks}),
        ):
            torch.set_num_threads(threads)
            with treadle.Engine(Path(folder) / "model", max_num_seqs=1, max_model_len=1024, **layout) as engine:
                speeds = []
                for _ in range(rounds + 1):
                    times = [
                        time.perf_counter()
                        for _ in engine.deltas([1, 2, 3], temperature=0, max_tokens=tokens, ignore_eos=True)
                    ]
                    speeds.append((tokens - 1) / (times[-1] - times[0]))
                found[name] = statistics.median(speeds[1:])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="in all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    import torch

    import treadle

    exchange, speeds = sums(given.ranks, given.rounds), decode(given.ranks, given.threads, given.rounds, given.tokens)
    for shape, ways in exchange.items():
        print(f"{ways['Gloo'] / ways['shared memory']:6.1f} x  sum of {shape}: ", end="")
        print(", ".join(f"{way} {seconds * 1e6:.0f} us" for way, seconds in ways.items()))
    for layout, speed in speeds.items():
        print(f"{speed / speeds['one process']:6.2f} x  decoding, {layout}: {speed:.1f} tokens/s")
    record = {
        "date": datetime.date.today().isoformat(),
        "command": "python " + " ".join(["benchmarks/serve_parallel.py", *sys.argv[1:]]),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "versions": {"treadle": treadle.__version__, "torch": torch.__version__},
        "sum_seconds": exchange,
        "decode_tokens_per_second": speeds,
    }
    path = Path(__file__).parent / "results" / f"serve_parallel-{record['date']}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(f"recorded in {path}")


if __name__ == "__main__":
    main()
