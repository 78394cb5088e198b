"""Qwen2 and Qwen2.5: Llama's layout with biases on q, k and v, and a window on the upper layers where asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.model.families.base import Family, decoder_names, finish_spec, read_heads, read_whole_rope, read_windows
from treadle.model.families.reader import ConfigReader
from treadle.model.spec import AttentionSpec, MlpSpec, ModelSpec

DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "use_cache": True,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
    "attention_dropout": 0.0,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def read(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a Qwen2's config.json. Raises UserError."""
    reader = ConfigReader(config, DEFAULTS)
    heads, layers = read_heads(reader), reader.size("num_hidden_layers")
    rope = read_whole_rope(reader, heads)
    attention = [
        AttentionSpec(
            heads=heads.heads,
            kv_heads=heads.kv_heads,
            head_size=heads.head_size,
            rope=rope,
            scale=heads.head_size**-0.5,
            window=window,
            qkv_bias=True,
        )
        for window in read_windows(reader, layers)
    ]
    reader.only("use_mrope", False)
    mlp = MlpSpec(reader.size("intermediate_size"), reader.activation("hidden_act"))
    return finish_spec(reader, "qwen2", attention, mlp)


FAMILIES = [Family("qwen2", "Qwen2ForCausalLM", read, decoder_names)]
