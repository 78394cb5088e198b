"""What a quantized KV cache costs in quality: SmolLM2-135M-Instruct on texts of 4096 tokens, each token told the last.

    python benchmarks/kv_quality.py MODEL.gguf [--dtype float32 --tokens 4096 --formats int8,int4 --threads 2]

For each format and text: the Kullback-Leibler divergence of the next token's distribution from that of the unquantized
cache (mean and largest, in nats), and how often both find the same token likeliest. The texts are sources of Python's
standard library. Exits with 1 where a bound is broken. The figures go to benchmarks/results/ with date, machine,
versions and command.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import platform
import statistics
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import treadle
from treadle.device import this_host
from treadle.model.transformer import Transformer
from treadle.serve.batch import StepBatch, layer_groups
from treadle.serve.kv_cache import KVCache, KVFormat, group_bytes_per_token
from treadle.serve.paged import PagedContext

TEXTS = ("argparse", "typing", "statistics", "inspect")
# The greatest mean divergence, and the least growth of capacity over bfloat16.
BOUNDS = {"int8": (0.005, 1.9), "int4": (0.05, 3.5)}
BLOCK_SIZE = 16


@torch.inference_mode()
def hidden_states(module: Transformer, tokens: list[int], format: KVFormat, step: int = 512) -> Tensor:
    """Return what the head reads at every token, computed in steps over a cache of the format: [T, D]."""
    blocks = -(-len(tokens) // BLOCK_SIZE)
    groups = layer_groups(module.spec)
    cache = KVCache(module.spec, groups, [blocks + 1] * len(groups), BLOCK_SIZE, format)
    table = np.arange(1, blocks + 1, dtype=np.int32).tobytes()
    found = []
    for past in range(0, len(tokens), step):
        new = tokens[past : past + step]
        end = past + len(new)
        batch = StepBatch(new, [len(new)], [past], [end], [len(new) - 1], [table] * len(groups))
        found.append(module.norm(module.hidden(torch.tensor(new), PagedContext(cache, batch))))
    return torch.cat(found)


@torch.inference_mode()
def compare(module: Transformer, exact: Tensor, other: Tensor) -> dict[str, float]:
    """Return the divergence of what `other` says from what `exact` says."""
    divergences, same = [], 0
    for begin in range(0, len(exact), 256):
        rows = slice(begin, begin + 256)
        p, q = (module.logits(x[rows]).double().log_softmax(-1) for x in (exact, other))
        divergences.append((p.exp() * (p - q)).sum(-1))
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
    every = torch.cat(divergences)
    return {"mean_kl": float(every.mean()), "max_kl": float(every.max()), "same_top": same / len(exact)}


def source(name: str) -> str:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")


def measure(model: treadle.Model, formats: list[str], length: int) -> dict[str, dict]:
    """Return the figures of each format."""
    assert model.tokenizer is not None
    plain = KVFormat.of("auto", model.dtype)
    found: dict[str, dict] = {name: {"texts": {}} for name in formats}
    for text in TEXTS:
        tokens = model.tokenizer.encode(source(text))[:length]
        if len(tokens) < length:
            raise SystemExit(f"{text}.py has only {len(tokens)} tokens, {length} are needed")
        exact = hidden_states(model.module, tokens, plain)
        for name in formats:
            other = hidden_states(model.module, tokens, KVFormat.of(name, model.dtype))
            figures = compare(model.module, exact, other)
            found[name]["texts"][text] = {key: round(value, 6) for key, value in figures.items()}
            print(f"{name} {text}: {found[name]['texts'][text]}", flush=True)
    groups = layer_groups(model.spec)
    for name, entry in found.items():
        sizes = [
            sum(group_bytes_per_token(model.spec, group, KVFormat.of(one, model.dtype)) for group in groups)
            for one in ("bf16", name)
        ]
        texts = entry["texts"].values()
        entry["mean_kl"] = round(statistics.fmean(one["mean_kl"] for one in texts), 6)
        entry["max_kl"] = max(one["max_kl"] for one in texts)
        entry["same_top"] = round(statistics.fmean(one["same_top"] for one in texts), 4)
        entry["bytes_per_token"], entry["capacity_over_bf16"] = sizes[1], round(sizes[0] / sizes[1], 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file or a Hugging Face directory")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--formats", default="int8,int4")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    formats = options.formats.split(",")
    figures = measure(treadle.load(options.model, options.dtype), formats, options.tokens)
    broken = [
        f"{name}: mean KL {figures[name]['mean_kl']}, {figures[name]['capacity_over_bf16']}x the capacity"
        for name in formats
        if name in BOUNDS
        and (
            max(one["mean_kl"] for one in figures[name]["texts"].values()) > BOUNDS[name][0]
            or figures[name]["capacity_over_bf16"] < BOUNDS[name][1]
        )
    ]
    result = {
        "claim": "mean KL at most 0.005 with int8 and 0.05 with int4 on every text, 1.9 and 3.5 times bf16's capacity",
        "holds": not broken,
        "formats": figures,
        "tokens": options.tokens,
        "dtype": options.dtype,
        "machine": this_host().facts(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "command": " ".join(["python", "benchmarks/kv_quality.py", Path(options.model).name, *sys.argv[2:]]),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"kv_quality-{options.dtype}-{result['date']}.json").write_text(json.dumps(result, indent=2) + "\n")
    for name, entry in figures.items():
        print(
            f"{name}: mean KL {entry['mean_kl']}, same token {entry['same_top']}, {entry['capacity_over_bf16']}x bf16"
        )
    if broken:
        raise SystemExit("the bound is broken for " + "; ".join(broken))


if __name__ == "__main__":
    main()
