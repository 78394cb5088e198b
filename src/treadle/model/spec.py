"""What a model is, as frozen data. A family file makes a `ModelSpec` out of a config.json; blocks are built from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864) and how its frequencies are scaled.

    `kind` is default, linear, dynamic, yarn, llama3 or longrope; `parameters` are those of that kind under the names
    that Hugging Face's config.json uses. `rotary_size` of the head's elements are rotated.
    """

    theta: float
    rotary_size: int
    max_positions: int
    kind: str = "default"
    parameters: tuple[tuple[str, Any], ...] = ()
    interleaved: bool = False


@dataclass(frozen=True)
class AttentionSpec:
    """Causal attention with grouped heads. `window` 0 sees everything before; `softcap` 0 caps nothing."""

    heads: int
    kv_heads: int
    head_size: int
    rope: RopeSpec | None
    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False


@dataclass(frozen=True)
class MlpSpec:
    """Gated MLP: down(activation(gate(x)) * up(x))."""

    width: int
    activation: str
    bias: bool = False


@dataclass(frozen=True)
class LayerSpec:
    """One layer: a mixer and an MLP, each behind a norm; `post_norms` adds one after each as well (Gemma 2 and 3)."""

    attention: AttentionSpec
    mlp: MlpSpec
    post_norms: bool = False


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only language model.

    `norm_offset` is added to every norm's weight (1 for Gemma). `config` is the config.json that the spec was read
    from; it is written back when the model is saved.
    """

    family: str
    width: int
    vocabulary: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    max_positions: int
    norm_offset: float = 0.0
    tied: bool = False
    embedding_scale: float = 1.0
    final_softcap: float = 0.0
    initializer_range: float = 0.02
    config: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False, hash=False)

    def parameters_count(self) -> int:
        """Return the number of parameters, a tied head counted once."""
        total = self.vocabulary * self.width * (1 if self.tied else 2) + self.width
        for layer in self.layers:
            attention, mlp = layer.attention, layer.mlp
            queries, keys = attention.heads * attention.head_size, attention.kv_heads * attention.head_size
            total += self.width * (2 * queries + 2 * keys) + 3 * self.width * mlp.width
            total += (4 if layer.post_norms else 2) * self.width
            total += (queries + 2 * keys) * attention.qkv_bias + self.width * attention.output_bias
            total += 2 * attention.head_size * attention.qk_norm + attention.heads * attention.sinks
            total += (2 * mlp.width + self.width) * mlp.bias
        return total

    def flops_per_token(self, context: int) -> float:
        """Return the matmul FLOP of one token's forward pass with `context` tokens before it (backward: twice that)."""
        linear = self.parameters_count() - (0 if self.tied else self.vocabulary * self.width)
        attended = sum(
            layer.attention.heads * layer.attention.head_size * min(context, layer.attention.window or context)
            for layer in self.layers
        )
        return 2.0 * linear + 4.0 * attended
