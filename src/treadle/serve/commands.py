"""What can be done to a running engine besides asking it: by name and plain arguments, so that it can travel.

A command's slow part (reading weights) runs in the caller's thread, its effect in the engine's, between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, StringConstraints

from treadle.config import Settings, UserError, parse_settings
from treadle.config.errors import nearest

if TYPE_CHECKING:
    from treadle.serve.core import Core
    from treadle.serve.engine import Engine

Name = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]+$")]
Path = Annotated[str, StringConstraints(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")]


class NoArguments(Settings):
    """Of a command that needs none."""


class AdapterArguments(Settings):
    """An adapter by the name that requests use, and where it lies (a PEFT directory)."""

    name: Name
    path: Path
    replace: bool = False  # take the place of another one of that name


class AdapterName(Settings):
    """An adapter."""

    name: Name


class WeightsArguments(Settings):
    """Where weights lie, and what they are called; "": by their content."""

    path: Path
    version: Annotated[str, StringConstraints(max_length=256, pattern=r"^[^\x00-\x1f\x7f]*$")] = ""


class SwitchArguments(Settings):
    """Whether requests that have begun are computed again with the new weights."""

    restart: bool = False


class LoadArguments(WeightsArguments, SwitchArguments):
    """What to load, and how to switch to it."""


class SleepArguments(Settings):
    """What to free (1: the cache, 2: the weights too), and what becomes of the requests at hand."""

    level: Literal[1, 2] = Field(2)
    mode: Literal["wait", "abort", "refuse"] = "wait"


@dataclass(frozen=True)
class Command:
    """What a command takes, what it does with an engine, and what undoes it (a command and the arguments it shares).

    The function returns plain data.
    """

    arguments: type[Settings]
    run: Callable[[Engine, Core, Any], dict[str, Any]]
    undo: tuple[str, tuple[str, ...]] | None = None


def _forget_prefixes(engine: Engine, core: Core, _: NoArguments) -> dict[str, Any]:
    engine.call(core.tables.forget_all)
    return {"forgotten": True}


def _change(name: str) -> Callable[[Engine, Core, Any], dict[str, Any]]:
    """Return the function that calls the method of changes.py of that name."""
    return lambda engine, core, arguments: getattr(engine.changes, name)(**dict(arguments))


COMMANDS: dict[str, Command] = {
    "forget_prefixes": Command(NoArguments, _forget_prefixes),
    "state": Command(NoArguments, _change("state")),
    "adapters": Command(NoArguments, _change("list_adapters")),
    "add_adapter": Command(AdapterArguments, _change("add_adapter"), undo=("remove_adapter", ("name",))),
    "remove_adapter": Command(AdapterName, _change("remove_adapter")),
    "load_weights": Command(LoadArguments, _change("load_weights")),
    # The same in two, for replicas that must all have loaded before the first one switches.
    "stage_weights": Command(WeightsArguments, _change("stage_weights"), undo=("drop_staged_weights", ())),
    "switch_weights": Command(SwitchArguments, _change("switch_weights")),
    "drop_staged_weights": Command(NoArguments, _change("drop_staged_weights")),
    "sleep": Command(SleepArguments, _change("sleep"), undo=("wake", ())),
    "wake": Command(NoArguments, _change("wake"), undo=("sleep", ())),
}


def check_command(name: str, arguments: Mapping[str, Any]) -> Settings:
    """Return the arguments as the command takes them. Raises UserError for an unknown command or wrong arguments."""
    if name not in COMMANDS:
        hint = nearest(name, COMMANDS) or f", only {', '.join(sorted(COMMANDS))}"
        raise UserError(f"there is no command '{name}'{hint}")
    return parse_settings(COMMANDS[name].arguments, dict(arguments), source=name)


def run_command(engine: Engine, core: Core, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Carry out the command `name`. Raises UserError for one that is not known or cannot be carried out."""
    checked = check_command(name, arguments)
    return COMMANDS[name].run(engine, core, checked)
