"""Training a byte-level BPE tokenizer (Sennrich et al. 2016, over bytes as in GPT-2) on a corpus."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from treadle.config import UserError
from treadle.config.progress import progress
from treadle.model.tokenizer import Tokenizer
from treadle.model.tokenizer_build import LLAMA3_SPLIT

CHAT_TOKENS = ("<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{{ '\\n' }}{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def check_vocabulary_size(
    vocabulary_size: int, special_tokens: int = 3 + len(CHAT_TOKENS), name: str = "vocabulary_size"
) -> None:
    """Raise UserError where so many tokens cannot hold every byte and the special tokens (by default ours).

    `name` is what the number is called where it was given.
    """
    least = special_tokens + 256
    if vocabulary_size < least:
        raise UserError(f"{name} is {vocabulary_size}, below {least} (256 bytes and {special_tokens} special tokens)")


def train_tokenizer(
    texts: Iterable[str],
    vocabulary_size: int,
    *,
    bos_token: str = "<|bos|>",  # noqa: S107
    eos_token: str = "<|eos|>",  # noqa: S107
    pad_token: str = "<|pad|>",  # noqa: S107
    extra_special_tokens: Sequence[str] = CHAT_TOKENS,
    min_frequency: int = 2,
    add_bos: bool = True,
) -> Tokenizer:
    """Return a byte-level BPE tokenizer of `vocabulary_size` tokens (fewer where the texts hold fewer pairs).

    The special tokens come first, then the 256 bytes, then the merges; the same texts in the same order give the same
    tokenizer. Where both chat tokens are among the extra ones, it has a ChatML chat template.
    Raises UserError where the size is below specials + 256 or there is no text.
    """
    special = list(dict.fromkeys((bos_token, eos_token, pad_token, *extra_special_tokens)))
    check_vocabulary_size(vocabulary_size, len(special))
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(  # pyrefly: ignore
        [
            pre_tokenizers.Split(tokenizers.Regex(LLAMA3_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()  # pyrefly: ignore
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        min_frequency=min_frequency,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    counted = _Counted(texts)
    backend.train_from_iterator(counted.items(), trainer)
    if counted.characters == 0:
        raise UserError("there is no text to train a tokenizer on; check the paths of the corpus")
    from treadle.model.tokenizer_files import set_bos_eos

    set_bos_eos(backend, bos_token if add_bos else None, None)
    chat = ("{{ bos_token }}" if add_bos else "") + CHATML if set(CHAT_TOKENS) <= set(special) else None
    end = [backend.token_to_id(CHAT_TOKENS[1])] if chat else []
    return Tokenizer(
        backend,
        bos_token=bos_token,
        eos_token=eos_token,
        pad_token=pad_token,
        extra_eos_ids=[index for index in end if index is not None],
        chat_templates={"default": chat} if chat else {},
    )


class _Counted:
    """The texts, with what was read of them shown as progress."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts, self.characters = texts, 0

    def items(self) -> Iterator[str]:
        with progress("Reading text for the tokenizer", total=None, unit="B") as step:
            for text in self.texts:
                self.characters += len(text)
                yield text
                step(len(text))
        if self.characters > 10_000_000 and not sys.stderr.isatty():  # on a terminal the library shows its own bar
            print("Merging pairs for the tokenizer", file=sys.stderr, flush=True)
