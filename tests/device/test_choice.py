"""Which device is taken: the one that is named, or what there is."""

from __future__ import annotations

import pytest
import torch

from treadle.config import UserError
from treadle.device.choice import choose_device


@pytest.fixture
def accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs, as far as PyTorch tells; tensors on them are not made."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "empty", lambda *_, device: torch.zeros(0))


@pytest.mark.parametrize("wanted", [None, "auto", "cpu", torch.device("cpu")])
def test_without_an_accelerator_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch, wanted: str | None) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    for rank in (None, 0, 7):
        assert choose_device(wanted, rank) == torch.device("cpu")


@pytest.mark.parametrize("wanted", ["qpu", "meta", "cpu:x", ""])
def test_what_is_not_there_is_named(wanted: str) -> None:
    with pytest.raises(UserError, match=rf"the device '{wanted}' cannot be used here \(.*\); leave it out or use cpu"):
        choose_device(wanted)


@pytest.mark.usefixtures("accelerators")
def test_each_process_has_a_device_of_its_own() -> None:
    assert choose_device() == choose_device("cuda") == torch.device("cuda")
    assert [choose_device("auto", rank) for rank in (0, 1)] == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert choose_device("cuda:1", 0) == torch.device("cuda", 1)
    assert choose_device("cpu", 5) == torch.device("cpu")
    for wanted, rank in (("auto", 2), ("cuda:1", 1)):
        with pytest.raises(UserError, match="finds no cuda device of its own, there are 2; start as many"):
            choose_device(wanted, rank)
