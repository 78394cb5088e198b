"""Mistral: Llama's layout with one attention window on every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.config import UserError
from treadle.model.families.base import Family, decoder_names, finish_spec, read_heads, read_whole_rope
from treadle.model.families.reader import ConfigReader
from treadle.model.spec import AttentionSpec, MlpSpec, ModelSpec

DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "use_cache": True,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "sliding_window": 4096,
    "attention_dropout": 0.0,
}


def read(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a Mistral's config.json. Raises UserError."""
    reader = ConfigReader(config, DEFAULTS)
    heads, layers = read_heads(reader), reader.size("num_hidden_layers")
    window = reader.size_or_none("sliding_window") or 0
    attention = AttentionSpec(
        heads=heads.heads,
        kv_heads=heads.kv_heads,
        head_size=heads.head_size,
        rope=read_whole_rope(reader, heads),
        scale=heads.head_size**-0.5,
        window=window,
    )
    mlp = MlpSpec(reader.size("intermediate_size"), reader.activation("hidden_act"))
    everywhere = "sliding_attention" if window else "full_attention"
    if set(reader.layer_types(layers) or []) - {everywhere}:
        raise UserError(f"config.json: a mistral model has {everywhere} on every layer here, layer_types differs")
    return finish_spec(reader, "mistral", [attention] * layers, mlp)


FAMILIES = [Family("mistral", "MistralForCausalLM", read, decoder_names)]
