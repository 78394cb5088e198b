"""Llama 2 and 3.x; SmolLM, and Mistral before sliding windows, share the layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.model.families.base import ConfigReader, Family
from treadle.model.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec


def read(config: Mapping[str, Any]) -> ModelSpec:
    reader = ConfigReader(config)
    width, heads = reader.need("hidden_size"), reader.need("num_attention_heads")
    head_size = reader.take("head_dim") or width // heads
    max_positions = reader.take("max_position_embeddings", 2048)
    rope_parameters = reader.take("rope_parameters", {})
    theta = reader.take("rope_theta", rope_parameters.get("rope_theta", 10000.0))
    attention_bias = bool(reader.take("attention_bias", False))
    attention = AttentionSpec(
        heads=heads,
        kv_heads=reader.take("num_key_value_heads", heads),
        head_size=head_size,
        rope=RopeSpec(float(theta), head_size, max_positions),
        scale=head_size**-0.5,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
    )
    mlp = MlpSpec(
        reader.need("intermediate_size"), reader.take("hidden_act", "silu"), bool(reader.take("mlp_bias", False))
    )
    spec = ModelSpec(
        family="llama",
        width=width,
        vocabulary=reader.need("vocab_size"),
        layers=(LayerSpec(attention, mlp),) * reader.need("num_hidden_layers"),
        norm_eps=float(reader.take("rms_norm_eps", 1e-6)),
        max_positions=max_positions,
        tied=bool(reader.take("tie_word_embeddings", False)),
        initializer_range=float(reader.take("initializer_range", 0.02)),
        config=dict(config),
    )
    reader.only("attention_dropout", 0.0)
    reader.finish()
    return spec


def names(spec: ModelSpec) -> dict[str, str]:
    """Our parameter names to those of the checkpoint."""
    table = {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    if not spec.tied:
        table["head.weight"] = "lm_head.weight"
    for index, layer in enumerate(spec.layers):
        ours, theirs = f"layers.{index}.", f"model.layers.{index}."
        table[ours + "attention_norm.weight"] = theirs + "input_layernorm.weight"
        table[ours + "mlp_norm.weight"] = theirs + "post_attention_layernorm.weight"
        for part in "qkvo":
            table[f"{ours}attention.{part}.weight"] = f"{theirs}self_attn.{part}_proj.weight"
            if layer.attention.qkv_bias if part != "o" else layer.attention.output_bias:
                table[f"{ours}attention.{part}.bias"] = f"{theirs}self_attn.{part}_proj.bias"
        for part in ("gate", "up", "down"):
            table[f"{ours}mlp.{part}.weight"] = f"{theirs}mlp.{part}_proj.weight"
            if layer.mlp.bias:
                table[f"{ours}mlp.{part}.bias"] = f"{theirs}mlp.{part}_proj.bias"
    return table


FAMILIES = [Family("llama", "LlamaForCausalLM", read, names)]
