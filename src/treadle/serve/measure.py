"""What a step takes in memory, measured on the model itself."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from treadle.model.context import PackedContext
from treadle.model.spec import ModelSpec
from treadle.model.transformer import Transformer

SMALL, LARGE = 64, 256  # tokens of the two steps that are measured
MARGIN = 1.25
PEAK = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Activations:
    """What a forward pass takes beside the weights: bytes whatever the tokens, and bytes a token."""

    fixed: float
    each: float


def step_bytes_of(module: Transformer, step_tokens: int) -> Callable[[int, int], int]:
    """Return the function that `fit_capacity` asks: bytes that the largest step takes, by (sequences, length)."""
    return step_bytes(module.spec, module.dtype.itemsize, activations(module), step_tokens)


def step_bytes(spec: ModelSpec, element: int, measured: Activations, step_tokens: int) -> Callable[[int, int], int]:
    """Return the same for a model, or a rank's part of one, of `element` bytes a number, whose activations are known.

    What short steps do not show (the logits of all sequences, the keys and values of the longest gathered for one
    attention) is added.
    """
    widest = max(2 * layer.attention.kv_heads * layer.attention.head_size for layer in spec.layers)

    def largest(sequences: int, length: int) -> int:
        logits = 3 * sequences * spec.vocabulary * 4  # as computed, in fp32, as adjusted for sampling
        gathered = length * widest * (element + 4) + min(step_tokens, length) * length * element
        return int(MARGIN * (measured.fixed + measured.each * step_tokens)) + logits + gathered

    return largest


def activations(module: Transformer) -> Activations:
    """Measure a forward pass. They grow in proportion to the tokens, so two short steps tell what the longest takes.

    Of a model that is laid out over ranks, every rank of a stage measures its part at the same time.
    """
    small, large = _peak(module, SMALL), _peak(module, LARGE)
    each = max(0.0, (large - small) / (LARGE - SMALL))
    spec = module.spec if module.layout is None else module.layout.local
    # A floor by what must be there: the residual stream and the widest thing beside it.
    widest = max(2 * layer.mlp.width + 3 * spec.width for layer in spec.layers)
    each = max(each, widest * module.dtype.itemsize)
    return Activations(max(0.0, small - each * SMALL), each)


def _peak(module: Transformer, tokens: int) -> int:
    """Return how far a forward pass of so many tokens raises the memory in use above what was in use before."""
    device, spec = module.device, module.spec
    tokens = min(tokens, spec.max_positions)
    inputs = torch.zeros(tokens, dtype=torch.int64, device=device)
    if module.layout is not None and not module.layout.first:
        inputs = torch.zeros(tokens, spec.width, dtype=module.dtype, device=device)
    gc.collect()
    with torch.inference_mode():
        if device.type == "cpu":
            before = _reset_peak()
            module.hidden(inputs, PackedContext.of_lengths([tokens], device))
            return max(0, _status("VmHWM") - before)
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
        module.hidden(inputs, PackedContext.of_lengths([tokens], device))
        return torch.accelerator.max_memory_allocated(device) - before


def _reset_peak() -> int:
    """Let the kernel's high-water mark of this process begin again at what is in use now; returns that."""
    try:
        PEAK.write_text("5")
    except OSError:
        return _status("VmHWM")  # then only what exceeds the highest point so far is seen; the floor above holds
    return _status("VmRSS")


def _status(field: str) -> int:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
