"""Gemma 2: norms before and after each part, soft caps, a window on every other layer, embeddings scaled by sqrt(D)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.model.families.base import (
    Family,
    Heads,
    decoder_names,
    finish_spec,
    read_heads,
    read_whole_rope,
    windows_of,
)
from treadle.model.families.reader import ConfigReader
from treadle.model.spec import AttentionSpec, MlpSpec, ModelSpec, RopeSpec

DEFAULTS: dict[str, Any] = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "use_cache": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "tie_word_embeddings": True,
    "rope_parameters": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "use_bidirectional_attention": None,
}
NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def read(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a Gemma 2's config.json. Raises UserError."""
    reader = ConfigReader(config, DEFAULTS)
    heads, layers = read_heads(reader, divisible=True), reader.size("num_hidden_layers")
    types = reader.layer_types(layers) or [
        ("sliding_attention", "full_attention")[index % 2] for index in range(layers)
    ]
    rope, window = read_whole_rope(reader, heads), reader.size_or_none("sliding_window")
    softcap = reader.number_or_none("attn_logit_softcapping") or 0.0
    attention = [gemma_attention(reader, heads, rope, one, softcap=softcap) for one in windows_of(types, window)]
    reader.only("sliding_window_size", window)
    return finish_gemma(reader, "gemma2", attention)


def gemma_attention(reader: ConfigReader, heads: Heads, rope: RopeSpec, window: int, **more: Any) -> AttentionSpec:
    """Return the attention of one layer, as Gemma 2 and 3 have it in common."""
    biased = reader.flag("attention_bias")
    return AttentionSpec(
        heads=heads.heads,
        kv_heads=heads.kv_heads,
        head_size=heads.head_size,
        rope=rope,
        scale=reader.number("query_pre_attn_scalar") ** -0.5,
        window=window,
        qkv_bias=biased,
        output_bias=biased,
        **more,
    )


def finish_gemma(reader: ConfigReader, family: str, attention: list[AttentionSpec]) -> ModelSpec:
    """Return the spec from the attention of each layer and what Gemma 2 and 3 have in common. Raises UserError."""
    mlp = MlpSpec(reader.size("intermediate_size"), reader.activation("hidden_activation"))
    # Early files state the activation twice; only hidden_activation counts.
    reader.only("hidden_act", reader.take("hidden_activation"))
    reader.only("use_bidirectional_attention", False, None)
    return finish_spec(
        reader,
        family,
        attention,
        mlp,
        post_norms=True,
        norm_offset=1.0,
        embedding_scale=reader.size("hidden_size") ** 0.5,
        final_softcap=reader.number_or_none("final_logit_softcapping") or 0.0,
    )


def names(spec: ModelSpec) -> dict[str, str]:
    """Return our parameter names to those of the checkpoint."""
    return decoder_names(spec, NORMS)


FAMILIES = [Family("gemma2", "Gemma2ForCausalLM", read, names)]
