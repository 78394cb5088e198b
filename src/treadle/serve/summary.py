"""What an engine says at its start: every setting that took effect, whoever chose it."""

from __future__ import annotations

import torch

from treadle.config.progress import amount_text
from treadle.serve.engine import Engine
from treadle.serve.kv_cache import KVFormat


def engine_summary(engine: Engine) -> list[str]:
    """Return the lines, one fact each, ready to print."""
    model, capacity = engine.model, engine.capacity
    spec = model.spec
    where = f"{model.device}"
    if model.device.type == "cpu":
        where += f" ({torch.get_num_threads()} threads)"
    stored = KVFormat.of(engine.settings.kv_cache_dtype, model.dtype, model.device).name
    rows = [
        ("model", f"{spec.family}, {amount_text(spec.parameters_count(), 'parameters')}"),
        ("dtype", f"{str(model.dtype).removeprefix('torch.')} on {where}"),
        ("context", f"{capacity.length} tokens (the model's: {spec.max_positions})"),
        (
            "KV cache",
            f"{stored}, {capacity.tokens} tokens in blocks of {capacity.block_size}, "
            f"up to {capacity.seqs} sequences at once, {amount_text(capacity.bytes, 'B')} when full",
        ),
        ("kernels", ", ".join(f"{name}: {kernels}" for name, kernels in engine.probe_kernels().items())),
    ]
    if model.ranks is not None:
        ranks = model.ranks
        where = f", {ranks.node_ranks} on each of {ranks.nodes.nnodes} nodes" if ranks.nodes.nnodes > 1 else ""
        sums = f", sums go through {ranks.rank.sums}" if ranks.rank.sums else ""
        rows.insert(2, ("ranks", f"{ranks.plan.ranks()} ({ranks.plan.describe()}{where}){sums}"))
    if engine.settings.batch is not None:
        rows.append(("batch", engine.policy.describe()))
    rows += [("note", note) for note in (*capacity.notes, *engine.policy.notes)]
    return [f"{name:<9} {text}" for name, text in rows]
