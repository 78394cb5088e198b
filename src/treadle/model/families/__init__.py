"""One file a family: it turns a config.json into a `ModelSpec` and states the names of its weights.

A family of another package comes in through the entry-point group `treadle.families`, under its model_type.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from treadle.config import UserError
from treadle.config.plugins import Parts
from treadle.model.families.base import Family
from treadle.model.spec import ModelSpec

families: Parts[Family] = Parts("family", "treadle.families")

for _module in ("llama", "smollm3", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"):
    for _family in importlib.import_module(f"treadle.model.families.{_module}").FAMILIES:
        families.add(_family.model_type)(_family)


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family that config.json's model_type names. Raises UserError."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise UserError(
            "the model's config.json has no model_type; it must name a family: " + ", ".join(families.names())
        )
    return families.get(model_type)


def read_spec(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a config.json's content. Raises UserError naming every key that is not understood."""
    return family_of(config).read(config)
