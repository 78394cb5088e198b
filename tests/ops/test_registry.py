"""How a kernel is chosen, and how other packages add operators and kernels."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Generator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from treadle.config import UserError
from treadle.ops import OPERATORS, Operator, registry
from treadle.ops.listing import fallbacks, listing

from .compare import assert_close


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Generator[Operator]:
    """The operator of the registry's own documentation, in a library that is gone after the test."""
    library = torch.library.Library("treadle", "FRAGMENT")
    monkeypatch.setattr(registry, "LIBRARY", library)
    monkeypatch.setattr(registry, "OPERATORS", type(OPERATORS)("operator"))
    monkeypatch.delenv("TREADLE_KERNELS", raising=False)
    yield Operator(
        "double",
        "(Tensor x) -> Tensor",
        reference=lambda x: x + x,
        fake=lambda x: torch.empty_like(x),
        backward=lambda ctx, grad: (2 * grad,),
    )
    library._destroy()
    # PyTorch keeps the packet it has looked up under torch.ops.
    vars(torch.ops.treadle).pop("double", None)


def add_kernel(
    operator: Operator, name: str, answer: float, reason: str = "", dtype: torch.dtype = torch.float32
) -> None:
    @operator.kernel(name, needs=lambda: reason, accepts=lambda x: x.dtype == dtype, takes=f"{dtype}")
    def run(x: Tensor) -> Tensor:
        return torch.full_like(x, answer)


def test_the_documented_operator_works(double: Operator) -> None:
    x = torch.randn(3, requires_grad=True)
    double(x).sum().backward()
    assert torch.equal(double(x), 2 * x) and torch.equal(x.grad, torch.full((3,), 2.0))
    torch.library.opcheck(double.call, (x,))


def test_the_kernel_added_last_goes_first_and_the_reference_last(double: Operator) -> None:
    x = torch.ones(1)
    assert double.kernel_for(x).name == "reference" and double(x) == 2
    add_kernel(double, "slow", 3)
    add_kernel(double, "fast", 4)
    add_kernel(double, "wrong type", 5, dtype=torch.float64)
    add_kernel(double, "no hardware", 6, reason="this CPU has no such instruction")
    assert double.kernel_for(x).name == "fast" and double(x) == 4
    assert double(x.double()) == 5 and double(x.half()) == 2


def test_what_a_machine_lacks_is_asked_once(double: Operator) -> None:
    asked = []
    double.kernel("k", needs=lambda: asked.append(1) or "", accepts=lambda x: True, takes="all")(lambda x: x)
    for _ in range(5):
        double(torch.ones(1))
    assert len(asked) == 1


def test_the_environment_limits_the_choice(double: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    add_kernel(double, "slow", 3)
    add_kernel(double, "fast", 4)
    for text, expected in (("reference", 2), ("slow", 3), ("fast,slow", 4), (" slow , reference", 3), ("", 4)):
        monkeypatch.setenv("TREADLE_KERNELS", text)
        double._usable = None
        assert double(torch.ones(1)) == expected
    monkeypatch.setenv("TREADLE_KERNELS", "reference")
    assert registry.refusal(double.kernels[0]) == "TREADLE_KERNELS=reference leaves it out"


def test_an_unknown_kernel_in_the_environment_is_refused(double: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    add_kernel(double, "fast", 4)
    monkeypatch.setenv("TREADLE_KERNELS", "fats")
    with pytest.raises(UserError, match=r"unknown kernel 'fats', did you mean 'fast'"):
        double(torch.ones(1))


def test_the_listing_says_what_runs_and_why_not(double: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    from treadle.ops import listing as module

    monkeypatch.setattr(module, "OPERATORS", registry.OPERATORS)
    add_kernel(double, "fast", 4, reason="it is too hot")
    (entry,) = listing()
    assert entry["operator"] == "double" and entry["runs"] == "reference"
    assert entry["kernels"] == [{"name": "fast", "takes": "torch.float32", "refused": "it is too hot"}]
    assert entry["schema"] == "double(Tensor x) -> Tensor"
    assert fallbacks([entry]) == ["double runs on its reference: it is too hot"]
    assert fallbacks([entry, entry]) == ["2 operators run on their references: it is too hot"]
    add_kernel(double, "other", 4)
    assert listing()[0]["runs"] == "other" and fallbacks(listing()) == []


def entry(name: str, group: str, loaded: object) -> SimpleNamespace:
    def load() -> object:
        if isinstance(loaded, Exception):
            raise loaded
        return loaded

    return SimpleNamespace(name=name, group=group, load=load, dist=SimpleNamespace(name="theirs"), value="theirs:x")


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Generator[list]:
    """Pretend that another package has these entry points."""
    entries: list[SimpleNamespace] = []
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: [entry for entry in entries if entry.group == group]
    )
    monkeypatch.setattr(registry, "_plugins_loaded", False)
    yield entries


def test_a_kernel_of_another_package(double: Operator, install: list) -> None:
    install.append(entry("double.theirs", "treadle.kernels", lambda: add_kernel(double, "theirs", 7)))
    assert double(torch.ones(1)) == 7
    assert [kernel.name for kernel in double.all_kernels()] == ["theirs"]


def test_a_kernel_that_does_not_load_names_its_package(double: Operator, install: list) -> None:
    install.append(entry("double.theirs", "treadle.kernels", ImportError("no module named cuda_magic")))
    with pytest.raises(UserError, match=r"kernel 'double.theirs' of package 'theirs' cannot be added: no module named"):
        double(torch.ones(1))


def test_an_operator_of_another_package(double: Operator, install: list, monkeypatch: pytest.MonkeyPatch) -> None:
    from treadle.ops import listing as module

    install.append(entry("triple", "treadle.operators", SimpleNamespace(call=lambda x: 3 * x)))
    install.append(entry("broken", "treadle.operators", ImportError("it is broken")))
    assert registry.OPERATORS.get("triple").call(2) == 6
    monkeypatch.setattr(module, "OPERATORS", registry.OPERATORS)
    monkeypatch.setattr(module, "_entry", lambda operator: {"operator": "fine"})
    assert {entry.get("error", "") for entry in listing()} >= {
        "the operator 'broken' of package 'theirs' does not import: it is broken"
    }


def test_linear_and_embedding_are_differentiable() -> None:
    from treadle.ops import embedding, linear

    x, weight, bias = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 4), (5, 4), (5,)))
    assert torch.autograd.gradcheck(linear, (x, weight, bias))
    assert torch.autograd.gradcheck(linear, (x, weight))
    tokens = torch.tensor([2, 0, 2])
    assert torch.autograd.gradcheck(lambda w: embedding(tokens, w), (weight,))
    assert_close(linear(x.float(), weight.float(), bias.float()), x @ weight.T + bias, 8)
    assert torch.equal(embedding(tokens, weight), weight[tokens])
    with pytest.raises(IndexError):
        embedding(torch.tensor([5]), weight)


def test_what_ran_is_recorded_by_call(double: Operator) -> None:
    add_kernel(double, "fast", 4)
    with registry.recording() as ran:
        double(torch.ones(2))
        double(torch.ones(2, dtype=torch.float64))
    double(torch.ones(2))
    assert ran == {"double": ["fast", "reference"]}
