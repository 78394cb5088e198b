"""Tokenizers out of bare vocabularies, as GGUF files and sentencepiece models hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

SPACE = "\u2581"
# Words with the space or sign before them, digits in groups of up to three, runs of signs with the line ends after
# them (as code has), line ends, other blanks: how Llama 3 and GPT-4 split text.
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How a vocabulary uses a token; the numbers are sentencepiece's and GGUF's.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


@dataclass(frozen=True)
class Split:
    """How a byte-level vocabulary's merges were learned: the text is cut by each pattern in turn, then merged.

    Without patterns GPT-2's own applies. `digits` cuts every digit off first; `nfc` composes characters; with
    `whole_words` a piece that is a token is taken as it is, without merging.
    """

    patterns: tuple[str, ...] = ()
    digits: bool = False
    nfc: bool = False
    whole_words: bool = False


def byte_level_backend(
    tokens: Sequence[str], merges: Sequence[tuple[str, str]], kinds: Sequence[int], split: Split
) -> tokenizers.Tokenizer:
    """Return a byte-level BPE (GPT-2, Llama 3, Qwen). `merges` in order of rank; raises ValueError for bad ones."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab=vocabulary, merges=list(merges), ignore_merges=split.whole_words)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(str(error)) from error
    backend = tokenizers.Tokenizer(model)
    steps: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
    steps += [pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated") for pattern in split.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split.patterns))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)  # pyrefly: ignore
    if split.nfc:
        backend.normalizer = normalizers.NFC()  # pyrefly: ignore
    backend.decoder = decoders.ByteLevel()  # pyrefly: ignore
    _add_tokens(backend, tokens, kinds)
    return backend


def sentencepiece_backend(
    pieces: Sequence[str], scores: Sequence[float], kinds: Sequence[int], unknown: str, add_space: bool = True
) -> tokenizers.Tokenizer:
    """Return a sentencepiece BPE with byte fallback (Llama 2, Mistral, Gemma).

    `add_space` puts a space before each piece of text between special tokens, as the model saw words in training. A
    better score means an earlier merge.
    """
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = merges_of(vocabulary, dict(zip(pieces, scores, strict=True)), kinds)
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    replace = normalizers.Replace(" ", SPACE)
    backend.normalizer = (  # pyrefly: ignore
        normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if add_space else replace
    )
    ends = [decoders.Strip(" ", 1, 0)] if add_space else []
    backend.decoder = decoders.Sequence(  # pyrefly: ignore
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    )
    _add_tokens(backend, pieces, kinds)
    return backend


def merges_of(
    vocabulary: Mapping[str, int], scores: Mapping[str, float], kinds: Sequence[int]
) -> list[tuple[str, str]]:
    """Return the merges that a sentencepiece vocabulary implies: every way to make a token of two, best token first.

    Only tokens that stand for text take part: sentencepiece never merges into or out of a control token.
    """
    textual = {piece for piece, index in vocabulary.items() if kinds[index] in (NORMAL, USER_DEFINED, UNUSED)}
    found: list[tuple[float, int, int, str, str]] = []
    for piece in textual:
        score = scores[piece]
        for cut in range(1, len(piece)):
            left = piece[:cut]
            if left in textual and (right := piece[cut:]) in textual:
                found.append((-score, vocabulary[piece], -cut, left, right))
    found.sort()
    return [(left, right) for _, _, _, left, right in found]


def _add_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Have control tokens found in text as special ones, user-defined ones as ordinary ones that are never cut."""
    special = [
        AddedToken(token, special=True, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (CONTROL, UNKNOWN) and token
    ]
    ordinary = [
        AddedToken(token, special=False, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind == USER_DEFINED and token
    ]
    backend.add_special_tokens(special)
    backend.add_tokens(ordinary)
