"""What can be done to a running engine besides asking it: by name and plain arguments, so that it can travel.

A command's slow part (reading weights) runs in the caller's thread, its effect in the engine's, between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from treadle.config import UserError

if TYPE_CHECKING:
    from treadle.serve.core import Core
    from treadle.serve.engine import Engine


def forget_prefixes(engine: Engine, core: Core) -> dict[str, Any]:
    """Let no prefix be found that is in the cache now."""
    engine.call(core.tables.forget_all)
    return {"forgotten": True}


COMMANDS: dict[str, Callable[..., dict[str, Any]]] = {"forget_prefixes": forget_prefixes}


def run_command(engine: Engine, core: Core, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Carry out the command `name`. Raises UserError for one that is not known or cannot be carried out."""
    command = COMMANDS.get(name)
    if command is None:
        raise UserError(f"there is no command '{name}', only {', '.join(sorted(COMMANDS))}")
    return command(engine, core, **arguments)
