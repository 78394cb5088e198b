"""SmolLM3: Llama's layout, and every fourth layer without rotary embedding (NoPE)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.config import UserError
from treadle.model.families.base import Family, decoder_names, finish_spec, read_heads, read_whole_rope, windows_of
from treadle.model.families.reader import ConfigReader
from treadle.model.spec import AttentionSpec, MlpSpec, ModelSpec

DEFAULTS: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "use_cache": True,
    "pad_token_id": 128004,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "rope_parameters": None,
    "use_sliding_window": False,
    "sliding_window": None,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
    "layer_types": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "tie_word_embeddings": True,
}


def read(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a SmolLM3's config.json. Raises UserError."""
    reader = ConfigReader(config, DEFAULTS)
    heads, layers = read_heads(reader), reader.size("num_hidden_layers")
    turned = _turned(reader, layers)
    window = reader.size_or_none("sliding_window") if reader.flag("use_sliding_window") else None
    reader.harmless("sliding_window", "max_window_layers")
    types = reader.layer_types(layers) or [
        "sliding_attention" if window and not turn else "full_attention" for turn in turned
    ]
    rope, biased = read_whole_rope(reader, heads, 2000000.0), reader.flag("attention_bias")
    attention = [
        AttentionSpec(
            heads=heads.heads,
            kv_heads=heads.kv_heads,
            head_size=heads.head_size,
            rope=rope if turn else None,
            scale=heads.head_size**-0.5,
            window=window,
            qkv_bias=biased,
            output_bias=biased,
        )
        for turn, window in zip(turned, windows_of(types, window), strict=True)
    ]
    mlp = MlpSpec(reader.size("intermediate_size"), reader.activation("hidden_act"), reader.flag("mlp_bias"))
    return finish_spec(reader, "smollm3", attention, mlp)


def _turned(reader: ConfigReader, layers: int) -> list[bool]:
    """For each layer whether it has a rotary embedding (the key's name says the opposite of its values)."""
    interval, turned = reader.size("no_rope_layer_interval"), reader.take("no_rope_layers")
    if turned is None:
        return [(index + 1) % interval != 0 for index in range(layers)]
    if not isinstance(turned, list) or len(turned) < layers or any(turn not in (0, 1) for turn in turned):
        raise UserError(f"config.json: no_rope_layers must hold a 0 or 1 for each of the {layers} layers")
    return [bool(turn) for turn in turned[:layers]]


FAMILIES = [Family("smollm3", "SmolLM3ForCausalLM", read, decoder_names)]
