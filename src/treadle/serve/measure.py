"""What a step takes in memory, measured on the model itself."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import torch

from treadle.model.context import PackedContext
from treadle.model.transformer import Transformer

SMALL, LARGE = 64, 256  # tokens of the two steps that are measured
MARGIN = 1.25
PEAK = Path("/proc/self/clear_refs")


def step_bytes_of(module: Transformer, step_tokens: int) -> Callable[[int, int], int]:
    """Return the function that `fit_capacity` asks: bytes that the largest step takes, by (sequences, length).

    Activations grow in proportion to the tokens, so two short steps tell what the longest takes; what they do not
    show (the logits of all sequences, the keys and values of the longest gathered for one attention) is added.
    """
    fixed, each = _activations(module)
    spec = module.spec
    widest = max(2 * layer.attention.kv_heads * layer.attention.head_size for layer in spec.layers)
    element = module.embedding.weight.element_size()

    def step_bytes(sequences: int, length: int) -> int:
        logits = 3 * sequences * spec.vocabulary * 4  # as computed, in fp32, as adjusted for sampling
        gathered = length * widest * (element + 4) + min(step_tokens, length) * length * element
        return int(MARGIN * (fixed + each * step_tokens)) + logits + gathered

    return step_bytes


def _activations(module: Transformer) -> tuple[float, float]:
    """Return (bytes whatever the tokens, bytes a token) of a forward pass."""
    small, large = _peak(module, SMALL), _peak(module, LARGE)
    each = max(0.0, (large - small) / (LARGE - SMALL))
    spec = module.spec
    # A floor by what must be there: the residual stream and the widest thing beside it.
    widest = max(2 * layer.mlp.width + 3 * spec.width for layer in spec.layers)
    each = max(each, widest * module.embedding.weight.element_size())
    return max(0.0, small - each * SMALL), each


def _peak(module: Transformer, tokens: int) -> int:
    """Return how far a forward pass of so many tokens raises the memory in use above what was in use before."""
    device = module.embedding.weight.device
    tokens = min(tokens, module.spec.max_positions)
    ids = torch.zeros(tokens, dtype=torch.int64, device=device)
    gc.collect()
    with torch.inference_mode():
        if device.type == "cpu":
            before = _reset_peak()
            module.hidden(ids, PackedContext.of_lengths([tokens], device))
            return max(0, _status("VmHWM") - before)
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
        module.hidden(ids, PackedContext.of_lengths([tokens], device))
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
