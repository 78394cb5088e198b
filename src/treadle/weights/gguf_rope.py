"""Rotary scaling in GGUF's keys and tensors, put into the parameters that Hugging Face's config.json has for it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from treadle.weights.gguf_keys import ArchitectureKeys


def rope_parameters(
    keys: ArchitectureKeys, head_size: int, factors: list[float] | None, default_base: float = 10000.0
) -> dict[str, Any]:
    """Return `rope_parameters`. `factors` divide the frequencies one by one (the tensor rope_freqs.weight)."""
    base = keys.number_or("rope.freq_base", default_base)
    kind = keys.get("rope.scaling.type") or "none"
    factor = keys.number_or("rope.scaling.factor", keys.number_or("rope.scale_linear", None))
    original = keys.get("rope.scaling.original_context_length")
    keys.only("rope.scaling.yarn_log_multiplier", 0.0)
    for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"):
        keys.only(key, 1.0)
    if factors is not None:
        if len(factors) != head_size // 2 or not all(0 < value < float("inf") for value in factors):
            raise keys.fail(
                "rope.freq_base", f"comes with a tensor rope_freqs.weight that is not {head_size // 2} factors"
            )
        return {"rope_theta": base} | _llama3(factors, base, keys.size("context_length"))
    if kind == "none" and factor in (None, 1.0):
        return {"rope_theta": base, "rope_type": "default"}
    if kind in ("none", "linear"):
        factor = keys.number("rope.scaling.factor") if factor is None else factor
        return {"rope_theta": base, "rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise keys.fail("rope.scaling.type", f"is {kind!r}; none, linear and yarn are supported")
    found: dict[str, Any] = {"rope_theta": base, "rope_type": "yarn", "factor": keys.number("rope.scaling.factor")}
    if original is not None:
        found["original_max_position_embeddings"] = keys.size("rope.scaling.original_context_length")
    for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if (value := keys.number_or(f"rope.scaling.{key}", None)) is not None:
            found[name] = value
    return found


def _llama3(factors: list[float], base: float, positions: int) -> dict[str, Any]:
    """Return the Llama 3 scaling that gives exactly these factors; where none does, the factors as they are.

    Llama 3 divides low frequencies by `factor` and leaves high ones; between, the inverse of what it divides by is
    linear in the frequency, which two points decide. Only ratios of the three other parameters matter, so
    low_freq_factor is 1, as in every released model.
    """
    stored, factor = np.array(factors, np.float32), float(factors[-1])
    frequencies = base ** (-np.arange(len(factors)) / len(factors))
    between = [index for index, value in enumerate(factors) if 1 < value < factor]
    candidates = [(4.0, 8192)]
    if len(between) >= 2:
        smooth = [(1 / factors[index] - 1 / factor) / (1 - 1 / factor) for index in (between[0], between[-1])]
        cycles = [frequencies[index] / (2 * math.pi) for index in (between[0], between[-1])]
        slope = (smooth[0] - smooth[1]) / (cycles[0] - cycles[1])
        start = smooth[0] - slope * cycles[0]
        if start < 0:
            high = 1 - 1 / start
            candidates.append((float(round(high, 3)), round(slope * (high - 1))))
    for high, original in candidates:
        if (
            high > 1
            and original > 0
            and np.allclose(_llama3_factors(frequencies, factor, high, original), stored, 1e-5, 0)
        ):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": positions,
    }


def _llama3_factors(frequencies: np.ndarray, factor: float, high: float, original: int) -> np.ndarray:
    smooth = np.clip((original * frequencies / (2 * math.pi) - 1.0) / (high - 1.0), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)
