"""Quantized linear layers against what the machine allows: read bandwidth for few tokens, torch's bf16 matmul for many.

    python benchmarks/quantized_linear.py                       # everything, a table and one JSON document
    python benchmarks/quantized_linear.py --only few --format Q4_0 --json result.json

Every measurement alternates with the one that it is compared with, and medians are compared. A ratio is
- few tokens (1 and 4, over weights larger than the last-level cache): bytes of weights per second / read bandwidth;
- many tokens (the shapes of SmolLM2-135M): FLOP/s / those of torch.nn.functional.linear in bf16 with the same threads.
The whole operator is timed: quantizing the activations, the product, PyTorch's dispatch. On a machine that others use,
`--processor-time --threads 1` compares the processor time of one thread instead.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from treadle.device import this_host
from treadle.ops import native, quantized_linear
from treadle.ops.quantized_layout import FORMATS

FEW_BYTES = 96 << 20
MANY = [(576, 576), (192, 576), (1536, 576), (576, 1536), (49152, 576)]  # rows, columns


def alternate(
    works: dict[str, Callable[[], Any]], rounds: int, seconds: float, clock: Callable[[], float]
) -> dict[str, float]:
    """Return each work's median seconds over `rounds` turns of about `seconds` each."""
    repeats = {}
    for name, work in works.items():
        work()
        before = clock()
        work()
        repeats[name] = max(1, round(seconds / (clock() - before)))
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            before = clock()
            for _ in range(repeats[name]):
                work()
            times[name].append((clock() - before) / repeats[name])
    return {name: statistics.median(measured) for name, measured in times.items()}


def random_weights(format: str, rows: int, columns: int) -> torch.Tensor:
    """Return packed weights of finite values; which ones makes no difference to the time."""
    packed = torch.randint(0, 16, (FORMATS[format].packed_bytes(rows, columns),), dtype=torch.uint8)
    return packed * 17 if format != "BF16" else packed


def few(format: str, tokens: int, rounds: int, clock: Callable[[], float], readable: torch.Tensor) -> dict[str, Any]:
    columns = 1536 if FORMATS[format].columns == 256 else 576
    rows = FEW_BYTES // FORMATS[format].packed_bytes(16, columns) * 16
    packed, x = random_weights(format, rows, columns), torch.randn(tokens, columns)
    works = {"ours": lambda: quantized_linear(x, packed, format, rows), "read": readable.sum}
    took = alternate(works, rounds, 0.1, clock)
    ours, read = packed.numel() / took["ours"], readable.nbytes / took["read"]
    return {
        "ratio": round(ours / read, 3),
        "against": "read bandwidth",
        "format": format,
        "rows": rows,
        "columns": columns,
        "tokens": tokens,
        "gigabytes_per_second": round(ours / 1e9, 2),
        "read_gigabytes_per_second": round(read / 1e9, 2),
        "gflop_per_second": round(2 * tokens * rows * columns / took["ours"] / 1e9, 1),
    }


def many(format: str, rows: int, columns: int, tokens: int, rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    packed, x = random_weights(format, rows, columns), torch.randn(tokens, columns)
    short, weight = x.bfloat16(), torch.randn(rows, columns).bfloat16()
    works = {"ours": lambda: quantized_linear(x, packed, format, rows), "torch": lambda: F.linear(short, weight)}
    took = alternate(works, rounds, 0.1, clock)
    work = 2 * tokens * rows * columns / 1e9
    return {
        "ratio": round(took["torch"] / took["ours"], 3),
        "against": "torch bf16 matmul",
        "format": format,
        "rows": rows,
        "columns": columns,
        "tokens": tokens,
        "gflop_per_second": round(work / took["ours"], 1),
        "torch_gflop_per_second": round(work / took["torch"], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["few", "many"])
    parser.add_argument("--format", action="append", choices=list(FORMATS))
    parser.add_argument("--tokens", type=int, default=1024, help="of the many (the output head takes half)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--processor-time", action="store_true", help="instead of wall-clock time; with one thread")
    parser.add_argument("--json", type=Path, help="where to write the results")
    chosen = parser.parse_args()
    if reason := native.missing():
        sys.exit(f"there are no native kernels to measure: {reason}")
    if chosen.processor_time and chosen.threads != 1:
        sys.exit("--processor-time needs --threads 1: threads that wait use processor time too")
    torch.set_num_threads(chosen.threads)
    clock = time.process_time if chosen.processor_time else time.perf_counter
    results: list[dict[str, Any]] = []

    def add(result: dict[str, Any]) -> None:
        results.append(result)
        print("  ".join(f"{value}" for value in result.values()), flush=True)

    readable = torch.ones(256 << 18)
    for format in chosen.format or ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "BF16"]:
        if chosen.only != "many":
            for tokens in (1, 4):
                add(few(format, tokens, chosen.rounds, clock, readable))
        if chosen.only != "few":
            for rows, columns in MANY:
                if columns % FORMATS[format].columns == 0:
                    tokens = chosen.tokens if rows < 4096 else chosen.tokens // 2
                    add(many(format, rows, columns, tokens, chosen.rounds, clock))
    document = {
        "command": " ".join(sys.argv),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
        "processor": this_host().processor,
        "variant": native.variant(),
        "threads": chosen.threads,
        "clock": clock.__name__,
        "torch": torch.__version__,
        "results": results,
    }
    if chosen.json:
        chosen.json.write_text(json.dumps(document, indent=1) + "\n")
    else:
        print(json.dumps(document))


if __name__ == "__main__":
    main()
