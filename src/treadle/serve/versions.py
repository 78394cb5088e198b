"""Which weights, and which adapters upon them, each request is computed with. Only the engine's thread changes it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from treadle.config import TreadleError, UserError
from treadle.config.errors import nearest
from treadle.serve.block_tables import prefix_root
from treadle.serve.model import Model
from treadle.serve.request import Request
from treadle.serve.runner import Runner

ASLEEP = "the engine is asleep; wake it"
FALLING_ASLEEP = "the engine is falling asleep and takes no new requests; wake it once it sleeps"


class Unavailable(TreadleError):
    """The engine takes no requests for the time being."""


@dataclass(eq=False)
class Version:
    """Weights that are in memory. `number` is never given twice, whatever the name."""

    number: int
    name: str
    model: Model
    runner: Runner


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter that requests can name. `slot` is never given twice, so that what was computed with an adapter is
    not taken for that of another one of the same name."""

    name: str
    path: str
    slot: int
    rank: int
    bytes: int


class Versions:
    """The weights of now, those that some requests still need, and the adapters, which go with all of them."""

    def __init__(self, model: Model, runner: Runner, name: str) -> None:
        self.current = Version(1, name, model, runner)
        self.adapters: dict[str, Adapter] = {}
        self.refusing = ""  # why no request is taken, while the engine sleeps
        self._held = {1: self.current}
        self._slots: set[int] = set()  # of all adapters that the runner has
        self._count = 1

    @property
    def all(self) -> tuple[Version, ...]:
        """Every version that is in memory."""
        return tuple(self._held.values())

    def check(self, adapter: str) -> None:
        """Raise where no request of this adapter ("": none) is taken: UserError, Unavailable. For any thread."""
        if self.refusing:
            raise Unavailable(self.refusing)
        if adapter and adapter not in self.adapters:
            raise UserError(unknown_adapter(adapter, tuple(self.adapters)))

    def bind(self, request: Request) -> None:
        """Let a request be computed with what is current. Raises UserError where its adapter is gone."""
        name = request.settings.adapter
        if name and name not in self.adapters:
            raise UserError(f"the adapter '{name}' was removed before the request began")
        request.weights, request.version = self.current.number, self.current.name
        request.adapter = self.adapters[name].slot if name else 0

    def renew(self, request: Request) -> None:
        """Let a request be computed with the weights of now; its adapter stays."""
        request.weights, request.version = self.current.number, self.current.name

    def root(self, request: Request) -> bytes:
        """Return what besides its tokens a prefix must share with a request's to be used for it."""
        return prefix_root([str(request.weights), str(request.adapter), request.settings.cache_salt])

    def runner(self, weights: int) -> Runner:
        """Return what computes with the weights of that number."""
        return self._held[weights].runner

    def switch(self, name: str, model: Model, runner: Runner) -> None:
        """Make other weights those of now."""
        self._count += 1
        self.current = self._held[self._count] = Version(self._count, name, model, runner)

    def add_adapter(self, adapter: Adapter) -> None:
        """Let requests name an adapter that the runner has."""
        self.adapters[adapter.name] = adapter
        self._slots.add(adapter.slot)

    def remove_adapter(self, name: str) -> Adapter:
        """Let no further request name an adapter. Raises UserError where there is none."""
        if name not in self.adapters:
            raise UserError(unknown_adapter(name, tuple(self.adapters)))
        return self.adapters.pop(name)

    def drop_unused(self, requests: Iterable[Request]) -> None:
        """Free the weights and adapters that are not current and that none of `requests`, which are all, needs."""
        slots = {adapter.slot for adapter in self.adapters.values()}
        if len(self._held) == 1 and slots == self._slots:
            return
        used = list(requests)
        for number in self._held.keys() - {self.current.number} - {request.weights for request in used}:
            self._held.pop(number).runner.forget()
        for slot in self._slots - slots - {request.adapter for request in used}:
            self._slots.discard(slot)
            self.current.runner.drop_adapter(slot)


def unknown_adapter(name: str, known: tuple[str, ...]) -> str:
    """Return the sentence that there is no adapter of that name."""
    if not known:
        return f"there is no adapter '{name}', and no other; load one, or leave it out"
    return f"there is no adapter '{name}'{nearest(name, known) or '; loaded: ' + ', '.join(sorted(known))}"
