"""Tiny random models of any shape, built from specs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
