"""Killing a process at each of its file operations in turn: whatever it leaves, nothing may be lost."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

OPERATIONS = ("replace", "rename", "unlink", "rmdir")


def kills(work: Callable[[], object], *beside: tuple[Any, str]) -> Iterator[int]:
    """Run `work` in a copy of this process that is killed at its first file operation, then the second, and so on.

    Yields the number of the operation after each kill, and ends when `work` ends before its turn. `beside` are further
    functions, as (module, name), that count as operations. Raises AssertionError where `work` fails.
    """
    for place in itertools.count():
        child = os.fork()
        if not child:
            try:
                _die_at(place, [*((os, name) for name in OPERATIONS), *beside])
                work()
                os._exit(0)
            finally:
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 0:
            return
        assert code == -signal.SIGKILL
        yield place


def _die_at(place: int, operations: list[tuple[Any, str]]) -> None:
    count = itertools.count()

    def dying(call: Callable[..., Any]) -> Callable[..., Any]:
        def then(*given: Any, **named: Any) -> Any:
            if next(count) == place:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*given, **named)

        return then

    for module, name in operations:
        setattr(module, name, dying(getattr(module, name)))
