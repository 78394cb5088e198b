"""Tiny random models of any shape, built from specs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.tiny_models import TINY
from treadle.model.context import PackedContext
from treadle.model.families import read_spec
from treadle.model.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec
from treadle.model.transformer import Transformer

TEXT = "def read(path):\n    return open(path).read()\nthe quick brown fox; caf\u00e9, \u6771\u4eac, \U0001f600\n"
TOKENS = 300
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": TOKENS,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}


def attention(**changes: Any) -> AttentionSpec:
    head_size = changes.get("head_size", 8)
    plain = AttentionSpec(
        heads=4, kv_heads=2, head_size=head_size, rope=RopeSpec(10000.0, head_size, 128), scale=head_size**-0.5
    )
    return replace(plain, **changes)


def model_spec(*layers: AttentionSpec, **changes: Any) -> ModelSpec:
    mlp = MlpSpec(48, "silu")
    spec = ModelSpec(
        family="llama",
        width=32,
        vocabulary=TOKENS,
        layers=tuple(LayerSpec(one, mlp) for one in (layers or (attention(), attention()))),
        norm_eps=1e-6,
        max_positions=128,
        initializer_range=0.3,
    )
    return replace(spec, **changes)


def build(spec: ModelSpec, seed: int = 0) -> Transformer:
    module = Transformer(spec)
    module.initialize(seed)
    return module.requires_grad_(False).eval()


longrope = RopeSpec(
    10000.0,
    8,
    128,
    "longrope",
    (("factor", 4.0), ("long_factor", (2.0, 3.0, 4.0, 5.0)), ("original_max_position_embeddings", 24),
     ("short_factor", (1.0, 1.1, 1.2, 1.3))),
)  # fmt: skip
SPECS = {
    "plain": model_spec(),
    "one key-value head": model_spec(attention(kv_heads=1), attention(kv_heads=1)),
    "windows shorter and longer than the text": model_spec(attention(window=5), attention(window=64), attention()),
    "window of one": model_spec(attention(window=1)),
    "Gemma 2": model_spec(
        attention(window=7, softcap=20.0, scale=0.3), attention(softcap=20.0, scale=0.3),
        final_softcap=10.0, norm_offset=1.0, embedding_scale=32**0.5, tied=True,
    ),
    "sinks": model_spec(attention(sinks=True, window=6), attention(sinks=True)),
    "norms, biases, no rotation in one layer": model_spec(
        attention(qk_norm=True, qkv_bias=True, output_bias=True), attention(rope=None)
    ),
    "half of the head rotated": model_spec(attention(rope=RopeSpec(500.0, 4, 128))),
    "longrope": model_spec(attention(rope=longrope), attention(rope=longrope)),
    "dynamic": model_spec(attention(rope=RopeSpec(10000.0, 8, 24, "dynamic", (("factor", 2.0),)))),
}  # fmt: skip
SPECS |= {name: read_spec(config) for name, config in TINY.items()}


def whole(module: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return module(torch.tensor(tokens), PackedContext.of_lengths([len(tokens)]))
