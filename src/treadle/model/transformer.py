"""The decoder-only transformer, built from a spec. The only definition: it is trained, evaluated and served."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from treadle.model.blocks import Embedding, Layer, Linear, Readout, RmsNorm
from treadle.model.context import Context
from treadle.model.initial import generator_of
from treadle.model.layout import Layout
from treadle.model.lora import initial_adapter_value
from treadle.model.spec import ModelSpec


class Transformer(nn.Module):
    """Tokens [T] of packed sequences to logits, or straight to the loss without ever holding all logits.

    Parameters are created uninitialized on `device` (often "meta"); load weights or call `initialize`.
    """

    def __init__(self, spec: ModelSpec, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.spec = spec
        self.layout: Layout | None = None  # what of it is here, where that is not all (see model/parallel.py)
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                self.embedding = Embedding(spec.vocabulary, spec.width)
                self.layers = nn.ModuleList(Layer(layer, spec, index) for index, layer in enumerate(spec.layers))
                self.norm = RmsNorm(spec.width, spec.norm_eps, spec.norm_offset)
                self.head = None if spec.tied else Linear(spec.width, spec.vocabulary)
        finally:
            torch.set_default_dtype(default)
        # The scale as Transformers applies it: rounded to the model's dtype (Gemma's sqrt(D) in bf16 is not sqrt(D)).
        self.scales_embedding = spec.embedding_scale != 1.0
        self.readout = Readout(spec.final_softcap)
        # Their tables are made before the first layer, so that a compiled or recomputed layer only reads them.
        self.ropes = tuple({layer.attention.rope: None for layer in spec.layers if layer.attention.rope is not None})

    def forward(
        self,
        inputs: Int[Tensor, "T"] | Float[Tensor, "T D"],
        context: Context,
        targets: Int[Tensor, "T"] | None = None,
        token_weights: Float[Tensor, "T"] | None = None,
        rows: Int[Tensor, "R"] | None = None,
    ) -> Float[Tensor, "R V"] | Float[Tensor, "T D"] | tuple[Float[Tensor, ""], Float[Tensor, "T"]]:
        """Return logits [R, V] of `rows` (default: every token), or with `targets` the pair (loss sum, token losses).

        The loss sum is the sum over tokens of token_weights x cross-entropy (weights default to 1), in fp32; dividing
        it by a token count is the caller's business, who alone knows the global batch. `inputs` are tokens; a later
        pipeline stage takes the hidden states that the one before it returns.
        """
        x = self.hidden(inputs, context)
        if self.layout is not None and not self.layout.last:
            return x
        if rows is not None:
            x = x[rows]
        x = self.norm(x)
        if targets is None:
            return self.logits(x)
        if token_weights is None:
            token_weights = torch.ones(targets.shape, dtype=torch.float32, device=targets.device)
        return self.readout.loss(x, self.head_weight, targets, token_weights)

    def hidden(self, inputs: Int[Tensor, "T"] | Float[Tensor, "T D"], context: Context) -> Float[Tensor, "T D"]:
        """Return what the last layer gives, before the final norm."""
        x = self.embed(inputs) if self.layout is None or self.layout.first else inputs
        for rope in self.ropes:
            context.rope(rope)
        for layer in self.layers:
            x = layer(x, context)
        return x

    def embed(self, tokens: Int[Tensor, "T"]) -> Float[Tensor, "T D"]:
        """Return what the first layer takes."""
        x = self.embedding(tokens)
        return x * torch.tensor(self.spec.embedding_scale, dtype=x.dtype) if self.scales_embedding else x

    def logits(self, normed: Float[Tensor, "R D"]) -> Float[Tensor, "R V"]:
        """Return the logits of rows that passed the final norm."""
        return self.readout.logits(normed, self.head_weight)

    @property
    def head_weight(self) -> Float[Tensor, "V D"]:
        """The output head's weight, which is the embedding's where the two are tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    @property
    def dtype(self) -> torch.dtype:
        """What the weights are stored in."""
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Fill every parameter with its initial value."""
        for name, parameter in self.named_parameters():
            parameter.copy_(self.initial_value(name, parameter.shape, seed))

    def initial_value(self, name: str, shape: torch.Size, seed: int) -> Float[Tensor, "..."]:
        """Return a parameter's whole initial value in fp32: matrices N(0, initializer_range), those that write to the
        residual stream scaled by 1/sqrt(2L) (GPT-2), norms 1, biases and sinks 0. Each parameter draws from a generator
        of its own, seeded by its name, so that the values do not depend on how the model is laid out over devices.
        """
        if ".adapter." in name:
            return initial_adapter_value(name, shape, seed)
        if name.endswith("norm.weight"):
            return torch.full(shape, 1.0 - self.spec.norm_offset)
        if name.endswith((".bias", ".sinks")):
            return torch.zeros(shape)
        deviation = self.spec.initializer_range
        if name.endswith((".o.weight", ".down.weight")):
            deviation /= math.sqrt(2 * len(self.spec.layers))
        return torch.randn(shape, generator=generator_of(name, seed), dtype=torch.float32) * deviation
