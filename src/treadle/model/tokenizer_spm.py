"""Older model directories, which hold a sentencepiece model (tokenizer.model) and no tokenizer.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tokenizers

from treadle.model.tokenizer_build import SPACE, USER_DEFINED, sentencepiece_backend

MAX_MODEL_BYTES = 64 << 20
BPE = 2


@dataclass(frozen=True)
class SentencepieceModel:
    """What a tokenizer.model holds that a tokenizer.json would."""

    backend: tokenizers.Tokenizer
    named: dict[str, str]


def read_sentencepiece(path: Path) -> SentencepieceModel | None:
    """Return the tokenizer of a sentencepiece BPE with byte fallback and plain text, as Llama 2 and Mistral have.

    None for any other file: a Unigram or tiktoken vocabulary, a normalization of its own, blanks as user symbols.
    """
    from sentencepiece import sentencepiece_model_pb2

    if path.stat().st_size > MAX_MODEL_BYTES:
        return None
    model = sentencepiece_model_pb2.ModelProto()  # pyrefly: ignore
    try:
        model.ParseFromString(path.read_bytes())
    except Exception:  # protobuf's own kind of error; the file is something else
        return None
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    if trainer.model_type != BPE or not trainer.byte_fallback or not model.pieces:
        return None
    if normalizer.precompiled_charsmap or normalizer.remove_extra_whitespaces or trainer.treat_whitespace_as_suffix:
        return None
    pieces = [piece.piece for piece in model.pieces]
    kinds = [piece.type for piece in model.pieces]
    if len(set(pieces)) != len(pieces) or any(
        kind == USER_DEFINED and SPACE in piece for piece, kind in zip(pieces, kinds, strict=True)
    ):
        return None
    named = {
        role: pieces[index]
        for role, index in (
            ("unk_token", trainer.unk_id),
            ("bos_token", trainer.bos_id),
            ("eos_token", trainer.eos_id),
            ("pad_token", trainer.pad_id),
        )
        if 0 <= index < len(pieces)
    }
    scores = [piece.score for piece in model.pieces]
    unknown = named.get("unk_token", pieces[0])
    return SentencepieceModel(sentencepiece_backend(pieces, scores, kinds, unknown, normalizer.add_dummy_prefix), named)
