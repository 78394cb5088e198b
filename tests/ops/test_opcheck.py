"""PyTorch's own check of every operator: schema, fake tensors, autograd registration, ahead-of-time tracing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from treadle.ops import OPERATORS

from .gguf_weights import gguf_bytes


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


def starts(*bounds: int) -> torch.Tensor:
    return torch.tensor(bounds, dtype=torch.int32)


def attention(**options: Any) -> tuple:
    q, k, v = leaf(7, 4, 8), leaf(7, 2, 8), leaf(7, 2, 8)
    return (q, k, v, starts(0, 3, 7), 4, 0.3, *options.values())


def attention_backward(sinks: torch.Tensor | None) -> tuple:
    q, k, v = (torch.randn(7, n, 8) for n in (4, 2, 2))
    out, normalizer = torch.ops.treadle.packed_attention(q, k, v, starts(0, 3, 7), 4, 0.3, 2, 1.5, sinks)
    return (torch.randn(7, 4, 8), q, k, v, out, normalizer, starts(0, 3, 7), 4, 0.3, 2, 1.5, sinks)


def head(for_x: bool, for_weight: bool) -> tuple:
    x, weight = leaf(5, 4).requires_grad_(for_x), leaf(9, 4).requires_grad_(for_weight)
    return (x, weight, torch.tensor([1, 2, -100, 8, 0]), torch.tensor([1.0, 2, 0, 1, 1]), 2.0, for_x, for_weight)


def quantized_cache() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(4, 2, 10, 5, dtype=torch.uint8), torch.zeros(4, 2, 5, 10, dtype=torch.uint8)


def packed(format: str) -> torch.Tensor:
    return torch.ops.treadle.quantized_pack(gguf_bytes(format, 5, 64), format, 5, 64)


SAMPLES: dict[str, list[Callable[[], tuple]]] = {
    "linear": [lambda: (leaf(3, 4), leaf(5, 4), leaf(5)), lambda: (leaf(2, 3, 4), leaf(5, 4))],
    "embedding": [lambda: (torch.tensor([1, 0, 2]), leaf(4, 6))],
    "rms_norm": [lambda: (leaf(3, 8), leaf(8), 1e-6), lambda: (leaf(2, 3, 8), leaf(8), 1e-6, 1.0)],
    "rms_norm_backward": [lambda: (torch.randn(3, 8), torch.randn(3, 8), torch.randn(8), torch.randn(3, 8), 1e-6, 0.0)],
    "add_rms_norm": [lambda: (leaf(3, 8), leaf(3, 8), leaf(8), 1e-6, 1.0)],
    "rope": [
        lambda: (leaf(3, 2, 8), torch.randn(3, 3), torch.randn(3, 3)),
        lambda: (leaf(3, 2, 8), *torch.randn(2, 3, 4), True),
    ],
    "gated_activation": [lambda: (leaf(3, 8), leaf(3, 8), "silu")],
    "gated_activation_backward": [lambda: (*torch.randn(3, 3, 8), "gelu")],
    "packed_attention": [
        attention,
        lambda: attention(window=2),
        lambda: attention(window=2, softcap=1.5, sinks=leaf(4)),
    ],
    "packed_attention_backward": [lambda: attention_backward(None), lambda: attention_backward(torch.randn(4))],
    "linear_cross_entropy": [
        lambda: head(True, True),
        lambda: head(True, False),
        lambda: head(False, True),
        lambda: head(False, False),
    ],
    "paged_write": [
        lambda: (*torch.randn(2, 3, 2, 8), torch.randn(4, 2, 8, 5), torch.randn(4, 2, 5, 8), torch.tensor([7, 0, 19])),
        lambda: (*torch.randn(2, 3, 2, 8), *quantized_cache(), torch.tensor([7, 0, 19])),
    ],
    "paged_attention": [
        lambda: (
            torch.randn(3, 4, 8),
            torch.randn(4, 2, 8, 5),
            torch.randn(4, 2, 5, 8),
            torch.tensor([[2, 3], [1, 0]], dtype=torch.int32),
            starts(0, 1, 3),
            torch.tensor([7, 2], dtype=torch.int32),
            0.3,
        )
    ],
    "quantized_pack": [lambda: (gguf_bytes("Q4_1", 5, 64), "Q4_1", 5, 64)],
    "quantized_rows": [lambda: (packed("Q4_1"), torch.tensor([4, 0]), "Q4_1", 5, 64)],
    "quantized_linear": [
        lambda: (leaf(3, 64), packed("Q4_1"), "Q4_1", 5),
        lambda: (leaf(2, 3, 64), packed("Q8_0"), "Q8_0", 5, leaf(5)),
    ],
    "sample": [
        lambda: (torch.randn(3, 9), torch.ones(3), torch.ones(3, dtype=torch.int32), *torch.rand(3, 3).unbind())
    ],
}
CASES = [(name, number) for name, samples in SAMPLES.items() for number in range(len(samples))]


def test_every_operator_has_a_sample() -> None:
    assert set(SAMPLES) == set(OPERATORS.names())


@pytest.mark.parametrize(("name", "number"), CASES)
def test_opcheck(implementation: str, name: str, number: int) -> None:
    torch.library.opcheck(OPERATORS.get(name).call, SAMPLES[name][number]())


def test_a_compiled_model_keeps_the_operators() -> None:
    from treadle.ops import rms_norm

    x, weight = leaf(4, 8), leaf(8)
    compiled = torch.compile(lambda x, w: rms_norm(x, w, 1e-6) * 2, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, weight), rms_norm(x, weight, 1e-6) * 2)
