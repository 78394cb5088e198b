"""Text to token ids and back: one class over the `tokenizers` library, without importing Transformers.

    tokenizer = Tokenizer.load("path/to/model")
    ids = tokenizer.encode("def main():")
    text = tokenizer.decode(ids)

Text that spells a special token. With `parse_special=True`, the default, `<|im_end|>` in the text becomes that token:
it is meant for text that a program composed, such as a rendered chat template. With `parse_special=False` it is
ordinary characters: it is meant for text that somebody else wrote, such as a training document. Tokens that a
vocabulary adds without marking them special (`<think>`, runs of spaces) are ordinary and are found either way.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from treadle.config import UserError
from treadle.model.tokenizer_stream import DecodeStream, make_stream, vocabulary_bytes


class Tokenizer:
    """A vocabulary and the rules to use it. Immutable once made; safe to share between threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        pad_token: str | None = None,
        unk_token: str | None = None,
        extra_eos_ids: Iterable[int] = (),
        chat_templates: dict[str, str] | None = None,
        config: dict[str, Any] | None = None,
    ) -> None:
        """Wrap `backend`, whose post-processor adds BOS and EOS as the model expects.

        `chat_templates` maps names to Jinja templates, "default" being the usual one. `config` holds the entries of a
        tokenizer_config.json to write again on `save`. Raises UserError where a named token is not in the vocabulary.
        """
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.config = dict(config or {})
        self.chat_templates = dict(chat_templates or {})
        self.bos_token, self.eos_token, self.pad_token, self.unk_token = bos_token, eos_token, pad_token, unk_token
        self.bos_id = self._named("bos", bos_token)
        self.pad_id = self._named("pad", pad_token)
        self.unk_id = self._named("unk", unk_token)
        eos_id = self._named("eos", eos_token)
        first = () if eos_id is None else (eos_id,)
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys((*first, *extra_eos_ids)))
        self.special_ids = frozenset(
            index for index, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._adds_bos = self.bos_id is not None and backend.encode("").ids[:1] == [self.bos_id]

    def _named(self, role: str, token: str | None) -> int | None:
        if token is None:
            return None
        index = self.backend.token_to_id(token)
        if index is None:
            raise UserError(f"the tokenizer's {role} token '{token}' is not in its vocabulary; the files do not match")
        return index

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Return the tokenizer of a Hugging Face model directory. Raises UserError naming the file that is wrong."""
        from treadle.model.tokenizer_files import load_tokenizer

        return load_tokenizer(folder)

    def save(self, folder: str | Path) -> None:
        """Write the files that make Transformers' AutoTokenizer (and `load`) give the same ids and chat template."""
        from treadle.model.tokenizer_files import save_tokenizer

        save_tokenizer(self, folder)

    @classmethod
    def train(cls, texts: Iterable[str], vocabulary_size: int, **options: Any) -> Tokenizer:
        """Return a byte-level BPE trained on `texts`; see `treadle.model.tokenizer_train.train_tokenizer`."""
        from treadle.model.tokenizer_train import train_tokenizer

        return train_tokenizer(texts, vocabulary_size, **options)

    @property
    def vocabulary_size(self) -> int:
        """One more than the largest id, added tokens included: the least number of embedding rows that it needs."""
        return self._vocabulary_size

    @functools.cached_property
    def _vocabulary_size(self) -> int:
        count = self.backend.get_vocab_size(with_added_tokens=True)
        if self.backend.id_to_token(count - 1) is not None and self.backend.id_to_token(count) is None:
            return count
        return 1 + max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def chat_template(self) -> str | None:
        """The usual chat template, or None for a model that has none."""
        return self.chat_templates.get("default")

    def encode(self, text: str, special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Return the ids of `text`.

        `special_tokens` adds BOS and EOS as the model's tokenizer does; a text that already starts with BOS, as
        rendered chats do, gets no second one. `parse_special` is described at the top of this file. Raises UserError
        for text that is not valid Unicode (a lone surrogate).
        """
        return self.encode_batch([text], special_tokens, parse_special)[0]

    def encode_batch(
        self, texts: Sequence[str], special_tokens: bool = True, parse_special: bool = True
    ) -> list[list[int]]:
        """Return the ids of each text, as `encode` does, on all cores."""
        backend = self.backend if parse_special else self._literal_backend
        try:
            found = [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=special_tokens)]
        except TypeError:
            raise _not_text(texts) from None
        if not parse_special and type(self.backend.model).__name__ != "BPE":
            self._refuse_special(texts)
        if special_tokens and self._adds_bos:
            for ids in found:
                while len(ids) > 1 and ids[1] == self.bos_id:
                    del ids[1]
        return found

    def _refuse_special(self, texts: Sequence[str]) -> None:
        """Only BPE never makes a special token out of ordinary characters; for other models the text must have none."""
        for text in texts:
            if self.special_pattern is not None and (match := self.special_pattern.search(text)):
                raise UserError(
                    f"a text spells the special token '{match.group()}', which a {type(self.backend.model).__name__} "
                    "tokenizer cannot take for ordinary text; remove it from the text"
                )

    def encode_with_offsets(self, text: str, parse_special: bool = True) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of `text` alone, without BOS and EOS, and for each the characters [start, end) that it means.

        A character that is several tokens is in the span of each.
        """
        backend = self._bare_backend if parse_special else self._bare_literal_backend
        if not parse_special and type(backend.model).__name__ != "BPE":
            self._refuse_special([text])
        try:
            encoding = backend.encode(text)
        except TypeError:
            raise _not_text([text]) from None
        return encoding.ids, encoding.offsets

    @functools.cached_property
    def special_pattern(self) -> re.Pattern[str] | None:
        """A pattern that finds what spells a special token, the longest first; None where there are none."""
        tokens = [token for index in self.special_ids if (token := self.backend.id_to_token(index))]
        return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))) if tokens else None

    @functools.cached_property
    def _literal_backend(self) -> tokenizers.Tokenizer:
        """The backend that reads special tokens as text: this is a state of a backend, not of a call."""
        twin = _twin(self.backend)
        twin.encode_special_tokens = True
        return twin

    @functools.cached_property
    def _bare_backend(self) -> tokenizers.Tokenizer:
        """The backend without a post-processor, which may leave blanks out of the places that it reports."""
        twin = _twin(self.backend)
        twin.post_processor = None  # pyrefly: ignore
        return twin

    @functools.cached_property
    def _bare_literal_backend(self) -> tokenizers.Tokenizer:
        twin = _twin(self._bare_backend)
        twin.encode_special_tokens = True
        return twin

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; bytes that are not valid UTF-8 become U+FFFD, unknown ids give nothing."""
        listed = ids.tolist() if hasattr(ids, "tolist") else list(ids)  # arrays and tensors too
        return self.backend.decode(listed, skip_special_tokens=skip_special_tokens)

    def stream(self, skip_special_tokens: bool = True, shown: Iterable[int] = ()) -> DecodeStream:
        """Return an incremental decoder: `push(id)` gives the text that is now certain, `finish()` the rest.

        The pieces joined equal `decode` of all ids; a piece never ends within a character. Special tokens that are
        `shown` are never skipped.
        """
        return make_stream(self.backend, self.special_ids.difference(shown) if skip_special_tokens else frozenset())

    def token_to_id(self, token: str) -> int | None:
        """Return the id of the token spelled `token` in the vocabulary, or None."""
        return self.backend.token_to_id(token)

    def id_to_token(self, index: int) -> str | None:
        """Return how the vocabulary spells the token `index`, or None."""
        return self.backend.id_to_token(index) if index >= 0 else None

    @functools.cached_property
    def token_bytes(self) -> tuple[bytes, ...]:
        """The UTF-8 bytes that each id stands for within a text, special tokens as they are spelled."""
        return tuple(vocabulary_bytes(self.backend, self.vocabulary_size))

    @functools.cached_property
    def fingerprint(self) -> str:
        """A SHA-256 in hexadecimal of what decides the ids: vocabulary, merges, rules, added tokens.

        It is the same after `save` and `load`. It leaves out decoding and the chat template.
        """
        state = json.loads(self.backend.to_str())
        decisive = {key: state.get(key) for key in ("normalizer", "pre_tokenizer", "post_processor", "added_tokens")}
        decisive["model"] = {key: value for key, value in (state.get("model") or {}).items() if value is not None}
        text = json.dumps(decisive, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def __repr__(self) -> str:
        return f"Tokenizer({self.vocabulary_size} tokens, bos {self.bos_id}, eos {list(self.eos_ids)})"


def _twin(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return a second backend over the same vocabulary (which is shared, not copied) with the same rules."""
    twin = tokenizers.Tokenizer(backend.model)
    for part in ("normalizer", "pre_tokenizer", "decoder", "post_processor"):
        setattr(twin, part, getattr(backend, part))
    for index, token in sorted(backend.get_added_tokens_decoder().items()):
        (twin.add_special_tokens if token.special else twin.add_tokens)([token])
        assert twin.token_to_id(token.content) == index
    return twin


def _not_text(texts: Sequence[Any]) -> UserError:
    for number, text in enumerate(texts):
        which = "the text" if len(texts) == 1 else f"text {number}"
        if not isinstance(text, str):
            return UserError(f"{which} to encode is a {type(text).__name__}, not a str")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            return UserError(
                f"{which} is not valid Unicode: character {error.start} is the lone surrogate "
                f"U+{ord(text[error.start]):04X}; replace it before encoding"
            )
    return UserError("what is to be encoded must be a list of str")


def check_vocabulary(tokenizer: Tokenizer, embedding_rows: int) -> str | None:
    """Raise UserError where `tokenizer` has ids that an embedding of `embedding_rows` rows has no row for.

    Returns a note for the start-up summary where more than half of the rows have no token (a sign of a wrong
    tokenizer, but also of a padded embedding), else None.
    """
    size = tokenizer.vocabulary_size
    if size > embedding_rows:
        raise UserError(
            f"the tokenizer has {size} tokens but the embedding has {embedding_rows} rows; "
            "use the tokenizer that the model was trained with, or enlarge the embedding"
        )
    if embedding_rows > 2 * size:
        return f"the tokenizer has {size} tokens, the embedding {embedding_rows} rows: most of it is never used"
    return None
