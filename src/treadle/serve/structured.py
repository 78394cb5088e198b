"""Answers that keep to a grammar: which tokens may come next, by the library llguidance.

    matcher = compile_grammar(Grammar(kind="regex", text="(yes|no)"), tokenizer, vocabulary)
    matcher.mask(logits)            # in place: -inf for what the grammar does not allow
    matcher.accept(token)
    matcher.finished                # nothing but the end can follow

A grammar that is wrong, or that no answer can satisfy, is refused when it is compiled.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict

import llguidance
import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from treadle.config import TreadleError, UserError
from treadle.model.tokenizer import Tokenizer
from treadle.serve.grammar_guard import Guard, is_plain
from treadle.serve.grammars import llguidance_grammar
from treadle.serve.request import Grammar

MAX_KEPT = 64  # compiled grammars that are kept for the next request
_LIMITS = llguidance.LLParserLimits(verbose_errors=False)


class Matcher:
    """Where one sequence stands in its grammar. The end token, which belongs to no grammar, is followed here."""

    def __init__(self, state: llguidance.LLMatcher, ends: frozenset[int], vocabulary: int, ended: bool = False) -> None:
        self._state, self._ends, self._vocabulary, self._ended = state, ends, vocabulary, ended

    def clone(self) -> Matcher:
        """Return a matcher at the same place that goes its own way."""
        return Matcher(self._state.deep_copy(), self._ends, self._vocabulary, self._ended)

    @property
    def finished(self) -> bool:
        """Whether nothing can follow but the end."""
        return self._ended or self._state.is_stopped()

    @property
    def may_end(self) -> bool:
        """Whether the answer may end here."""
        return self._ended or self._state.is_accepting()

    def fill_mask(self, row: Int[Tensor, "W"]) -> None:
        """Write the allowed tokens into int32 words, bit i of word w for token 32 w + i; others are 0.

        Raises TreadleError where no token can follow, or the grammar takes more work than is allowed.
        """
        bits = np.packbits(~self._refused(), bitorder="little")
        words = np.zeros(len(row), np.int32)
        words.view(np.uint8)[: len(bits)] = bits[: words.nbytes]
        row.copy_(torch.from_numpy(words))

    def mask(self, logits: Float[Tensor, "V"]) -> None:
        """Set the logits of the tokens that may not follow to -inf, in place. Raises TreadleError as `fill_mask`."""
        refused = self._refused()
        count = np.count_nonzero(refused)
        # Mostly few tokens may follow, or few may not: then only those few are touched one by one.
        if 8 * (len(refused) - count) < len(refused):
            kept = torch.from_numpy(np.flatnonzero(~refused)).to(logits.device)
            values = logits[kept]
            logits.fill_(-torch.inf)
            logits[kept] = values
            return
        if 8 * count < len(refused):
            logits[torch.from_numpy(np.flatnonzero(refused)).to(logits.device)] = -torch.inf
        else:
            logits[: len(refused)].masked_fill_(torch.from_numpy(refused).to(logits.device), -torch.inf)
        logits[len(refused) :] = -torch.inf

    def _refused(self) -> np.ndarray:
        """Return one bool a token of the tokenizer: whether it may not follow."""
        words = np.frombuffer(self._state.compute_bitmask(), np.uint8)
        if self._state.is_error():
            raise TreadleError(f"the answer cannot go on within its grammar: {_reason(self._state.get_error())}")
        count = min(8 * len(words), self._vocabulary)
        refused = np.unpackbits(~words, count=count, bitorder="little").view(np.bool_)
        if self._ended or refused.all():
            raise TreadleError("the answer cannot go on within its grammar: nothing can follow")
        return refused

    def accept(self, token: int) -> bool:
        """Go on by `token`. Returns False, and stays, where the grammar does not allow it."""
        if self._ended:
            return False
        if token in self._ends and self._state.is_accepting():
            self._ended = True
            return True
        return self._state.try_consume_tokens([token]) == 1

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens, the end token being one."""
        if count and self._ended:
            self._ended = False
            count -= 1
        if count and not self._state.rollback(count):
            raise TreadleError(f"the grammar cannot be rolled back: {_reason(self._state.get_error())}")


def compile_grammar(grammar: Grammar, tokenizer: Tokenizer, vocabulary: int, checked: bool = False) -> Matcher:
    """Return a matcher at the beginning of `grammar` for logits of `vocabulary` columns.

    Tokens that the tokenizer does not have are never allowed; end tokens are where the grammar may end. Compiled
    grammars are kept, so that a second call is cheap. `checked` says that this was done before, by another process.
    Raises UserError where the grammar is wrong or impossible.
    """
    return _COMPILED.get(grammar, tokenizer, vocabulary, checked)


class _View:
    """A tokenizer as llguidance sees it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokens = list(tokenizer.token_bytes)
        ends = [index for index in tokenizer.eos_ids if index < len(tokens)]
        self.vocabulary, self.ends = len(tokens), frozenset(ends)
        if not ends:  # llguidance wants one; this one is cut from every mask
            ends = [len(tokens)]
            tokens.append(b"")
        special = sorted(set(tokenizer.special_ids) | set(ends))
        self.guard = Guard(tokens, special, ends)
        self.backend = llguidance.LLTokenizer(_Wrapped(tokenizer, tokens, special, ends[0]), eos_token=ends)  # pyrefly: ignore


class _Wrapped:
    """What llguidance asks of a tokenizer: its tokens' bytes, and how it would write a forced text."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], special: list[int], end: int) -> None:
        self.tokens, self.special_token_ids = tokens, special
        self.eos_token_id, self.bos_token_id = end, tokenizer.bos_id
        self._encode = tokenizer.encode
        self._longest = 0
        self._ids: dict[bytes, int] = {}

    def __call__(self, text: str) -> list[int]:
        """Return ids whose bytes are exactly those of `text`."""
        wanted = text.encode()
        # Some tokenizers put a blank before a text: a first line that is taken away again keeps it from ours.
        for before in ("", "\n"):
            ids = self._encode(before + text, special_tokens=False, parse_special=False)
            while ids:
                if b"".join(self.tokens[index] for index in ids) == wanted:
                    return ids
                if not before:
                    break
                ids = ids[1:]
        return self._greedy(wanted)

    def _greedy(self, wanted: bytes) -> list[int]:
        if not self._ids:
            special = set(self.special_token_ids)
            self._ids = {token: index for index, token in enumerate(self.tokens) if token and index not in special}
            self._longest = max(map(len, self._ids), default=0)
        ids, place = [], 0
        while place < len(wanted):
            for length in range(min(self._longest, len(wanted) - place), 0, -1):
                if (index := self._ids.get(wanted[place : place + length])) is not None:
                    ids.append(index)
                    place += length
                    break
            else:
                break  # no token for this byte: llguidance finds that what was forced cannot be written
        return ids


class _Compiled:
    """Views by tokenizer and the grammars compiled last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._views: weakref.WeakKeyDictionary[Tokenizer, _View] = weakref.WeakKeyDictionary()
        self._kept: OrderedDict[tuple[int, Grammar], tuple[_View, llguidance.LLMatcher]] = OrderedDict()

    def get(self, grammar: Grammar, tokenizer: Tokenizer, vocabulary: int, checked: bool) -> Matcher:
        view = self.view(tokenizer)
        key = (id(view), grammar)
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return Matcher(found[1].deep_copy(), view.ends, min(view.vocabulary, vocabulary))
        state = _compile(grammar, tokenizer, view, checked)
        with self._lock:
            self._kept[key] = (view, state)  # the view is kept too, so that its id stays its own
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
            return Matcher(state.deep_copy(), view.ends, min(view.vocabulary, vocabulary))

    def view(self, tokenizer: Tokenizer) -> _View:
        with self._lock:
            if tokenizer not in self._views:
                self._views[tokenizer] = _View(tokenizer)
            return self._views[tokenizer]


_COMPILED = _Compiled()


def _compile(grammar: Grammar, tokenizer: Tokenizer, view: _View, checked: bool) -> llguidance.LLMatcher:
    what = _NAMES[grammar.kind]
    try:
        text = llguidance_grammar(grammar, tokenizer)
    except ValueError as error:
        raise UserError(f"the {what} is refused: {_reason(str(error))}") from error
    if not checked and not is_plain(grammar) and (refusal := view.guard.refusal(text)) and "NoExtension" not in refusal:
        raise UserError(f"the {what} is refused: {_reason(refusal)}")
    state = llguidance.LLMatcher(view.backend, text, log_level=0, limits=_LIMITS)
    if state.is_error():
        raise UserError(f"the {what} is refused: {_reason(state.get_error())}")
    first = state.deep_copy()
    allowed = first.compute_bitmask()
    if first.is_error() or not any(allowed):
        raise UserError(f"the {what} is impossible: no answer of this model's tokens can satisfy it")
    return state


_NAMES = {
    "json_schema": "JSON schema",
    "json_object": "JSON object",
    "regex": "regular expression",
    "grammar": "grammar",
    "choice": "list of choices",
    "tools": "list of tools",
}


def _reason(error: str) -> str:
    """Return llguidance's message on one line, without the parts of the grammar that it quotes."""
    said = error.split("\n   1 | ")[0]
    if "\nerror: " in said:  # of a regular expression, which is quoted before
        said = said.split("\nerror: ")[1]
    text = " ".join(said.split()).strip(' "')
    return text[:300] or "it is not valid"
