"""Strict settings: pydantic models read from YAML files and dotted overrides, with errors that a person can act on.

    class OptimizerSettings(Settings):
        name: str = "adamw"
        lr: float = Field(3e-4, gt=0)

    settings = load_settings(RunSettings, "run.yaml", ["train.steps=200"])

A component owns its settings class next to its code; a run's settings compose them.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from treadle.config.errors import UserError, in_short, nearest

MAX_SETTINGS_BYTES = 4 << 20
# Beside its own errors: bytes that are no text, a date such as 2026-99-99, brackets nested without end.
NOT_YAML = (yaml.YAMLError, ValueError, RecursionError)


class Settings(BaseModel):
    """Base of all settings: unknown keys are errors, values are validated, instances are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=())


S = TypeVar("S", bound=Settings)


def load_settings(kind: type[S], path: str | Path | None, overrides: Sequence[str] = ()) -> S:
    """Read `path` (YAML, or None for defaults), apply `key.path=value` overrides, validate as `kind`.

    Raises UserError naming the file and the key when the file cannot be read, a key is unknown (with the nearest
    known one) or a value is not allowed (with what is).
    """
    tree: Any = {} if path is None else read_yaml(path)
    if not isinstance(tree, dict):
        raise UserError(f"{path} must hold keys and values, not a {type(tree).__name__}")
    for override in overrides:
        set_dotted(tree, override)
    return parse_settings(kind, tree, source=str(path) if path is not None else "the settings")


def read_yaml(path: str | Path) -> Any:
    """Return what the YAML file at `path` holds; an empty file is an empty mapping. Raises UserError."""
    file = Path(path)
    if not file.is_file():
        raise UserError(f"{file} is not a file; give the path of a YAML settings file")
    if file.stat().st_size > MAX_SETTINGS_BYTES:
        raise UserError(f"{file} is larger than {MAX_SETTINGS_BYTES >> 20} MiB, too large for a settings file")
    try:
        return yaml.load(file.read_text("utf-8"), _UniqueKeyLoader) or {}  # noqa: S506 - a SafeLoader
    except NOT_YAML as error:
        raise UserError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from error
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}; make it readable") from error


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML as usual, merge keys (<<) included, but a key given twice is an error, not a silent win for the last, and
    3e-4 is a number.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key is not a word", key.start_mark)
            if (key.tag, key.value) in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key '{key.value}' is given twice", key.start_mark)
            seen.add((key.tag, key.value))
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Put what a mapping merges into it; its own keys win, then those of what is merged first.

        Each key stands there once, however often it is merged, so that small files stay small.
        """
        merged, own = {}, {}
        for key, value in node.value:
            if key.tag != "tag:yaml.org,2002:merge":
                own[key.tag, key.value] = (key, value)
                continue
            for source in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                if not isinstance(source, yaml.MappingNode):
                    problem = "<< merges a mapping or a list of mappings"
                    raise yaml.constructor.ConstructorError(None, None, problem, value.start_mark)
                self.flatten_mapping(source)
                for pair in source.value:
                    merged.setdefault((pair[0].tag, pair[0].value), pair)
        node.value = list((merged | own).values())


def set_dotted(tree: dict[str, Any], override: str) -> None:
    """Put `a.b.c=value` into `tree`; the value is read as YAML, list items are addressed by number."""
    path, separator, text = override.partition("=")
    if not separator or not path.strip():
        raise UserError(f"'{override}' is not of the form key.path=value")
    try:
        value = yaml.load(text, _UniqueKeyLoader)  # noqa: S506 - a SafeLoader
    except NOT_YAML as error:
        raise UserError(f"the value of '{override}' is not valid YAML: {' '.join(str(error).split())}") from error
    keys = path.strip().split(".")
    node: Any = tree
    for index, key in enumerate(keys):
        last = index == len(keys) - 1
        if isinstance(node, list):
            if not key.isdecimal() or int(key) >= len(node):
                raise UserError(
                    f"'{override}': '{'.'.join(keys[:index])}' is a list of {len(node)}, '{key}' is not in it"
                )
            if last:
                node[int(key)] = value
            elif not isinstance(node[int(key)], (dict, list)):
                node[int(key)] = {}
            node = node[int(key)]
        elif last:
            node[key] = value
        else:
            if not isinstance(node.get(key), (dict, list)):
                node[key] = {}
            node = node[key]


def parse_settings(kind: type[S], tree: Any, source: str = "the settings") -> S:
    """Validate plain data as `kind`; raises UserError with one line that names every wrong key."""
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        problems = [_explain(kind, problem) for problem in _closest(error.errors(include_url=False))]
        raise UserError(f"{source}: " + "; ".join(dict.fromkeys(problems))) from error


def _closest(problems: Sequence[Any]) -> list[Any]:
    """Return the problems without those of alternatives that the value was less like.

    Where several kinds of value are allowed, pydantic tells what is wrong with the value as each of them.
    """
    fields: dict[Any, list[Any]] = {}
    for problem in problems:
        fields.setdefault(problem["loc"][:1], []).append(problem)
    kept: list[Any] = []
    for found in fields.values():
        if not any(_is_alternative(part) for problem in found for part in problem["loc"]):
            kept += found
            continue
        deepest = max(len(problem["loc"]) for problem in found)
        first = next(problem for problem in found if len(problem["loc"]) == deepest)
        # Of a value of the wrong type it is no news that it has other keys.
        wrong_type = first["loc"][-1] == "type" or _is_alternative(first["loc"][-1])
        kept += [first] if wrong_type else [one for one in found if one["loc"][:-1] == first["loc"][:-1]]
    return kept


def _is_alternative(part: Any) -> bool:
    """Whether a part of a problem's location names one of several allowed types, such as list[int] or NamedTool."""
    return isinstance(part, str) and (
        "[" in part or part in ("str", "int", "float", "bool", "none") or part[:1].isupper()
    )


def _explain(kind: type[BaseModel], problem: Any) -> str:
    place = [part for part in problem["loc"] if not str(part).startswith("function-")]
    location = [place[0], *(part for part in place[1:] if not _is_alternative(part))] if place else []
    name = ".".join(str(part) for part in location) or "the whole"
    if problem["type"] == "extra_forbidden":
        known = _known_keys(kind, location[:-1])
        hint = nearest(str(location[-1]), known)
        return f"unknown key '{name}'{hint or ('; known keys: ' + ', '.join(sorted(known)) if known else '')}"
    if problem["type"] == "missing":
        return f"key '{name}' is required"
    message = problem["msg"].removeprefix("Value error, ")
    shown = in_short(problem.get("input"))
    if problem["type"] in ("value_error", "assertion_error"):
        return f"'{name}': {message}" if location else message
    return f"'{name}' is {shown}: {message[0].lower() + message[1:]}"


def _known_keys(kind: Any, location: Sequence[Any]) -> set[str]:
    """Follow `location` through nested settings and return the keys that are known there."""
    models = _models_in(kind)
    for part in location:
        following: list[type[BaseModel]] = []
        for model in models:
            field = next((f for name, f in model.model_fields.items() if part in (name, f.alias)), None)
            if field is not None:
                following += _models_in(field.annotation)
            elif isinstance(part, int) or part == model.__name__:
                following.append(model)
        models = following or models
    return {field.alias or name for model in models for name, field in model.model_fields.items()}


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if (
        isinstance(annotation, type)
        and issubclass(annotation, BaseModel)
        and not isinstance(annotation, types.GenericAlias)
    ):
        return [annotation]
    return [model for inner in typing.get_args(annotation) for model in _models_in(inner)]


def save_settings(settings: Settings, path: str | Path) -> None:
    """Write the resolved settings, defaults included, as YAML that `load_settings` reads back."""
    from treadle.config.files import write_atomically

    text = yaml.safe_dump(settings.model_dump(mode="json", by_alias=True), sort_keys=False, allow_unicode=True)
    write_atomically(path, text.encode())


# YAML 1.1 reads 3e-4 as text; numbers are written that way in every training recipe.
_UniqueKeyLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)
