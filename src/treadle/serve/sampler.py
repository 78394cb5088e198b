"""Choosing each sequence's next token from its logits.

The random number behind a token is a hash of the request's seed and the token's place, so what a request draws depends
neither on its neighbours in the batch nor on what was drawn before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from treadle import ops
from treadle.serve.request import Request, TokenLogprob

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Choice:
    """The token chosen for one sequence; `error` says why there is none."""

    token: int = -1
    logprob: TokenLogprob | None = None
    error: str = ""


def choose(logits: Float[Tensor, "S V"], requests: Sequence[Request]) -> list[Choice]:
    """Return the next token of each request. Changes `logits`."""
    finite = torch.isfinite(logits).all(-1).tolist()
    logprobs = {
        row: logits[row].float().log_softmax(-1) for row, request in enumerate(requests) if _wants_logprobs(request)
    }
    for row, request in enumerate(requests):
        if finite[row]:
            adjust(logits[row], request)
    tokens = _draw(logits, requests).tolist()
    return [
        Choice(token, _token_logprob(logprobs[row], token, request) if row in logprobs else None)
        if finite[row]
        else Choice(error="the model's logits are not finite; its weights or its dtype are at fault")
        for row, (token, request) in enumerate(zip(tokens, requests, strict=True))
    ]


def _wants_logprobs(request: Request) -> bool:
    return request.settings.logprobs is not None


def _draw(logits: Float[Tensor, "S V"], requests: Sequence[Request]) -> Int[Tensor, "S"]:
    settings = [request.settings for request in requests]
    if all(s.temperature == 0 for s in settings):
        return logits.argmax(-1)

    def tensor(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)

    return ops.sample(
        logits,
        tensor([s.temperature for s in settings]),
        tensor([max(s.top_k, 0) for s in settings], torch.int32),
        tensor([s.top_p for s in settings]),
        tensor([s.min_p for s in settings]),
        tensor([uniform(r.seed, r.completion_tokens) for r in requests]),
    )


def uniform(seed: int, place: int) -> float:
    """Return a number in [0, 1) for token number `place` of a request: two rounds of splitmix64's finalizer."""
    return (_mix(_mix(seed & _MASK) ^ place) >> 11) * 2.0**-53


def derive_seed(seed: int, index: int) -> int:
    """Return the seed of choice `index` of a request (choice 0 keeps the request's own)."""
    return seed if index == 0 else _mix((seed & _MASK) ^ _mix(index))


def _mix(x: int) -> int:
    """Steele, Lea and Flood 2014 (splitmix64), with the constants of Stafford's variant 13."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def adjust(logits: Float[Tensor, "V"], request: Request) -> None:
    """Apply in place what the request asks beyond temperature and filters: penalties, biases, a minimum length."""
    settings = request.settings
    if settings.repetition_penalty != 1.0:  # Keskar et al. 2019 (CTRL), section 4.1; prompt and output count
        seen = torch.tensor(request.tokens, device=logits.device).unique()
        found = logits[seen]
        logits[seen] = torch.where(found > 0, found / settings.repetition_penalty, found * settings.repetition_penalty)
    if settings.presence_penalty or settings.frequency_penalty:
        output = torch.tensor(request.tokens[request.prompt_tokens :], dtype=torch.int64, device=logits.device)
        seen, counts = output.unique(return_counts=True)
        logits[seen] -= settings.presence_penalty + settings.frequency_penalty * counts.to(logits.dtype)
    if settings.logit_bias:
        ids = torch.tensor(list(settings.logit_bias), device=logits.device)
        logits[ids] += torch.tensor(list(settings.logit_bias.values()), dtype=logits.dtype, device=logits.device)
    if request.completion_tokens < settings.min_tokens and request.stop_ids:
        logits[torch.tensor(sorted(request.stop_ids), device=logits.device)] = -torch.inf


def _token_logprob(logprobs: Float[Tensor, "V"], token: int, request: Request) -> TokenLogprob:
    count = min(request.settings.logprobs or 0, len(logprobs))
    values, ids = logprobs.topk(count)
    return TokenLogprob(token, float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))
