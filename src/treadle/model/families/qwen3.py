"""Qwen3 (dense): Llama's layout with a norm on each head's query and key, and a head size of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.model.families import qwen2
from treadle.model.families.base import Family, decoder_names, finish_spec, read_heads, read_whole_rope, read_windows
from treadle.model.families.reader import ConfigReader
from treadle.model.spec import AttentionSpec, MlpSpec, ModelSpec

DEFAULTS: dict[str, Any] = {**qwen2.DEFAULTS, "head_dim": 128, "attention_bias": False}


def read(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a Qwen3's config.json. Raises UserError."""
    reader = ConfigReader(config, DEFAULTS)
    heads, layers = read_heads(reader), reader.size("num_hidden_layers")
    rope, biased = read_whole_rope(reader, heads), reader.flag("attention_bias")
    attention = [
        AttentionSpec(
            heads=heads.heads,
            kv_heads=heads.kv_heads,
            head_size=heads.head_size,
            rope=rope,
            scale=heads.head_size**-0.5,
            window=window,
            qk_norm=True,
            qkv_bias=biased,
            output_bias=biased,
        )
        for window in read_windows(reader, layers)
    ]
    mlp = MlpSpec(reader.size("intermediate_size"), reader.activation("hidden_act"))
    return finish_spec(reader, "qwen3", attention, mlp)


FAMILIES = [Family("qwen3", "Qwen3ForCausalLM", read, decoder_names)]
