"""The metadata of one architecture in a GGUF file, with account kept of which keys were used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from treadle.config import UserError
from treadle.config.errors import in_short
from treadle.weights.gguf import GgufFile

N = TypeVar("N")


class ArchitectureKeys:
    """Takes the keys of one architecture out of the metadata and knows which were never asked for."""

    # They describe the file, or state what every model here has.
    HARMLESS = frozenset(
        {"vocab_size", "embedding_length_out", "rope.scaling.finetuned", "attention.layer_norm_epsilon"}
    )
    NEUTRAL: Mapping[str, tuple[Any, ...]] = {
        "attention.causal": (True,),
        "use_parallel_residual": (False,),
        "expert_count": (0,),
        "expert_used_count": (0,),
        "pooling_type": (0,),
        "leading_dense_block_count": (0,),
        "tensor_data_layout": ("Meta AI original pth",),
        "logit_scale": (1.0,),
        "residual_scale": (1.0,),
        "embedding_scale": (1.0,),
    }

    def __init__(self, file: GgufFile, name: str) -> None:
        self.file, self.prefix = file, f"{name}."
        self.asked: set[str] = set()

    def get(self, key: str) -> Any:
        """Return the value, or None. A list of equal values, one for each layer, counts as that value."""
        self.asked.add(key)
        value = self.file.metadata.get(self.prefix + key)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            return value[0]
        return value

    def fail(self, key: str, problem: str) -> UserError:
        return UserError(f"{self.file.path}: metadata key '{self.prefix}{key}' {problem}")

    def size(self, key: str) -> int:
        """Return a positive whole number. Raises UserError."""
        value = self._need(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
            raise self.fail(
                key, f"must be a positive whole number, it is {in_short(value)}; convert the model to GGUF again"
            )
        return value

    def size_or(self, key: str, default: int) -> int:
        """Return a positive whole number, or `default` where the key is absent."""
        return default if self.get(key) is None else self.size(key)

    def number(self, key: str) -> float:
        """Return a positive finite number, spelled as short as fp32 allows (1e-05, not 9.999999747378752e-06)."""
        value = self._need(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 3e38:
            raise self.fail(key, f"must be a positive number, it is {in_short(value)}; convert the model to GGUF again")
        return float(str(np.float32(value)))

    def number_or(self, key: str, default: N) -> float | N:
        """Return a positive finite number, or `default` where the key is absent."""
        return default if self.get(key) is None else self.number(key)

    def _need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise self.fail(key, "is missing; convert the model to GGUF again")
        return value

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse any value but these, or the key's absence."""
        value = self.get(key)
        if value is not None and value not in allowed:
            raise self.fail(key, f"is {in_short(value)}; Treadle supports only {in_short(allowed[0])} there")

    def finish(self) -> None:
        """Raise UserError where a key of the architecture was neither used nor is known to change nothing."""
        for key, allowed in self.NEUTRAL.items():
            self.only(key, *allowed)
        ours = {key.removeprefix(self.prefix) for key in self.file.metadata if key.startswith(self.prefix)}
        if unknown := sorted(ours - self.asked - self.HARMLESS):
            raise self.fail(
                unknown[0],
                f"is not understood{' (nor ' + ', '.join(unknown[1:5]) + ')' if unknown[1:] else ''}; "
                "ignoring it could change what the model computes",
            )
