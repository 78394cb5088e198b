"""Log probabilities as OpenAI's and vLLM's answers show them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from treadle.model.tokenizer import Tokenizer
from treadle.serve.request import TokenLogprob

Json = dict[str, Any]


def token_text(tokenizer: Tokenizer | None, token: int) -> str:
    """Return a token's text; half a character shows as U+FFFD."""
    return f"token_id:{token}" if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False)


def finite(logprob: float) -> float:
    """JSON knows no infinity; what has no probability at all gets the value that OpenAI gives it."""
    return max(logprob, -9999.0)


def chat_logprobs(tokenizer: Tokenizer | None, logprobs: Sequence[TokenLogprob]) -> Json | None:
    """Return the log probabilities of a chat's answer."""
    if not logprobs:
        return None
    return {"content": list(chat_tokens(tokenizer, logprobs)), "refusal": None}


def chat_tokens(tokenizer: Tokenizer | None, logprobs: Iterable[TokenLogprob]) -> Iterable[Json]:
    """Yield each token with those that were likely in its place."""

    def shown(token: int, logprob: float) -> Json:
        text = token_text(tokenizer, token)
        return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode())}

    for one in logprobs:
        yield shown(one.token, one.logprob) | {"top_logprobs": [shown(*pair) for pair in one.top]}


class CompletionLogprobs:
    """The log probabilities of one completion, which say where in the text each token begins."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer, self._offset = tokenizer, 0

    def body(self, logprobs: Sequence[TokenLogprob | None], tokens: Sequence[int] = ()) -> Json | None:
        """Return those of the next tokens; None stands for the first of a prompt, which has none (see `tokens`)."""
        if not logprobs:
            return None
        ids = [tokens[place] if one is None else one.token for place, one in enumerate(logprobs)]
        texts = [token_text(self._tokenizer, token) for token in ids]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [None if one is None else finite(one.logprob) for one in logprobs],
            "top_logprobs": [
                None
                if one is None
                else {token_text(self._tokenizer, token): finite(logprob) for token, logprob in one.top}
                for one in logprobs
            ],
            "text_offset": offsets,
        }


def prompt_logprobs(tokenizer: Tokenizer | None, logprobs: Sequence[TokenLogprob | None]) -> list[Json | None]:
    """Return vLLM's `prompt_logprobs`: for each token of the prompt but the first the likely ones and itself, by id."""

    def shown(token: int, logprob: float, rank: int | None) -> Json:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": token_text(tokenizer, token)}

    bodies: list[Json | None] = []
    for one in logprobs:
        if one is None:
            bodies.append(None)
            continue
        likely = {str(token): shown(token, logprob, rank) for rank, (token, logprob) in enumerate(one.top, start=1)}
        bodies.append({str(one.token): shown(one.token, one.logprob, None), **likely})
    return bodies
