"""How a running engine gets other weights and adapters, falls asleep and wakes.

What takes long (reading weights) happens in the caller's thread while steps go on; what it comes to happens in the
engine's thread, between two steps.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import threading
from collections.abc import Generator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import psutil

from treadle.config import UserError
from treadle.serve.model import Model
from treadle.serve.room import Reserve
from treadle.serve.runner import Runner
from treadle.serve.same_model import check_same_model
from treadle.serve.versions import ASLEEP, FALLING_ASLEEP, Adapter, Unavailable, Version

if TYPE_CHECKING:
    from treadle.serve.core import Core
    from treadle.serve.engine import Engine

Facts = dict[str, Any]
ABORTED = "the engine was put to sleep before the request was finished"


@dataclass(frozen=True)
class Staged:
    """Weights that were read and wait to be switched to."""

    name: str
    model: Model
    runner: Runner


class Changes:
    """Carries changes out, one at a time."""

    def __init__(self, engine: Engine, core: Core) -> None:
        self._engine, self._core, self._versions = engine, core, core.versions
        self._slots = itertools.count(1)
        self._lock = threading.Lock()
        self._doing = ""
        self._staged: Staged | None = None

    def state(self) -> Facts:
        """Return what requests get now; every command that changes it returns this too."""
        versions = self._versions
        return {
            "weight_version": versions.current.name,
            "asleep": bool(versions.refusing),
            "adapters": list(versions.adapters),
        }

    # --- adapters

    def add_adapter(self, name: str, path: str, replace: bool = False) -> Facts:
        """Load an adapter, so that requests can name it. Raises UserError, Unavailable."""
        versions, settings, path = self._versions, self._engine.settings, os.path.abspath(path)
        self._check_awake()
        self._check_new(name, replace)
        slot = next(self._slots)
        runner = versions.current.runner
        try:
            rank, size = runner.load_adapter(slot, path, settings.max_lora_rank, self._reserve())

            def add() -> None:
                self._check_new(name, replace)  # another one may have come in between
                if name in versions.adapters:
                    self._core.remove_adapter(name)
                versions.add_adapter(Adapter(name, path, slot, rank, size))

            self._engine.call(add)
        except BaseException:
            runner.drop_adapter(slot)
            raise
        return {**asdict(versions.adapters[name]), **self.state()}

    def remove_adapter(self, name: str) -> Facts:
        """Take no more requests of an adapter; those at hand are finished with it. Raises UserError."""
        self._engine.call(lambda: self._core.remove_adapter(name))
        return {"removed": name, **self.state()}

    def list_adapters(self) -> Facts:
        """Return every adapter that requests can name."""
        return {"adapters": [asdict(adapter) for adapter in self._versions.adapters.values()]}

    def _check_new(self, name: str, replace: bool) -> None:
        adapters, most = self._versions.adapters, self._engine.settings.max_loras
        if name in adapters:
            if not replace:
                raise UserError(f"there is an adapter '{name}' already; remove it first, or ask to replace it")
        elif len(adapters) >= most:
            raise UserError(
                f"{len(adapters)} adapters are loaded, as many as max_loras={most} allows; remove one, or start with "
                "a larger --max-loras"
            )

    # --- weights

    def load_weights(self, path: str, version: str = "", restart: bool = False) -> Facts:
        """Read other weights of the same model and switch to them. Raises UserError, Unavailable."""
        self.stage_weights(path, version)
        return self.switch_weights(restart)

    def stage_weights(self, path: str, version: str = "") -> Facts:
        """Read other weights of the same model; `version` "" names them by their content. Raises UserError."""
        with self._alone(f"loading {path}"):
            self._check_awake()
            if self._staged is not None:
                raise UserError(f"the weights of {self._staged.model.path} are loaded and wait for the switch already")
            current = self._versions.current
            if version and any(one.name == version for one in self._versions.all):
                raise UserError(f"weights that are in use are called '{version}' already; choose another version")
            self._staged = staged = self._read(current, os.path.abspath(path), version)
            return {"staged": staged.name}

    def _read(self, old: Version, path: str, name: str) -> Staged:
        """Return the weights at `path`, called `name` or by their content. Raises UserError."""
        from treadle.weights.identity import content_version

        check_same_model(old.model, path)
        content = content_version(path)
        runner = old.runner.with_weights(path, old.model.dtype, self._reserve())
        return Staged(name or content, _moved(old.model, runner, path, content), runner)

    def switch_weights(self, restart: bool = False) -> Facts:
        """Let requests that have not begun be computed with the staged weights, with `restart` those that have too."""
        with self._alone("switching weights"):
            staged = self._take_staged()
            if staged is None:
                raise UserError("no weights are loaded to switch to; load some first")
            old = self._versions.current.name
            self._engine.call(
                lambda: self._core.switch_weights(staged.name, staged.model, staged.runner, restart),
            )
            return {"previous": old, "restarted": restart, **self.state()}

    def drop_staged_weights(self) -> Facts:
        """Forget the weights that are staged."""
        staged = self._take_staged()
        if staged is not None:
            staged.runner.forget()
        return self.state()

    def _take_staged(self) -> Staged | None:
        staged, self._staged = self._staged, None
        return staged

    # --- sleep

    def sleep(self, level: Literal[1, 2] = 2, mode: Literal["wait", "abort", "refuse"] = "wait") -> Facts:
        """Free the cache and, at level 2, the weights. Requests at hand are finished, ended, or a reason to refuse.

        Level 1 keeps the weights, in the host's memory. So does level 2 where they cannot be read again. Raises
        UserError, Unavailable.
        """
        with self._alone("falling asleep"):
            self._check_awake()
            before = psutil.Process().memory_info().rss
            self._engine.call(lambda: self._begin_sleep(mode))
            try:
                kept = None
                while kept is None:
                    if mode == "wait":
                        self._engine.wait_idle()
                    kept = self._engine.call(lambda: self._fall_asleep(level, mode))
            except BaseException:
                self._versions.refusing = ""
                raise
            self.drop_staged_weights()
            _return_memory()
            freed = max(0, before - psutil.Process().memory_info().rss)
            return {"freed_bytes": freed, "weights": kept, **self.state()}

    def _begin_sleep(self, mode: str) -> None:
        self._check_idle(mode)
        self._versions.refusing = FALLING_ASLEEP

    def _check_idle(self, mode: str) -> None:
        busy = self._core.stats.running + self._core.stats.waiting
        if busy and mode == "refuse":
            raise UserError(f"{busy} requests are at hand; let the engine wait for them, or abort them")

    def _fall_asleep(self, level: int, mode: str) -> str | None:
        """Free the memory. Returns what became of the weights; None where it is too early."""
        # What was admitted before the refusal is with the core by now.
        self._check_idle(mode)
        core, version = self._core, self._versions.current
        if mode == "wait" and not core.idle:
            return None
        core.fail_all(ABORTED)
        what = "freed"
        if level == 1:
            what = "kept, as level 1 asks"
        elif not version.model.on_disk:
            made = "changed" if version.model.path else "made"
            what = f"kept, since they were {made} in memory and cannot be read again"
        model, runner = version.model, version.runner
        runner.sleep(keep_weights=what != "freed")
        core.tables.renew()
        if what == "freed":
            version.model = _moved(model, runner, model.path, model.version)
        self._versions.refusing, core.stats.asleep = ASLEEP, True
        return what

    def wake(self) -> Facts:
        """Make the cache anew and read the weights again, if they were freed. Raises UserError where they do not fit
        the memory any more; the engine sleeps on then."""
        with self._alone("waking"):
            current = self._versions.current
            if self._versions.refusing != ASLEEP:
                return self.state()
            staged = None
            if current.runner.module.device.type == "meta":
                assert current.model.path is not None
                staged = self._read(current, current.model.path, current.name)
                if staged.model.version != current.model.version:  # other files are there now
                    staged = replace(staged, name=staged.model.version)
            try:
                self._engine.call(lambda: self._wake_with(staged))
            except BaseException:
                if staged is not None:
                    staged.runner.forget()
                raise
            return {"previous": current.name, **self.state()}

    def _wake_with(self, staged: Staged | None) -> None:
        versions, step_bytes = self._versions, self._engine.capacity.step_bytes
        runner = versions.current.runner if staged is None else staged.runner
        runner.wake(step_bytes)
        if staged is not None:
            versions.switch(staged.name, staged.model, staged.runner)
            versions.drop_unused(())
        versions.refusing, self._core.stats.asleep = "", False

    # --- within

    @contextlib.contextmanager
    def _alone(self, doing: str) -> Generator[None]:
        if not self._lock.acquire(blocking=False):
            raise UserError(f"the engine is {self._doing}; try again when that is done")
        try:
            self._doing = doing
            yield
        finally:
            self._lock.release()

    def _check_awake(self) -> None:
        if self._versions.refusing:
            raise Unavailable(self._versions.refusing)

    def _reserve(self) -> Reserve:
        return self._core.reserve(self._engine.capacity.step_bytes)


def _moved(model: Model, runner: Runner, path: str | None, version: str) -> Model:
    """Return the model as the weights of a runner make it."""
    return Model(runner.module, model.tokenizer, model.ranks, path, version)


def _return_memory() -> None:
    """Give what the C library keeps for later allocations back to the system, where it can do that (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
