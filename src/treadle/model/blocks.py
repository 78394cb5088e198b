"""The parts of a layer. Each is written for one device and plain local tensors; layouts are applied from outside."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from treadle import ops
from treadle.model.context import Context
from treadle.model.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec


class Linear(nn.Module):
    """y = x @ weight.T + bias, plus the low-rank term of an adapter where one is attached (see model/lora.py)."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.adapter: nn.Module | None = None

    def forward(self, x: Float[Tensor, "T I"]) -> Float[Tensor, "T O"]:
        y, adapter = ops.linear(x, self.weight, self.bias), self.adapter
        return y if adapter is None else y + adapter(x)


class Embedding(nn.Module):
    """Rows of a table by token id."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, width))

    def forward(self, tokens: Int[Tensor, "T"]) -> Float[Tensor, "T D"]:
        return ops.embedding(tokens, self.weight)


class RmsNorm(nn.Module):
    """Root mean square norm (Zhang & Sennrich 2019, arXiv 1910.07467), its weight shifted by `offset`."""

    def __init__(self, width: int, eps: float, offset: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps, self.offset = eps, offset

    def forward(self, x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
        return ops.rms_norm(x, self.weight, self.eps, self.offset)

    def after_add(
        self, x: Float[Tensor, "T D"], residual: Float[Tensor, "T D"]
    ) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T D"]]:
        """Return the norm of x + residual, and the sum itself."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps, self.offset)


class Readout:
    """From the last hidden states to logits or to the loss; the weight is the head's, or the embedding's it shares."""

    def __init__(self, softcap: float) -> None:
        self.softcap = softcap

    def logits(self, x: Float[Tensor, "R D"], weight: Float[Tensor, "V D"]) -> Float[Tensor, "R V"]:
        """Return the logits of each row."""
        return self.cap(ops.linear(x, weight))

    def loss(
        self,
        x: Float[Tensor, "T D"],
        weight: Float[Tensor, "V D"],
        targets: Int[Tensor, "T"],
        token_weights: Float[Tensor, "T"],
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "T"]]:
        """Return (sum over tokens of weight x loss, token losses), without ever holding all logits."""
        return ops.linear_cross_entropy(x, weight, targets, token_weights, self.softcap)

    def cap(self, logits: Float[Tensor, "R V"]) -> Float[Tensor, "R V"]:
        """Return the logits bent to lie within the soft cap, where there is one (Gemma 2)."""
        return torch.tanh(logits / self.softcap) * self.softcap if self.softcap else logits


class Attention(nn.Module):
    """Grouped-query causal attention; where keys and values come from is the context's business."""

    def __init__(self, spec: AttentionSpec, model: ModelSpec, layer: int) -> None:
        super().__init__()
        self.spec, self.layer = spec, layer
        queries, keys = spec.heads * spec.head_size, spec.kv_heads * spec.head_size
        self.q = Linear(model.width, queries, spec.qkv_bias)
        self.k = Linear(model.width, keys, spec.qkv_bias)
        self.v = Linear(model.width, keys, spec.qkv_bias)
        self.o = Linear(queries, model.width, spec.output_bias)
        self.q_norm = RmsNorm(spec.head_size, model.norm_eps, model.norm_offset) if spec.qk_norm else None
        self.k_norm = RmsNorm(spec.head_size, model.norm_eps, model.norm_offset) if spec.qk_norm else None
        self.sinks = nn.Parameter(torch.empty(spec.heads)) if spec.sinks else None

    def forward(self, x: Float[Tensor, "T D"], context: Context) -> Float[Tensor, "T D"]:
        spec = self.spec
        query = self.q(x).unflatten(-1, (-1, spec.head_size))
        key = self.k(x).unflatten(-1, (-1, spec.head_size))
        value = self.v(x).unflatten(-1, (-1, spec.head_size))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if spec.rope is not None:
            cos, sin = context.rope(spec.rope)
            query = ops.rope(query, cos, sin, spec.rope.interleaved)
            key = ops.rope(key, cos, sin, spec.rope.interleaved)
        return self.o(context.attend(self.layer, spec, query, key, value, self.head_sinks()).flatten(-2))

    def head_sinks(self) -> Float[Tensor, "H"] | None:
        """Return the logit of each head's sink, where heads have one."""
        return self.sinks


class GatedMlp(nn.Module):
    """down(activation(gate(x)) * up(x)) (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, spec: MlpSpec, width: int) -> None:
        super().__init__()
        self.activation = spec.activation
        self.gate = Linear(width, spec.width, spec.bias)
        self.up = Linear(width, spec.width, spec.bias)
        self.down = Linear(spec.width, width, spec.bias)

    def forward(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        return self.down(ops.gated_activation(self.gate(x), self.up(x), self.activation))


class Layer(nn.Module):
    """norm, attention, add, norm, MLP, add; with `post_norms` what is added is normed too."""

    def __init__(self, spec: LayerSpec, model: ModelSpec, index: int) -> None:
        super().__init__()

        def norm() -> RmsNorm:
            return RmsNorm(model.width, model.norm_eps, model.norm_offset)

        self.attention_norm = norm()
        self.attention = Attention(spec.attention, model, index)
        self.attention_post_norm = norm() if spec.post_norms else None
        self.mlp_norm = norm()
        self.mlp = GatedMlp(spec.mlp, model.width)
        self.mlp_post_norm = norm() if spec.post_norms else None

    def forward(self, x: Float[Tensor, "T D"], context: Context) -> Float[Tensor, "T D"]:
        attended = self.attention(self.attention_norm(x), context)
        if self.attention_post_norm is not None:
            attended = self.attention_post_norm(attended)
        normed, x = self.mlp_norm.after_add(attended, x)
        out = self.mlp(normed)
        if self.mlp_post_norm is not None:
            out = self.mlp_post_norm(out)
        return x + out
