"""Decoding speed beside Transformers: SmolLM2-135M-Instruct, one sequence, greedy, the same tokens, alternating.

    python benchmarks/decode_peers.py MODEL.gguf [--dtype float32 --tokens 64 --rounds 5 --threads 2]

Prints the ratio first, then each side's median tokens a second, the first token left out. Both sides hold the same
weights in the same dtype in the same process. The figures go to benchmarks/results/ with date, machine and versions.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPT = "The history of the loom begins with"


def treadle_side(path: str, dtype: str, tokens: int) -> Callable[[], tuple[float, list[int]]]:
    """Return a function that decodes once through the engine: (tokens a second, the tokens)."""
    import treadle

    engine = treadle.Engine(treadle.load(path, dtype), max_num_seqs=1, max_model_len=1024)

    def run() -> tuple[float, list[int]]:
        made: list[int] = []
        first = 0.0
        for delta in engine.deltas(PROMPT, temperature=0, max_tokens=tokens, ignore_eos=True):
            first = first or time.perf_counter()
            made += delta.tokens
        return (tokens - 1) / (time.perf_counter() - first), made

    return run


def transformers_side(path: str, dtype: str, tokens: int) -> Callable[[], tuple[float, list[int]]]:
    """The same with Transformers' generate."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.generation.streamers import BaseStreamer

    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    ids = AutoTokenizer.from_pretrained(path)(PROMPT, return_tensors="pt")["input_ids"]

    class Clock(BaseStreamer):
        """Notes when each token comes; the first call brings the prompt."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: Any) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    def run() -> tuple[float, list[int]]:
        clock = Clock()
        out = model.generate(
            ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, streamer=clock, eos_token_id=None
        )
        return (tokens - 1) / (clock.times[-1] - clock.times[1]), out[0, ids.shape[1] :].tolist()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file or a Hugging Face directory")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()

    import torch
    import transformers

    import treadle

    if options.threads:
        torch.set_num_threads(options.threads)
    speeds: dict[str, list[float]] = {"treadle": [], "transformers": []}
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model")
        treadle.load(options.model, options.dtype).save(path)
        sides = {
            "treadle": treadle_side(path, options.dtype, options.tokens),
            "transformers": transformers_side(path, options.dtype, options.tokens),
        }
        made = {name: run()[1] for name, run in sides.items()}  # warms up
        for _ in range(options.rounds):
            for name, run in sides.items():
                speeds[name].append(run()[0])
    medians = {name: statistics.median(found) for name, found in speeds.items()}
    ratio = medians["treadle"] / medians["transformers"]
    result = {
        "claim": "one sequence decodes at least as fast as with Transformers",
        "ratio": round(ratio, 3),
        "tokens_per_second": {name: round(median, 1) for name, median in medians.items()},
        "all": {name: [round(speed, 1) for speed in found] for name, found in speeds.items()},
        "same_tokens": made["treadle"] == made["transformers"],
        "dtype": options.dtype,
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "command": " ".join(["python", "benchmarks/decode_peers.py", Path(options.model).name, *sys.argv[2:]]),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }
    print(f"{ratio:.2f}x Transformers: {result['tokens_per_second']} tokens/s, same tokens: {result['same_tokens']}")
    options.out.mkdir(parents=True, exist_ok=True)
    name = f"decode_peers-{options.dtype}-{result['date']}.json"
    (options.out / name).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
