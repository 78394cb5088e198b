"""Named parts (optimizers, schedules, sources, operators, families), ours and those of other packages.

Another package adds a part through an entry point:

    [project.entry-points."treadle.optimizers"]
    lion = "their_package.lion:Lion"

It is imported when it is first asked for by name.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from treadle.config.errors import UserError, nearest

T = TypeVar("T")


class Parts(Generic[T]):
    """A table of named parts of one kind.

        optimizers = Parts[OptimizerFactory]("optimizer")
        @optimizers.add("adamw")
        def adamw(...): ...
        optimizers.get("adamw")

    `kind` is the singular noun used in errors; the entry-point group is `treadle.<plural>`.
    """

    def __init__(self, kind: str, group: str | None = None) -> None:
        self.kind = kind
        self.group = group or f"treadle.{kind.replace(' ', '_')}s"
        self._own: dict[str, T] = {}

    def add(self, name: str) -> Callable[[Any], Any]:
        """Register the decorated part under `name`."""

        def register(part: Any) -> Any:
            assert name not in self._own, f"{self.kind} {name!r} is registered twice"
            self._own[name] = part
            return part

        return register

    def names(self) -> list[str]:
        """Return every name that `get` accepts, sorted."""
        return sorted(set(self._own) | {entry.name for entry in self._entries()})

    def get(self, name: str) -> T:
        """Return the part; raises UserError naming the nearest known one, or the package that failed to import."""
        if name in self._own:
            return self._own[name]
        for entry in self._entries():
            if entry.name == name:
                try:
                    return entry.load()
                except Exception as error:
                    package = entry.dist.name if entry.dist else entry.value
                    raise UserError(
                        f"the {self.kind} '{name}' of package '{package}' does not import: {error}"
                    ) from error
        known = self.names()
        raise UserError(f"unknown {self.kind} '{name}'{nearest(name, known) or '; known: ' + ', '.join(known)}")

    def _entries(self) -> list[importlib.metadata.EntryPoint]:
        return list(importlib.metadata.entry_points(group=self.group))
