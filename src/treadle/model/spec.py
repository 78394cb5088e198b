"""What a model is, as frozen data. A family file makes a `ModelSpec` out of a config.json; blocks are built from it.

A spec that cannot be computed (heads that do not divide, an odd rotary size) raises UserError when it is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from treadle.config import UserError

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864) and how its frequencies are scaled.

    `kind` is one of ROPE_KINDS; `parameters` are those of that kind under the names that Hugging Face's config.json
    uses, lists as tuples. The first `rotary_size` of a head's elements are rotated.
    """

    theta: float
    rotary_size: int
    max_positions: int
    kind: str = "default"
    parameters: tuple[tuple[str, Any], ...] = ()
    interleaved: bool = False

    def __post_init__(self) -> None:
        _check(self.kind in ROPE_KINDS, f"RoPE of kind '{self.kind}' is not known; known: {', '.join(ROPE_KINDS)}")
        _check(
            self.rotary_size > 0 and self.rotary_size % 2 == 0,
            f"RoPE turns pairs of elements, so the rotated part of a head must be even, not {self.rotary_size}",
        )
        _check(self.theta > 0, f"the base of RoPE (rope_theta) must be positive, not {self.theta}")

    def parameter(self, name: str, default: Any = None) -> Any:
        """Return the parameter of the kind under Hugging Face's name, or `default`."""
        return dict(self.parameters).get(name, default)


@dataclass(frozen=True)
class AttentionSpec:
    """Causal attention with grouped heads. `rope` None tells no positions apart (NoPE).

    `window` w sees a token itself and the w - 1 before it, 0 everything before; `softcap` 0 caps nothing.
    """

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

    def __post_init__(self) -> None:
        _check(
            min(self.heads, self.kv_heads, self.head_size) > 0,
            f"attention needs at least one head of at least one element, not {self.heads} query heads and "
            f"{self.kv_heads} key-value heads of {self.head_size}",
        )
        _check(
            self.heads % self.kv_heads == 0,
            f"{self.heads} query heads cannot share {self.kv_heads} key-value heads evenly; "
            "num_attention_heads must be a multiple of num_key_value_heads",
        )
        _check(
            self.rope is None or self.rope.rotary_size <= self.head_size,
            f"RoPE cannot turn {self.rope and self.rope.rotary_size} elements of a head of {self.head_size}",
        )
        _check(self.window >= 0 and self.softcap >= 0, "an attention window and a soft cap cannot be negative")


@dataclass(frozen=True)
class MlpSpec:
    """Gated MLP: down(activation(gate(x)) * up(x)); the activation under its name in `treadle.ops`."""

    width: int
    activation: str
    bias: bool = False


@dataclass(frozen=True)
class LayerSpec:
    """One layer: a mixer and an MLP, each behind a norm; `post_norms` adds one after each as well (Gemma 2 and 3)."""

    attention: AttentionSpec
    mlp: MlpSpec
    post_norms: bool = False

    def matrices(self, width: int) -> int:
        """Return the number of elements of the layer's matrices in a model of this width."""
        attention = self.attention
        heads = 2 * attention.heads + 2 * attention.kv_heads  # q and o, k and v
        return width * (heads * attention.head_size + 3 * self.mlp.width)


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only language model.

    `norm_offset` is added to every norm's weight (1 for Gemma). `config` is the config.json that the spec was read
    from, the family's defaults filled in; it is written back when the model is saved.
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

    def __post_init__(self) -> None:
        _check(min(self.width, self.vocabulary) > 0, "a model needs a positive width and vocabulary")
        _check(len(self.layers) > 0, "a model needs at least one layer")

    def parameters_count(self) -> int:
        """Return the number of parameters, a tied head counted once."""
        total = self.vocabulary * self.width * (1 if self.tied else 2) + self.width
        for layer in self.layers:
            attention, mlp = layer.attention, layer.mlp
            queries, keys = attention.heads * attention.head_size, attention.kv_heads * attention.head_size
            total += layer.matrices(self.width)
            total += (4 if layer.post_norms else 2) * self.width
            total += (queries + 2 * keys) * attention.qkv_bias + self.width * attention.output_bias
            total += 2 * attention.head_size * attention.qk_norm + attention.heads * attention.sinks
            total += (2 * mlp.width + self.width) * mlp.bias
        return total

    def flops_per_token(self, context: float) -> float:
        """Return the matmul FLOP of one token's forward pass where it sees `context` tokens, itself included.

        A multiply and an add are two. The backward pass costs twice as much; the mean `context` of a whole sequence of
        n tokens is (n + 1) / 2.
        """
        weights = self.vocabulary * self.width + sum(layer.matrices(self.width) for layer in self.layers)
        attended = sum(
            layer.attention.heads * layer.attention.head_size * min(context, layer.attention.window or context)
            for layer in self.layers
        )
        return 2.0 * weights + 4.0 * attended


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise UserError(otherwise)
