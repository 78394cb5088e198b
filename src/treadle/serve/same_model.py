"""Whether what lies at a path is another version of a model that is being served."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass, replace
from typing import Any

from treadle.config import UserError
from treadle.model.families import read_spec
from treadle.serve.model import Model
from treadle.weights.checkpoint import open_checkpoint
from treadle.weights.load import load_tokenizer


def check_same_model(model: Model, path: str) -> None:
    """Raise UserError naming what differs where more than the weights of the model at `path` are not `model`'s."""
    spec = read_spec(open_checkpoint(path).config)
    # How parameters are drawn before training does not matter any more.
    differs = difference(model.spec, replace(spec, initializer_range=model.spec.initializer_range))
    if differs:
        raise UserError(f"{path} is another model: its {differs}; start a server of its own for it")
    ours, theirs = model.tokenizer, load_tokenizer(path, spec.vocabulary)
    if ours is not None and theirs is not None and ours.backend.get_vocab() != theirs.backend.get_vocab():
        raise UserError(f"{path} has another tokenizer than the model that is served; start a server of its own for it")


def difference(ours: Any, theirs: Any, where: str = "") -> str:
    """Return the first thing in which two specs differ, in words, or ""."""
    if is_dataclass(ours) and type(ours) is type(theirs):
        for field in fields(ours):
            if field.compare:
                name = f"{where}.{field.name}" if where else field.name
                found = difference(getattr(ours, field.name), getattr(theirs, field.name), name)
                if found:
                    return found
        return ""
    if isinstance(ours, tuple) and isinstance(theirs, tuple):
        if len(ours) != len(theirs):
            return f"{where} are {len(theirs)} instead of {len(ours)}"
        return next(
            filter(None, (difference(*pair, f"{where}.{i}") for i, pair in enumerate(zip(ours, theirs, strict=True)))),
            "",
        )
    # Formats keep such numbers as float32 or as text.
    close = isinstance(ours, float) and isinstance(theirs, float) and math.isclose(ours, theirs, rel_tol=1e-6)
    return "" if close or ours == theirs else f"{where} is {theirs!r} instead of {ours!r}"
