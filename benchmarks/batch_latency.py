"""Dynamic batching on a real engine: gaps between tokens stay within a bound that the plain scheduler breaks.

    python benchmarks/batch_latency.py MODEL.gguf [--requests 96 --rounds 3 --max-num-seqs 16 --bound-ms 250]

Clients in a closed loop keep the engine full with prompts of mixed lengths. The bound is chosen from what was measured
on this machine (unless --bound-ms names it): between a step of answers alone and the plain scheduler's 99th percentile.
Then both policies serve the same requests in turn. Prints the ratio of throughput first; figures go to
benchmarks/results/ with date, machine and command. Exits with 1 where the claim does not hold.
"""

from __future__ import annotations

import argparse
import os
import queue
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from serving.report import percentiles, write_result
from serving.shapes import Lengths

if TYPE_CHECKING:
    from treadle.serve.engine import Engine
    from treadle.serve.model import Model
    from treadle.serve.request import Delta

LEAST_RATIO = 0.9  # of the plain policy's throughput
ANSWER_STEPS = 3.0  # the bound is at least so many steps of answers alone, so that prompts find room beside them


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    answer: int


@dataclass
class Run:
    """What one run gave: seconds between the tokens of an answer, to the first one, in all; tokens computed."""

    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0

    @property
    def throughput(self) -> float:
        return self.tokens / self.seconds

    def figures(self) -> dict[str, Any]:
        return {
            "gap_ms": percentiles(1000 * gap for gap in self.gaps),
            "first_token_ms": percentiles(1000 * first for first in self.first),
            "tokens_per_second": round(self.throughput, 1),
            "seconds": round(self.seconds, 2),
        }


def requests_of(options: argparse.Namespace, vocabulary: int, seed: int) -> list[Request]:
    """Return the requests of one round: random tokens, no two prompts alike."""
    dice = random.Random(seed)
    found = []
    for _ in range(options.requests):
        answer = options.answer.draw(dice)
        length = min(options.prompt.draw(dice), options.max_model_len - answer)
        found.append(Request(tuple(dice.randrange(10, vocabulary) for _ in range(length)), answer))
    return found


def drive(engine: Engine, requests: list[Request], clients: int) -> Run:
    """Let `clients` clients ask one request after the other; times are those at which the engine hands tokens over."""
    from treadle.serve.request import SamplingSettings

    run, finished = Run(), queue.SimpleQueue[str]()
    waiting = list(reversed(requests))

    def ask() -> None:
        request, asked, last = waiting.pop(), time.perf_counter(), 0.0

        def deliver(delta: Delta) -> None:
            nonlocal last
            now = time.perf_counter()
            if delta.tokens:
                run.gaps.append(now - last) if last else run.first.append(now - asked)
                last = now
            if delta.finish_reason is not None:
                finished.put(delta.error or "")

        settings = SamplingSettings(temperature=0, max_tokens=request.answer, ignore_eos=True)
        engine.submit(list(request.prompt), settings, deliver)

    begun = time.perf_counter()
    for _ in range(min(clients, len(requests))):
        ask()
    for _ in requests:
        if error := finished.get():
            raise SystemExit(error)
        if waiting:
            ask()
    run.seconds = time.perf_counter() - begun
    run.tokens = sum(len(request.prompt) + request.answer for request in requests)
    return run


def answers_alone(model: Model, options: argparse.Namespace) -> float:
    """Return the median seconds of a step in which all sequences decode and no prompt comes."""
    from treadle.serve.engine import Engine

    with Engine(model, **settings_of(options)) as engine:
        dice = random.Random(0)
        vocabulary = model.spec.vocabulary
        prompts = [tuple(dice.randrange(10, vocabulary) for _ in range(32)) for _ in range(options.max_num_seqs)]
        drive(engine, [Request(prompt, 4) for prompt in prompts], options.max_num_seqs)
        run = drive(engine, [Request(prompt[::-1], 16) for prompt in prompts], options.max_num_seqs)
    return statistics.median(run.gaps)


def settings_of(options: argparse.Namespace, bound: float | None = None) -> dict[str, Any]:
    batch = None if bound is None else {"max_latency_ms": 1000 * bound, "strategy": options.strategy}
    return {
        "max_num_seqs": options.max_num_seqs,
        "max_model_len": options.max_model_len,
        "enable_prefix_caching": False,
        "batch": batch,
    }


def serve(model: Model, options: argparse.Namespace, seed: int, bound: float | None = None) -> Run:
    """Serve one round with the plain policy, or within a bound."""
    from treadle.serve.engine import Engine

    with Engine(model, **settings_of(options, bound)) as engine:
        run = drive(engine, requests_of(options, model.spec.vocabulary, seed), options.clients or options.max_num_seqs)
    name = "plain" if bound is None else "bounded"
    gap = percentiles(1000 * one for one in run.gaps)
    print(
        f"{name:<8} {run.throughput:8.1f} tokens/s, between tokens p50 {gap['p50']:.0f} ms, p99 {gap['p99']:.0f} ms, "
        f"first token p50 {percentiles(1000 * one for one in run.first)['p50']:.0f} ms",
        flush=True,
    )
    return run


def choose_bound(alone: float, plain: Run) -> float:
    """Return the bound in seconds: the geometric mean of what answers alone take and what the plain policy lets happen,
    to two digits, and some steps of answers alone at least."""
    broken = percentiles(plain.gaps)["p99"]
    bound = max((alone * broken) ** 0.5, ANSWER_STEPS * alone)
    return float(f"{1000 * bound:.2g}") / 1000


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file or a Hugging Face directory")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompt", type=Lengths.parse, default=Lengths.parse("lognormal:250,0.8,1800"))
    parser.add_argument("--answer", type=Lengths.parse, default=Lengths.parse("uniform:16,96"))
    parser.add_argument("--requests", type=int, default=96, help="in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=0, help="default: as many as sequences fit")
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--bound-ms", type=float, default=0.0)
    parser.add_argument("--strategy", choices=("length_aware", "fcfs"), default="length_aware")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--no-save", action="store_true")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    import torch

    import treadle

    if options.threads:
        torch.set_num_threads(options.threads)
    model = treadle.load(options.model, None if options.dtype == "auto" else options.dtype)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TREADLE_CACHE"] = cache  # what is learned lasts from round to round, and no longer
        alone = answers_alone(model, options)
        print(f"a step of {options.max_num_seqs} answers takes {1000 * alone:.0f} ms", flush=True)
        pilot = serve(model, options, seed=0)
        bound = options.bound_ms / 1000 or choose_bound(alone, pilot)
        print(f"the bound is {1000 * bound:.0f} ms", flush=True)
        cold = serve(model, options, 0, bound)
        plain, bounded = [], []
        for turn in range(1, options.rounds + 1):
            for which in (plain, bounded) if turn % 2 else (bounded, plain):
                which.append(serve(model, options, turn, bound if which is bounded else None))
    gaps = {name: [gap for run in runs for gap in run.gaps] for name, runs in (("plain", plain), ("bounded", bounded))}
    p99 = {name: percentiles(1000 * gap for gap in found)["p99"] for name, found in gaps.items()}
    # Of one round each, next to each other in time, so that what else the machine did matters least.
    ratio = statistics.median(two.throughput / one.throughput for one, two in zip(plain, bounded, strict=True))
    holds = p99["bounded"] <= 1000 * bound < p99["plain"] and ratio >= LEAST_RATIO
    print(
        f"{ratio:.2f}x the plain policy's tokens/s; p99 between tokens {p99['bounded']:.0f} ms within a bound of "
        f"{1000 * bound:.0f} ms, plain {p99['plain']:.0f} ms: {'holds' if holds else 'DOES NOT HOLD'}"
    )
    result = {
        "claim": "p99 between tokens stays within a bound that the plain scheduler breaks, at 90% of its throughput",
        "holds": holds,
        "ratio": round(ratio, 3),
        "bound_ms": 1000 * bound,
        "p99_gap_ms": p99,
        "share_over_bound": {
            name: round(sum(gap > bound for gap in found) / len(found), 5) for name, found in gaps.items()
        },
        "answers_alone_ms": round(1000 * alone, 2),
        "cold": cold.figures(),
        "plain": [run.figures() for run in plain],
        "bounded": [run.figures() for run in bounded],
        "prompt": str(options.prompt),
        "answer": str(options.answer),
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__},
    }
    if not options.no_save:
        print(f"wrote {write_result(options.out, 'batch_latency', result)}")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
