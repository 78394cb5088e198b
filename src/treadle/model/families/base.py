"""What a family file states, and what the dense families share: reading the common keys, naming the common tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from treadle.config import UserError
from treadle.model.families.reader import ConfigReader
from treadle.model.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec


@dataclass(frozen=True)
class Family:
    """A kind of model.

    `read` turns config.json into a spec; `names` maps each of our parameter names to the name of its tensor in a
    Hugging Face checkpoint (one to one, so it serves loading and saving). `renamed` turns the name of a tensor as it
    may also be found in checkpoints into the one that `names` uses, and `unused` matches tensors that a checkpoint may
    hold although the model does not read them.
    """

    model_type: str
    architecture: str
    read: Callable[[Mapping[str, Any]], ModelSpec]
    names: Callable[[ModelSpec], dict[str, str]]
    renamed: Callable[[str], str] = lambda name: name
    # Rotary frequencies follow from config.json; old Transformers versions stored them all the same.
    unused: re.Pattern[str] = re.compile(r".*\.rotary_emb\.inv_freq")


@dataclass(frozen=True)
class Heads:
    """The sizes of attention that every layer of a dense model shares."""

    width: int
    heads: int
    kv_heads: int
    head_size: int


def read_heads(reader: ConfigReader, divisible: bool = False) -> Heads:
    """Return the sizes of attention; `divisible` families refuse a width that the heads do not divide even where
    head_dim is given, as Transformers does. Raises UserError."""
    width, heads = reader.size("hidden_size"), reader.size("num_attention_heads")
    head_size = reader.size_or_none("head_dim")
    if width % heads and (divisible or head_size is None):
        raise UserError(f"config.json: hidden_size ({width}) must be a multiple of num_attention_heads ({heads})")
    return Heads(width, heads, reader.size_or_none("num_key_value_heads") or heads, head_size or width // heads)


def read_whole_rope(reader: ConfigReader, heads: Heads, default_theta: float = 10000.0) -> RopeSpec:
    """Return the rotary embedding of a family that turns whole heads. Raises UserError."""
    return whole(reader.rope(heads.head_size, default_theta), heads)


def whole(rope: RopeSpec, heads: Heads) -> RopeSpec:
    """Return `rope`, refusing one that turns a part of the head: these families' reference ignores the setting."""
    if rope.rotary_size != heads.head_size:
        raise UserError("config.json: partial_rotary_factor must be 1 (or absent) for this family")
    return rope


def read_windows(reader: ConfigReader, layers: int) -> list[int]:
    """Return each layer's attention window (0: none) from use_sliding_window, sliding_window, max_window_layers and
    layer_types, as the Qwen families have them. Raises UserError."""
    window = reader.size_or_none("sliding_window") if reader.flag("use_sliding_window") else None
    reader.harmless("sliding_window")
    first = reader.take("max_window_layers")
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        raise reader.wrong("max_window_layers", "a whole number")
    types = reader.layer_types(layers)
    if types is None:
        types = ["sliding_attention" if window and index >= first else "full_attention" for index in range(layers)]
    return windows_of(types, window)


def windows_of(types: list[str], window: int | None) -> list[int]:
    """Return each layer's attention window by its type. Raises UserError where a layer needs one and there is none."""
    if "sliding_attention" in types and not window:
        raise UserError("config.json: layer_types asks for sliding_attention, but there is no sliding_window in use")
    return [window or 0 if kind == "sliding_attention" else 0 for kind in types]


def finish_spec(
    reader: ConfigReader,
    family: str,
    attention: list[AttentionSpec],
    mlp: MlpSpec,
    post_norms: bool = False,
    **more: Any,
) -> ModelSpec:
    """Return the spec of layers that differ in their attention alone, the common keys read. Raises UserError."""
    spec = ModelSpec(
        family=family,
        width=reader.size("hidden_size"),
        vocabulary=reader.size("vocab_size"),
        layers=tuple(LayerSpec(one, mlp, post_norms) for one in attention),
        norm_eps=reader.number("rms_norm_eps"),
        max_positions=reader.size("max_position_embeddings"),
        tied=reader.flag("tie_word_embeddings"),
        initializer_range=reader.number("initializer_range", at_least=0.0),
        config={**{key: value for key, value in reader.defaults.items() if value is not None}, **reader.config},
        **more,
    )
    reader.finish()
    return spec


def decoder_names(spec: ModelSpec, norms: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return our parameter names to those of Llama's layout, which the dense families share.

    `norms` maps a layer's norms to their names in the checkpoint, where they differ from Llama's.
    """
    norms = norms or {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    table = {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    if not spec.tied:
        table["head.weight"] = "lm_head.weight"
    for index, layer in enumerate(spec.layers):
        attention = layer.attention
        parts = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in norms.items()}
        for part in "qkvo":
            parts[f"attention.{part}.weight"] = f"self_attn.{part}_proj.weight"
            if attention.output_bias if part == "o" else attention.qkv_bias:
                parts[f"attention.{part}.bias"] = f"self_attn.{part}_proj.bias"
        if attention.qk_norm:
            parts |= {f"attention.{part}_norm.weight": f"self_attn.{part}_norm.weight" for part in "qk"}
        for part in ("gate", "up", "down"):
            parts[f"mlp.{part}.weight"] = f"mlp.{part}_proj.weight"
            if layer.mlp.bias:
                parts[f"mlp.{part}.bias"] = f"mlp.{part}_proj.bias"
        table |= {f"layers.{index}.{ours}": f"model.layers.{index}.{theirs}" for ours, theirs in parts.items()}
    return table
