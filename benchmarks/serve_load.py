r"""A load generator for any OpenAI-compatible server: latency against load, Treadle beside its peers.

    python benchmarks/serve_load.py treadle=MODEL.gguf llama.cpp=MODEL.gguf vllm=MODEL.gguf --rate 0.5 1 2
    python benchmarks/serve_load.py http://127.0.0.1:8000 --clients 1 4 16 --prompt lognormal:200,0.8 --answer fixed:64
    python benchmarks/serve_load.py treadle=M.gguf 'treadle:bounded=M.gguf --batch {\"max_latency_ms\":300}' --clients 8

Requests come as a Poisson process (--rate, an open loop: a slow server does not slow them down) or from clients that
ask again when they are answered (--clients). Every server gets the same requests at each load, one server after the
other, in turn over the rounds. Prints the ratio first; figures and a picture (SVG) go to benchmarks/results/. The peers
are built by ../shared/peers/setup.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from serving.client import Client, run_load
from serving.report import picture, ratios, summarize, write_result
from serving.servers import Limits, Running, Server, running
from serving.shapes import Lengths, Load, arrivals, asks, read_workload

WORKLOADS = Path(__file__).parents[2] / "shared/peers/workloads.py"
LATE_MS = 20.0  # a generator that is later than this measures itself


def measure(one: Running, load: Load, options: argparse.Namespace, seed: str, count: int) -> dict[str, Any]:
    """Put one load on one server and return the figures."""
    source = asks(options.prompt, options.answer, seed)
    wanted = [next(source) for _ in range(count)]
    client = Client(one.url, one.model, options.api_key, options.chat, options.timeout)
    answers, seconds = asyncio.run(run_load(client, load, wanted, arrivals(load, count, seed)))
    return {"server": one.server.label, "load": str(load), "level": load.level, **summarize(answers, seconds)}


def show(point: dict[str, Any]) -> None:
    """Print one run's line."""

    def of(key: str) -> str:
        values = point[key]
        return f"{values['p50']:.0f} / {values['p99']:.0f}" if values else "none"

    failed = sum(point["errors"].values())
    print(
        f"{point['server']:<16} {point['load']:<16} {point['output_tokens_per_second']:8.1f} tokens/s, ms (p50 / p99): "
        f"first {of('first_token_ms')}, gap {of('gap_ms')}, request {of('request_ms')}"
        + (f", {failed} FAILED: {next(iter(point['errors']))}" if failed else ""),
        flush=True,
    )
    if point["late_ms"] and point["late_ms"]["p99"] > LATE_MS:
        print(f"  the generator was late by {point['late_ms']['p99']:.0f} ms (p99): the load was not quite this one")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "servers", nargs="+", help="KIND[:LABEL]=MODEL [FLAGS] (treadle, llama.cpp, vllm) or an address"
    )
    parser.add_argument("--rate", type=float, nargs="+", default=[], help="requests a second (Poisson)")
    parser.add_argument("--clients", type=int, nargs="+", default=[], help="clients in a closed loop")
    parser.add_argument("--workload", help="a workload of the peers' file: its clients and lengths")
    parser.add_argument("--workloads", type=Path, default=WORKLOADS)
    parser.add_argument("--prompt", type=Lengths.parse, default=Lengths.parse("lognormal:128,0.6,1500"))
    parser.add_argument("--answer", type=Lengths.parse, default=Lengths.parse("uniform:16,96"))
    parser.add_argument("--requests", type=int, default=64, help="at each load, for each server, in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=4, help="requests before the first measurement, not counted")
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--chat", action="store_true", help="chat completions instead of plain ones")
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY", ""))
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one request")
    parser.add_argument("--name", default="serve_load", help="of the result's file")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    options.loads = [Load(rate=rate) for rate in options.rate] + [Load(clients=count) for count in options.clients]
    if options.workload:
        load, options.prompt, options.answer = read_workload(options.workloads, options.workload)
        options.loads.append(load)
    if not options.loads or any(load.level <= 0 for load in options.loads):
        parser.error("give loads: --rate R ..., --clients N ... or --workload NAME")
    if options.rate and len(options.loads) > len(options.rate):
        parser.error("give rates or clients, not both: they would share one axis")
    if options.requests < 1 or options.rounds < 1:
        parser.error("--requests and --rounds are at least 1")
    return options


def main() -> None:
    options = arguments()
    sides = [Server.parse(text) for text in options.servers]
    if len({side.label for side in sides}) < len(sides):
        raise SystemExit("two servers have one label; name them, as in treadle:one=MODEL treadle:two=MODEL")
    limits = Limits(options.max_num_seqs, options.max_model_len, options.threads)
    points: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(running(side, limits)) for side in sides]
        if options.warmup:
            for one in servers:
                measure(one, Load(clients=min(2, options.warmup)), options, "warmup", options.warmup)
        for turn in range(options.rounds):
            for load in options.loads:
                for one in servers if turn % 2 == 0 else reversed(servers):
                    points.append(measure(one, load, options, f"{turn}/{load}", options.requests))
                    show(points[-1])
        startup = {one.server.label: one.startup_seconds for one in servers}
    found = [ratio for other in sides[1:] for ratio in ratios(points, sides[0].label, other.label)]
    for ratio in found:
        print(
            f"{ratio['tokens']:.2f}x the tokens/s of {ratio['against']} at {ratio['load']}; "
            f"p99 between tokens {ratio['p99_gap']:.2f}x, to the first token {ratio['p99_first_token']:.2f}x"
        )
    result = {
        "claim": "latency and throughput under the same load",
        "ratios": found,
        "prompt": str(options.prompt),
        "answer": str(options.answer),
        "max_num_seqs": options.max_num_seqs,
        "startup_seconds": startup,
        "points": points,
    }
    axis = "requests a second" if options.rate else "clients"
    if not options.no_save:
        title = f"Latency against load: prompts {options.prompt}, answers {options.answer} tokens"
        print(f"wrote {write_result(options.out, options.name, result, picture(points, title, axis))}")


if __name__ == "__main__":
    main()
