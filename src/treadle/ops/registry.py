"""The registry: one operator is a schema, a readable PyTorch reference and any number of kernels.

How to add an operator
----------------------
Write one file that makes an `Operator`:

    double = Operator(
        "double",
        "(Tensor x) -> Tensor",
        reference=lambda x: x + x,
        fake=lambda x: torch.empty_like(x),
        backward=lambda ctx, grad: (2 * grad,),
    )

It is then `torch.ops.treadle.double`, works under autograd, `torch.compile` and fake tensors, and `treadle ops` lists
it. Without `backward` it has no gradient; with `composite=True` its gradient is that of the PyTorch operators that its
reference calls (then `fake` and `backward` are not given). Another package names the object in an entry point:

    [project.entry-points."treadle.operators"]
    double = "their_package.double:double"

How to add a kernel
-------------------
A kernel is a function of the operator's own arguments, what it needs of the machine, and what it accepts in a call:

    @double.kernel("native", needs=native.missing, accepts=lambda x: x.dtype == torch.float32, takes="float32 on CPU")
    def double_native(x): ...

`needs` returns "" where the kernel can run here, else the reason; asked once. `accepts` is asked on each call, so
it only looks at dtypes, shapes and devices. Kernels are tried in the order in which they were added, the one added
last first; the reference runs where none accepts. A test compares each kernel with the reference in higher precision.
Another package adds a kernel with an entry point in the group `treadle.kernels`: it names a function that takes no
argument and adds the kernel, and is called before the first operator chooses.

`TREADLE_KERNELS=reference` (or a comma-separated list of kernel names) limits the choice, to find one at fault.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from treadle.config.errors import UserError, nearest
from treadle.config.plugins import Parts

LIBRARY = torch.library.Library("treadle", "FRAGMENT")
OPERATORS = Parts[Any]("operator")


@dataclass(frozen=True)
class Kernel:
    """One implementation of an operator."""

    name: str
    run: Callable[..., Any]
    needs: Callable[[], str]  # "" where this machine can run it, else the reason
    accepts: Callable[..., bool]  # asked on each call, with the operator's arguments
    takes: str  # what `accepts` says, in words


class Operator:
    """An operator of the namespace `treadle`: calling it runs the first kernel that accepts the arguments.

    `note` is what `treadle ops` says of the reference.
    """

    def __init__(
        self,
        name: str,
        schema: str,
        reference: Callable[..., Any],
        fake: Callable[..., Any] | None = None,
        backward: Callable[..., Any] | None = None,
        setup_context: Callable[..., None] | None = None,
        composite: bool = False,
        note: str = "",
    ) -> None:
        self.name, self.schema, self.reference, self.note = name, schema, reference, note
        self.kernels: list[Kernel] = []
        self._usable: Sequence[Kernel] | None = None
        self._reference = Kernel("reference", reference, lambda: "", lambda *_: True, "anything")
        LIBRARY.define(name + schema)
        key = "CompositeImplicitAutograd" if composite else "CompositeExplicitAutograd"
        LIBRARY.impl(name, self.choose_and_run, key)
        qualified = f"treadle::{name}"
        if fake is not None:
            torch.library.register_fake(qualified, fake, lib=LIBRARY)
        if backward is not None:
            torch.library.register_autograd(qualified, backward, setup_context=setup_context, lib=LIBRARY)
        self.call = getattr(torch.ops.treadle, name).default
        OPERATORS.add(name)(self)

    def __call__(self, *arguments: Any) -> Any:
        """Run the operator through PyTorch's dispatcher (autograd, fake tensors, compilation)."""
        return self.call(*arguments)

    def kernel(
        self, name: str, needs: Callable[[], str], accepts: Callable[..., bool], takes: str
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Add the decorated function as a kernel; see the module's text."""

        def add(run: Callable[..., Any]) -> Callable[..., Any]:
            self.kernels.insert(0, Kernel(name, run, needs, accepts, takes))
            self._usable = None
            return run

        return add

    def choose_and_run(self, *arguments: Any) -> Any:
        kernel = self.kernel_for(*arguments)
        if _recorded is not None:
            _recorded.setdefault(self.name, []).append(kernel.name)
        return kernel.run(*arguments)

    def kernel_for(self, *arguments: Any) -> Kernel:
        """Return the kernel that these arguments run: the first that accepts them, at last the reference."""
        usable = self._usable
        if usable is None:
            usable = self._usable = [kernel for kernel in self.all_kernels() if not refusal(kernel)]
        for kernel in usable:
            if kernel.accepts(*arguments):
                return kernel
        return self._reference

    def all_kernels(self) -> list[Kernel]:
        """Return every kernel, those of other packages included, the preferred one first."""
        load_plugin_kernels()
        return list(self.kernels)


_recorded: dict[str, list[str]] | None = None


@contextlib.contextmanager
def recording() -> Generator[dict[str, list[str]]]:
    """Note which kernel each call of an operator runs, in the order of the calls, until left."""
    global _recorded
    before, _recorded = _recorded, {}
    try:
        yield _recorded
    finally:
        _recorded = before


def refusal(kernel: Kernel) -> str:
    """Return why `kernel` is never chosen here, or ""."""
    allowed = allowed_kernels()
    if allowed is not None and kernel.name not in allowed:
        return f"TREADLE_KERNELS={','.join(allowed)} leaves it out"
    return kernel.needs()


def allowed_kernels() -> list[str] | None:
    """Return the kernel names that TREADLE_KERNELS allows, None where it is unset; UserError for an unknown name."""
    allowed = [name.strip() for name in os.environ.get("TREADLE_KERNELS", "").split(",") if name.strip()]
    if not allowed:
        return None
    load_plugin_kernels()
    known = {"reference", *(kernel.name for operator in _operators() for kernel in operator.kernels)}
    for name in allowed:
        if name not in known:
            hint = nearest(name, known) or f"; known: {', '.join(sorted(known))}"
            raise UserError(f"TREADLE_KERNELS names the unknown kernel '{name}'{hint}")
    return allowed


def _operators() -> list[Operator]:
    """Return every operator that imports."""
    found = []
    for name in OPERATORS.names():
        with contextlib.suppress(UserError):
            found.append(OPERATORS.get(name))
    return found


def rechoose() -> None:
    """Forget which kernels are usable, so that a changed TREADLE_KERNELS or library takes effect."""
    for operator in _operators():
        operator._usable = None


_plugins_loaded = False


def load_plugin_kernels() -> None:
    """Call the entry points of the group `treadle.kernels`, once. Raises UserError naming the package that fails."""
    global _plugins_loaded
    if _plugins_loaded:
        return
    _plugins_loaded = True
    for entry in importlib.metadata.entry_points(group="treadle.kernels"):
        try:
            entry.load()()
        except Exception as error:
            package = entry.dist.name if entry.dist else entry.value
            raise UserError(f"the kernel '{entry.name}' of package '{package}' cannot be added: {error}") from error
