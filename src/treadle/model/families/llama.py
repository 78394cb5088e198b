"""Llama 2 and 3.x (model_type llama), whose layout SmolLM 1 and 2, Yi and many others share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.model.families.base import Family, decoder_names, finish_spec, read_heads, read_whole_rope
from treadle.model.families.reader import ConfigReader
from treadle.model.spec import AttentionSpec, MlpSpec, ModelSpec

DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "use_cache": True,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pretraining_tp": 1,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "head_dim": None,
}


def read(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a Llama's config.json. Raises UserError."""
    reader = ConfigReader(config, DEFAULTS)
    heads = read_heads(reader, divisible=True)
    biased = reader.flag("attention_bias")
    attention = AttentionSpec(
        heads=heads.heads,
        kv_heads=heads.kv_heads,
        head_size=heads.head_size,
        rope=read_whole_rope(reader, heads),
        scale=heads.head_size**-0.5,
        qkv_bias=biased,
        output_bias=biased,
    )
    mlp = MlpSpec(reader.size("intermediate_size"), reader.activation("hidden_act"), reader.flag("mlp_bias"))
    # SmolLM's config.json says these two.
    reader.only("rope_interleaved", False)
    reader.harmless("is_llama_config")
    return finish_spec(reader, "llama", [attention] * reader.size("num_hidden_layers"), mlp)


FAMILIES = [Family("llama", "LlamaForCausalLM", read, decoder_names)]
