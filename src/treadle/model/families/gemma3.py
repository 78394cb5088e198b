"""Gemma 3, its text part: Gemma 2 with norms on queries and keys instead of soft caps, five windowed layers to one that
sees everything, and a rotary embedding of its own for each of the two kinds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from treadle.config import UserError
from treadle.model.families import gemma2
from treadle.model.families.base import Family, Heads, read_heads, whole, windows_of
from treadle.model.families.reader import ConfigReader
from treadle.model.spec import ModelSpec, RopeSpec

DEFAULTS: dict[str, Any] = {
    **gemma2.DEFAULTS,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "use_bidirectional_attention": False,
}
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0


def read(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a Gemma 3 text model's config.json. Raises UserError."""
    reader = ConfigReader(config, DEFAULTS)
    heads, layers = read_heads(reader, divisible=True), reader.size("num_hidden_layers")
    # Not an attribute that Transformers' Gemma 3 applies: a value would mean another model.
    reader.only("attn_logit_softcapping", None)
    windows = windows_of(_layer_types(reader, layers), reader.size_or_none("sliding_window"))
    ropes = _ropes(reader, heads)
    attention = [gemma2.gemma_attention(reader, heads, ropes[window > 0], window, qk_norm=True) for window in windows]
    return gemma2.finish_gemma(reader, "gemma3_text", attention)


def _layer_types(reader: ConfigReader, layers: int) -> list[str]:
    """One layer in `sliding_window_pattern` sees everything, the others have the window."""
    key = "sliding_window_pattern" if "sliding_window_pattern" in reader.config else "_sliding_window_pattern"
    reader.harmless("sliding_window_pattern", "_sliding_window_pattern")
    pattern = reader.size(key) if key in reader.config else 6
    return reader.layer_types(layers) or [
        "sliding_attention" if (index + 1) % pattern else "full_attention" for index in range(layers)
    ]


def _ropes(reader: ConfigReader, heads: Heads) -> dict[bool, RopeSpec]:
    """Return the rotary embedding of layers with a window (True) and without (False). Scaling in the old form
    (rope_scaling) is for those without alone."""
    given = reader.take("rope_parameters")
    if given is not None and (not isinstance(given, dict) or set(given) - {"full_attention", "sliding_attention"}):
        raise UserError(
            "config.json: rope_parameters of a gemma3_text model must be a mapping with full_attention and "
            "sliding_attention"
        )
    full, local = dict((given or {}).get("full_attention") or {}), dict((given or {}).get("sliding_attention") or {})
    scaling = reader.take("rope_scaling")
    if scaling is not None and not isinstance(scaling, dict):
        raise reader.wrong("rope_scaling", "a mapping or null")
    full.update(scaling or {})
    for part, key, theta in ((full, "rope_theta", GLOBAL_THETA), (local, "rope_local_base_freq", LOCAL_THETA)):
        value = reader.take(key)
        part.setdefault("rope_theta", theta if value is None else value)
    size = heads.head_size
    return {True: whole(reader.rope_from(local, size), heads), False: whole(reader.rope_from(full, size), heads)}


def read_multimodal(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of the text part of a Gemma 3 that also sees images; it is saved as a text model.

    Raises UserError.
    """
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise UserError("config.json of a gemma3 model needs a text_config, which describes its text part")
    # The outer file says how the parts are put together; of the keys that both hold the inner one counts for the text.
    known = {"text_config", "vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index"}
    known |= {"image_token_index", "initializer_range", "tie_word_embeddings"}
    outer = {key: value for key, value in config.items() if key not in known}
    ConfigReader(outer, {}).finish()
    inherited = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "transformers_version")
    merged = {key: config[key] for key in inherited if key in config}
    if "tie_word_embeddings" in config:
        merged["tie_word_embeddings"] = config["tie_word_embeddings"]
    return read({**merged, **text, "model_type": "gemma3_text"})


def renamed(name: str) -> str:
    """The text part lies under a prefix of its own in multimodal checkpoints, in an old form and a new one."""
    name = re.sub(r"^language_model\.", "", name)
    return re.sub(r"^model\.language_model\.", "model.", name)


FAMILIES = [
    Family("gemma3_text", "Gemma3ForCausalLM", read, gemma2.names),
    Family(
        "gemma3",
        "Gemma3ForCausalLM",
        read_multimodal,
        gemma2.names,
        renamed=renamed,
        unused=re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\..*|.*\.rotary_emb\.inv_freq"),
    ),
]
