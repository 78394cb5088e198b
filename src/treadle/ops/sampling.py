"""Choosing the next token. Each row depends on its own inputs only, so a request draws the same in any batch."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from treadle.ops import native
from treadle.ops.native import abi
from treadle.ops.registry import Operator


def sample_reference(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> Tensor:
    logits = logits.float()
    greedy = logits.argmax(-1)
    if bool((temperature <= 0).all()):
        return greedy
    # The largest becomes 0 before the division, which a tiny temperature could not overflow then.
    scaled = logits - logits.amax(-1, keepdim=True)
    scaled = scaled / torch.where(temperature > 0, temperature, 1.0)[:, None]
    # min-p: relative to the likeliest token, whose scaled logit is now 0.
    scaled = scaled.masked_fill(scaled.exp() < min_p[:, None], -torch.inf)
    limited = bool((top_k > 0).any() or (top_p < 1).any())
    if limited:
        ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
        vocabulary = logits.shape[1]
        last = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary).long() - 1
        # Tokens as likely as the k-th stay.
        ordered = ordered.masked_fill(ordered < ordered.gather(1, last[:, None]), -torch.inf)
        chances = ordered.softmax(-1)
        before = chances.cumsum(-1) - chances
        outside = (before >= top_p[:, None]) & (top_p < 1)[:, None]
        outside[:, 0] = False
        scaled = torch.full_like(scaled, -torch.inf).scatter(1, order, ordered.masked_fill(outside, -torch.inf))
    chances = scaled.softmax(-1)
    # The inverse of the cumulative distribution, in float64 so that no tail is lost to rounding.
    cumulative = chances.double().cumsum(-1)
    target = uniform.double()[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, target, right=True)[:, 0]
    possible = (chances > 0).long() * torch.arange(logits.shape[1], device=logits.device)
    drawn = torch.minimum(drawn, possible.amax(-1))
    return torch.where(temperature > 0, drawn, greedy)


SAMPLE = Operator(
    "sample",
    "(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor uniform) -> Tensor",
    sample_reference,
    fake=lambda logits, *_: logits.new_empty(logits.shape[0], dtype=torch.int64),
)


_sample = abi.function("sample")


def _fits(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> bool:
    options = (temperature, top_p, min_p, uniform)
    return (
        abi.on_cpu(logits)
        and logits.dim() == 2
        and logits.shape[1] > 0
        and top_k.dtype == torch.int32
        and top_k.shape == logits.shape[:1]
        and all(x.dtype == torch.float32 and x.is_cpu and x.shape == logits.shape[:1] for x in options)
    )


@SAMPLE.kernel("native", native.missing, accepts=_fits, takes="float32 or bfloat16 logits on CPU")
def _native(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> Tensor:
    inputs = [x.contiguous() for x in (temperature, top_k, top_p, min_p, uniform)]
    logits = logits.contiguous()
    odds = torch.empty_like(logits, dtype=torch.float32)
    tokens = logits.new_empty(logits.shape[0], dtype=torch.int64)
    pointers = (x.data_ptr() for x in (logits, odds, *inputs, tokens))
    arguments = abi.Sample(abi.DTYPES[logits.dtype], logits.shape[1], *pointers)
    _sample(arguments, logits.shape[0], torch.get_num_threads())
    return tokens


def sample(
    logits: Float[Tensor, "S V"],
    temperature: Float[Tensor, " S"],
    top_k: Int[Tensor, " S"],
    top_p: Float[Tensor, " S"],
    min_p: Float[Tensor, " S"],
    uniform: Float[Tensor, " S"],
) -> Int[Tensor, " S"]:
    """Return a token for each row: the likeliest at temperature 0 (the lowest on ties), else drawn.

    `uniform` holds the numbers in [0, 1) that the rows are drawn with.

    Filters, in vLLM's order: min_p keeps tokens at least min_p times as likely as the likeliest; top_k (0: off) the k
    likeliest and those tied with the last; top_p (1: off) the fewest whose share reaches top_p, at least one.
    """
    return SAMPLE.call(logits, temperature, top_k, top_p, min_p, uniform)
