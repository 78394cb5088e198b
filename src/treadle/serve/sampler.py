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
from treadle.config import TreadleError
from treadle.config.mixing import MASK, mix64
from treadle.serve.request import Request, TokenLogprob


@dataclass(frozen=True)
class Choice:
    """The token chosen for one sequence; `error` says why there is none."""

    token: int = -1
    logprob: TokenLogprob | None = None
    error: str = ""


@dataclass(frozen=True)
class Row:
    """One row of logits: that of the token after a request's own and `guesses` more."""

    request: Request
    guesses: tuple[int, ...] = ()

    @property
    def place(self) -> int:
        """The token's number within the answer, counted from 0."""
        return self.request.completion_tokens + len(self.guesses)


def choose(logits: Float[Tensor, "R V"], rows: Sequence[Row]) -> list[Choice]:
    """Return the next token of each row. Changes `logits`."""
    # A NaN or an infinity that a row holds is also its maximum.
    finite = torch.isfinite(logits.amax(-1)).tolist()
    logprobs = {
        index: logits[index].log_softmax(-1)
        for index, row in enumerate(rows)
        if row.request.settings.logprobs is not None and finite[index]
    }
    errors: dict[int, str] = {}
    for index, row in enumerate(rows):
        if not finite[index]:
            errors[index] = "the model's logits are not finite; its weights or its dtype are at fault"
        elif error := adjust(logits[index], row):
            errors[index] = error
    tokens = _draw(logits, rows).tolist()
    return [
        Choice(error=errors[index])
        if index in errors
        else Choice(token, token_logprob(logprobs[index], token, row.request.settings.logprobs or 0))
        if index in logprobs
        else Choice(token)
        for index, (token, row) in enumerate(zip(tokens, rows, strict=True))
    ]


def _draw(logits: Float[Tensor, "R V"], rows: Sequence[Row]) -> Int[Tensor, "R"]:
    settings = [row.request.settings for row in rows]
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
        tensor([uniform(row.request.seed, row.place) for row in rows]),
    )


def uniform(seed: int, place: int) -> float:
    """Return a number in [0, 1) for token number `place` of a request: two rounds of splitmix64's finalizer."""
    return (_mix(_mix(seed & MASK) ^ place) >> 11) * 2.0**-53


def derive_seed(seed: int, index: int) -> int:
    """Return the seed of choice `index` of a request (choice 0 keeps the request's own)."""
    return seed if index == 0 else _mix((seed & MASK) ^ _mix(index))


def _mix(x: int) -> int:
    """Splitmix64's step: the golden ratio added, then its finalizer."""
    return mix64(x + 0x9E3779B97F4A7C15)


def adjust(logits: Float[Tensor, "V"], row: Row) -> str:
    """Apply in place what the request asks beyond temperature and filters: penalties, biases, a minimum length, a
    grammar. Returns why no token can follow, or ""."""
    request, settings = row.request, row.request.settings
    if settings.repetition_penalty != 1.0:  # Keskar et al. 2019 (CTRL), section 4.1; prompt and output count
        seen = torch.tensor([*request.tokens, *row.guesses], device=logits.device).unique()
        found = logits[seen]
        logits[seen] = torch.where(found > 0, found / settings.repetition_penalty, found * settings.repetition_penalty)
    if settings.presence_penalty or settings.frequency_penalty:
        output = torch.tensor(
            [*request.tokens[request.prompt_tokens :], *row.guesses], dtype=torch.int64, device=logits.device
        )
        seen, counts = output.unique(return_counts=True)
        logits[seen] -= settings.presence_penalty + settings.frequency_penalty * counts.to(logits.dtype)
    if settings.logit_bias:
        ids = torch.tensor(list(settings.logit_bias), device=logits.device)
        logits[ids] += torch.tensor(list(settings.logit_bias.values()), dtype=logits.dtype, device=logits.device)
    if row.place < settings.min_tokens and request.stop_ids:
        logits[torch.tensor(sorted(request.stop_ids), device=logits.device)] = -torch.inf
    if request.matcher is None:
        return ""
    accepted = 0
    for guess in row.guesses:  # those behind the first that the grammar refuses are never reached
        if not request.matcher.accept(guess):
            break
        accepted += 1
    try:
        request.matcher.mask(logits)
        request.matcher.rollback(accepted)
    except TreadleError as error:  # the grammar has become too much work: the end of this request only
        return str(error)
    return "" if logits.max() > -torch.inf else "no token of the vocabulary continues what the grammar asks for"


def token_logprob(logprobs: Float[Tensor, "V"], token: int, count: int) -> TokenLogprob:
    """Return the log probability of `token`, with the `count` likeliest tokens beside it."""
    values, ids = logprobs.topk(min(count, len(logprobs)))
    return TokenLogprob(token, float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))


def prompt_logprobs(logits: Float[Tensor, "R V"], targets: Sequence[int], count: int) -> list[TokenLogprob]:
    """Return the log probability of the token that comes after each row."""
    return [token_logprob(row, target, count) for row, target in zip(logits.log_softmax(-1), targets, strict=True)]
