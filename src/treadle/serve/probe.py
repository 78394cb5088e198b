"""Which kernels serve a model: seen in two steps that are run for it, not guessed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from treadle import ops
from treadle.ops.registry import recording
from treadle.serve.batch import LayerGroup, StepBatch
from treadle.serve.capacity import Capacity
from treadle.serve.runner import Runner

PROMPT = 6  # tokens


def probe_kernels(runner: Runner, groups: Sequence[LayerGroup], capacity: Capacity) -> dict[str, str]:
    """Return for each operator the kernels that a prompt and the token after it ran, in words.

    Writes into blocks that no sequence has yet. On several ranks it tells of the first one.
    """
    prompt = max(1, min(PROMPT, capacity.length - 1))
    entries = -(-(prompt + 1) // capacity.block_size)
    if entries > min(capacity.blocks):
        prompt, entries = 1, 1
    table = np.arange(1, entries + 1, dtype=np.int32).tobytes()
    tables = [table] * len(groups)
    with recording() as ran:
        first = StepBatch([0] * prompt, [prompt], [0], [prompt], [prompt - 1], tables)
        logits = runner.step(first).logits
        if prompt < capacity.length and prompt < entries * capacity.block_size:
            runner.step(StepBatch([0], [1], [prompt], [prompt + 1], [0], tables))
        one = torch.ones(1, device=logits.device)
        ops.sample(logits.clone(), one, torch.zeros(1, dtype=torch.int32, device=logits.device), one, 0 * one, 0 * one)
    return {
        operator: " and ".join(_in_words(operator, kernel) for kernel in dict.fromkeys(ran[operator]))
        for operator in ran
    }


def _in_words(operator: str, kernel: str) -> str:
    note = ops.OPERATORS.get(operator).note if kernel == "reference" else ""
    return note or kernel
