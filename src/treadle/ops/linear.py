"""Matrix products with weights: linear layers and the embedding table. PyTorch's own (oneDNN) are the fast ones."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from treadle.ops.invariance import is_row_invariant, linear_by_tiles
from treadle.ops.registry import Operator


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)


def _embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    return F.embedding(tokens, weight)


LINEAR = Operator(
    "linear",
    "(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor",
    _linear,
    composite=True,
    note="PyTorch (oneDNN on CPU)",
)
EMBEDDING = Operator(
    "embedding", "(Tensor tokens, Tensor weight) -> Tensor", _embedding, composite=True, note="PyTorch"
)


def linear(
    x: Float[Tensor, "*batch I"], weight: Float[Tensor, "O I"], bias: Float[Tensor, " O"] | None = None
) -> Float[Tensor, "*batch O"]:
    """Return x @ weight.T + bias."""
    if is_row_invariant() and x.dim() == 2:
        return linear_by_tiles(x, weight, bias)
    return LINEAR.call(x, weight, bias)


def embedding(tokens: Int[Tensor, " T"], weight: Float[Tensor, "V D"]) -> Float[Tensor, "T D"]:
    """Return the rows of `weight` that `tokens` name; raises IndexError (on CPU) for a token outside [0, V)."""
    return EMBEDDING.call(tokens, weight)
