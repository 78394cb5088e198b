"""The tokenizer that a GGUF file describes in its metadata."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treadle.config import UserError
from treadle.config.errors import nearest
from treadle.model.tokenizer import Tokenizer
from treadle.model.tokenizer_build import (
    CONTROL,
    LLAMA3_SPLIT,
    NORMAL,
    SPACE,
    UNKNOWN,
    Split,
    byte_level_backend,
    sentencepiece_backend,
)
from treadle.model.tokenizer_files import set_bos_eos
from treadle.weights.gguf import GgufFile

QWEN2 = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = _WORDS.replace("%s", "") + r"|\p{N}" + _REST
GPT_4O = _WORDS.replace("%s", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?") + r"|\p{N}{1,3}" + _REST
# What llama.cpp does for files that name no more than "default".
DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)

# tokenizer.ggml.pre: the split of the model that the name stands for, from that model's own tokenizer.json.
SPLITS: dict[str, Split] = {
    "default": Split(DEFAULT),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "exaone4"), Split()),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "minerva-7b"), Split(digits=True)),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"),
        Split((LLAMA3_SPLIT,), whole_words=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Split((LLAMA3_SPLIT,))),
    "qwen2": Split((QWEN2,), nfc=True),
    "deepseek-r1-qwen": Split((QWEN2,)),
    "tekken": Split((TEKKEN,), whole_words=True),
    **dict.fromkeys(("gpt-4o", "llama4"), Split((GPT_4O,))),
}
# Byte-level vocabularies that begin a text with BOS unless their file says otherwise.
_BOS_BY_DEFAULT = {name for name, split in SPLITS.items() if split.whole_words}
# Tokens that end a turn: where the chat template writes one, it ends a generation, as the model's own
# generation_config.json (which GGUF does not keep) says.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>")


def gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """Return the tokenizer of a GGUF file, its chat templates included. Raises UserError naming file and key."""
    return _Reader(file).tokenizer()


class _Reader:
    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.model = self._get("tokenizer.ggml.model", str)
        if self.model is None or "tokenizer.ggml.tokens" not in file.metadata:
            raise UserError(f"{file.path} holds no tokenizer; convert the model to GGUF again with its tokenizer")
        self.tokens: list[str] = self._strings("tokenizer.ggml.tokens")
        self.kinds = self._numbers("tokenizer.ggml.token_type", int, NORMAL)

    def fail(self, key: str, problem: str) -> UserError:
        return UserError(f"{self.file.path}: metadata key '{key}' {problem}; convert the model to GGUF again")

    def _get(self, key: str, kind: type) -> Any:
        value = self.file.metadata.get(key)
        if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise self.fail(key, f"is a {type(value).__name__}, not a {kind.__name__}")
        return value

    def _strings(self, key: str) -> list[str]:
        value = self._get(key, list)
        if not value or not all(isinstance(item, str) for item in value):
            raise self.fail(key, "is not a list of texts")
        return value

    def _numbers(self, key: str, kind: type, default: Any) -> list[Any]:
        """A list with one number for each token; all `default` where the file has none."""
        value = self._get(key, list)
        if value is None:
            return [default] * len(self.tokens)
        if len(value) != len(self.tokens) or not all(type(item) is kind for item in value):
            raise self.fail(key, f"is not a list of one number for each of the {len(self.tokens)} tokens")
        return value

    def _token(self, role: str, default: int | None = None) -> str | None:
        key = f"tokenizer.ggml.{role}_token_id"
        index = self._get(key, int)
        index = default if index is None else index
        if index is None:
            return None
        if not 0 <= index < len(self.tokens):
            raise self.fail(key, f"is {index}, but there are {len(self.tokens)} tokens")
        return self.tokens[index]

    def tokenizer(self) -> Tokenizer:
        if self.model == "gpt2":
            backend, defaults, add_bos = self._byte_level()
        elif self.model == "llama":
            backend, defaults, add_bos = self._sentencepiece()
        else:
            raise UserError(
                f"{self.file.path}: tokenizers of type '{self.model}' are not supported (gpt2 and llama are); "
                "use the model's Hugging Face directory"
            )
        bos, eos, unknown = (self._token(role, defaults.get(role)) for role in ("bos", "eos", "unknown"))
        padding = self._token("padding")
        stated_bos, stated_eos = (self._get(f"tokenizer.ggml.add_{role}_token", bool) for role in ("bos", "eos"))
        set_bos_eos(
            backend, bos if (add_bos if stated_bos is None else stated_bos) else None, eos if stated_eos else None
        )
        templates = self._chat_templates()
        ends = [self._token(role) for role in ("eot", "eom")]
        ends += [
            token
            for token, kind in zip(self.tokens, self.kinds, strict=True)
            if kind == CONTROL and token in _TURN_ENDS and any(token in text for text in templates.values())
        ]
        ids = [backend.token_to_id(token) for token in ends if token is not None]
        return Tokenizer(
            backend,
            bos_token=bos,
            eos_token=eos,
            pad_token=padding,
            unk_token=unknown,
            extra_eos_ids=[index for index in ids if index is not None],
            chat_templates=templates,
        )

    def _unique(self, tokens: Sequence[str]) -> None:
        if len(set(tokens)) != len(tokens):
            seen: dict[str, int] = {}
            for index, token in enumerate(tokens):
                if token in seen:
                    raise self.fail("tokenizer.ggml.tokens", f"has {token[:40]!r} twice, as {seen[token]} and {index}")
                seen[token] = index

    def _byte_level(self) -> tuple[Any, dict[str, int], bool]:
        self._unique(self.tokens)
        pre = self._get("tokenizer.ggml.pre", str)
        if pre is None:
            raise UserError(
                f"{self.file.path} has no key 'tokenizer.ggml.pre' to say how its tokenizer splits text, like files of "
                "before May 2024; convert the model to GGUF again or use its Hugging Face directory"
            )
        if pre not in SPLITS:
            raise UserError(
                f"{self.file.path}: the pre-tokenizer '{pre[:60]}' is not known{nearest(pre, SPLITS)}; "
                "use the model's Hugging Face directory, whose tokenizer.json is complete"
            )
        merges = []
        for rank, merge in enumerate(self._strings("tokenizer.ggml.merges")):
            cut = merge.find(" ", 1)
            if cut < 0:
                raise self.fail("tokenizer.ggml.merges", f"has {merge[:40]!r} (item {rank}), which is not two tokens")
            merges.append((merge[:cut], merge[cut + 1 :]))
        try:
            backend = byte_level_backend(self.tokens, merges, self.kinds, SPLITS[pre])
        except ValueError as error:
            raise self.fail("tokenizer.ggml.merges", f"does not fit the tokens ({str(error)[:120]})") from error
        return backend, {}, pre in _BOS_BY_DEFAULT

    def _sentencepiece(self) -> tuple[Any, dict[str, int], bool]:
        tokens, architecture = list(self.tokens), self.file.metadata.get("general.architecture")
        scores = self._numbers("tokenizer.ggml.scores", float, 0.0)
        if isinstance(architecture, str) and architecture.startswith("gemma"):
            # Gemma's runs of spaces are written as spaces, its scores do not follow the order of its merges: the order
            # of the tokens does.
            tokens = [SPACE * len(token) if len(token) > 1 and not token.strip(" ") else token for token in tokens]
            scores = [-float(index) for index in range(len(tokens))]
        self._unique(tokens)
        unknown = self._token("unknown", 0) or ""
        kinds = [UNKNOWN if token == unknown else kind for token, kind in zip(tokens, self.kinds, strict=True)]
        stated = self._get("tokenizer.ggml.add_space_prefix", bool)
        add_space = (
            not (isinstance(architecture, str) and architecture.startswith("gemma")) if stated is None else stated
        )
        backend = sentencepiece_backend(tokens, scores, kinds, unknown, add_space)
        return backend, {"bos": 1, "eos": 2, "unknown": 0}, True

    def _chat_templates(self) -> dict[str, str]:
        templates = {}
        if (usual := self._get("tokenizer.chat_template", str)) is not None:
            templates["default"] = usual
        for key in self.file.metadata:
            if key.startswith("tokenizer.chat_template.") and (text := self._get(key, str)) is not None:
                templates[key.removeprefix("tokenizer.chat_template.")] = text
        return templates
