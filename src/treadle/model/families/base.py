"""What a family file states, and the reader that makes sure that it consumed every key of a config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from treadle.config import UserError
from treadle.model.spec import ModelSpec


@dataclass(frozen=True)
class Family:
    """A kind of model.

    `read` turns config.json into a spec; `names` maps each of our parameter names to the name of its tensor in a
    Hugging Face checkpoint (the mapping is one to one, so it serves loading and saving).
    """

    model_type: str
    architecture: str
    read: Callable[[Mapping[str, Any]], ModelSpec]
    names: Callable[[ModelSpec], dict[str, str]]


class ConfigReader:
    """Takes keys out of a config.json and knows which were never asked for."""

    # Say how a checkpoint was made or is to be sampled from; they change no weight and no arithmetic of the model.
    HARMLESS = frozenset(
        """
        _attn_implementation_autoset _name_or_path architectures attn_implementation auto_map bos_token_id
        cache_implementation chunk_size_feed_forward dtype eos_token_id id2label initializer_range is_encoder_decoder
        label2id model_type output_attentions output_hidden_states pad_token_id pretraining_tp problem_type return_dict
        tie_word_embeddings torch_dtype transformers_version use_cache
        """.split()
    )

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self._asked: set[str] = set(self.HARMLESS)

    def take(self, key: str, default: Any = None) -> Any:
        """Return the value of `key`, or `default` where it is absent or null."""
        self._asked.add(key)
        value = self.config.get(key)
        return default if value is None else value

    def need(self, key: str) -> int:
        """Return the positive integer under `key`. Raises UserError."""
        value = self.take(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"config.json: {key} must be a positive whole number, it is {value!r}")
        return value

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse any value of `key` but these (or its absence): the others would change the arithmetic."""
        value = self.take(key, allowed[0])
        if value not in allowed:
            raise UserError(f"config.json: {key}={value!r} is not supported, only {' or '.join(map(repr, allowed))}")

    def harmless(self, *keys: str) -> None:
        """Declare keys that change nothing here."""
        self._asked.update(keys)

    def finish(self) -> None:
        """Raise UserError where config.json holds a key that was neither used nor declared harmless."""
        unknown = sorted(set(self.config) - self._asked)
        if unknown:
            raise UserError(
                f"config.json of a {self.config.get('model_type')} model has keys that are not understood: "
                f"{', '.join(unknown)}; ignoring them could change what the model computes"
            )
