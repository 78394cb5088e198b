"""The other side of grammar_guard.py: a process that may take long, run out of memory or crash. Run as a script.

It is told a vocabulary and then grammars, one JSON line each, and answers each grammar with a line: why it is refused.
"""

from __future__ import annotations

import contextlib
import json
import sys

import llguidance

MAX_MEMORY = 2 << 30


class _Vocabulary:
    """Tokens for llguidance, which writes forced texts by taking the longest token each time."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], end: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, end
        self._ids = {token: index for index, token in enumerate(tokens) if index not in set(special)}
        self._longest = max(map(len, tokens), default=1)

    def __call__(self, text: str) -> list[int]:
        given, ids = text.encode(), []
        while given:
            sizes = (size for size in range(min(self._longest, len(given)), 0, -1) if given[:size] in self._ids)
            size = next(sizes, 0)
            if not size:
                break
            ids.append(self._ids[given[:size]])
            given = given[size:]
        return ids


def main() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    tokenizer = None
    for line in sys.stdin:
        told = json.loads(line)
        if "tokens" in told:
            tokens = [bytes.fromhex(token) for token in told["tokens"]]
            vocabulary = _Vocabulary(tokens, told["special"], told["ends"][0])
            tokenizer = llguidance.LLTokenizer(vocabulary, eos_token=told["ends"])  # pyrefly: ignore
            continue
        assert tokenizer is not None
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(tokenizer, told["grammar"], log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        print(json.dumps({"error": matcher.get_error()}), flush=True)


if __name__ == "__main__":
    main()
