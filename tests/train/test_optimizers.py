"""AdamW against its definition in float64, what decays, plug-ins, and state that survives a change of layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from treadle.config import TreadleError, UserError, parse_settings
from treadle.train.optimizers import (
    OptimizerSettings,
    build_optimizer,
    laid_out_like,
    load_named_state,
    named_state,
    scale_rates,
)


class Toy(nn.Module):
    """One of each kind of parameter, with sizes that do not divide."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = {"embedding": (11, 4), "layers": (5, 4), "norm": (3,)}
        for name, shape in shapes.items():
            module = nn.Module()
            module.weight = nn.Parameter(torch.randn(shape, generator=generator))
            self.add_module(name, nn.ModuleList([module]) if name == "layers" else module)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step + 100)
        for _, parameter in model.named_parameters():
            parameter.grad = laid_out_like(parameter, torch.randn(parameter.shape, generator=generator))
        optimizer.step()


@pytest.mark.parametrize("decay_embedding", [False, True])
def test_adamw_equals_its_definition_in_float64(decay_embedding: bool) -> None:
    settings = OptimizerSettings(lr=0.01, weight_decay=0.3, decay_embedding=decay_embedding)
    model = Toy()
    optimizer = build_optimizer(settings, model.named_parameters())
    expected = {name: p.detach().double().numpy() for name, p in model.named_parameters()}
    moments = {name: (np.zeros_like(value), np.zeros_like(value)) for name, value in expected.items()}
    decay = {"embedding.weight": 0.3 * decay_embedding, "layers.0.weight": 0.3, "norm.weight": 0.0}
    for step, factor in enumerate([1.0, 0.5, 0.25]):
        scale_rates(optimizer, factor)
        update(model, optimizer, range(step, step + 1))
        lr = 0.01 * factor
        for name, parameter in model.named_parameters():
            gradient = parameter.grad.double().numpy()
            first, second = moments[name]
            first = 0.9 * first + 0.1 * gradient
            second = 0.95 * second + 0.05 * gradient**2
            moments[name] = first, second
            corrected = (first / (1 - 0.9 ** (step + 1))) / (np.sqrt(second / (1 - 0.95 ** (step + 1))) + 1e-8)
            expected[name] = expected[name] * (1 - lr * decay[name]) - lr * corrected
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(parameter.detach().numpy(), expected[name], rtol=1e-5, atol=1e-6)  # float32 rounding


def test_defaults_depend_on_the_optimizer_and_are_shown_by_the_resolved_settings() -> None:
    assert OptimizerSettings().lr == 3e-4
    muon = parse_settings(OptimizerSettings, {"name": "muon"})
    assert (muon.lr, muon.weight_decay) == (0.02, 0.01)
    assert parse_settings(OptimizerSettings, muon.model_dump()) == muon
    assert parse_settings(OptimizerSettings, {"name": "muon", "lr": 0.1}).lr == 0.1
    as_adamw = parse_settings(OptimizerSettings, {"name": "muon", "lr_scale": "rms"})
    assert (as_adamw.lr, as_adamw.weight_decay) == (3e-4, 0.1)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"lr": 0}, "greater than 0"),
        ({"betas": [0.9, 1.0]}, "betas must lie from 0 to below 1"),
        ({"learning_rate": 1}, "unknown key 'learning_rate'"),
        ({"lr_scale": "size"}, "'shape' or 'rms'"),
    ],
)
def test_wrong_settings_are_named(tree: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_settings(OptimizerSettings, tree)


def test_unknown_optimizer_is_named() -> None:
    with pytest.raises(UserError, match="unknown optimizer 'adamv', did you mean 'adamw'"):
        build_optimizer(OptimizerSettings(name="adamv"), Toy().named_parameters())


def test_frozen_parameters_are_left_alone() -> None:
    model = Toy()
    model.embedding.weight.requires_grad_(False)
    optimizer = build_optimizer(OptimizerSettings(), model.named_parameters())
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert len(held) == 2
    assert all(parameter is not model.embedding.weight for parameter in held)


def test_an_optimizer_of_another_package_is_found_and_its_numbers_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sign_package.py").write_text(
        "import torch\n"
        "class Sign(torch.optim.Optimizer):\n"
        "    def step(self):\n"
        "        for group in self.param_groups:\n"
        "            for p in group['params']:\n"
        "                self.state[p]['count'] = self.state[p].get('count', 0) + 1\n"
        "                p.data.sub_(p.grad.sign(), alpha=group['lr'] * group['strength'])\n"
        "def sign(settings, named_parameters):\n"
        "    return Sign([p for _, p in named_parameters], dict(lr=settings.lr, **settings.options))\n"
    )
    info = tmp_path / "sign_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sign-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[treadle.optimizers]\nsign = sign_package:sign\n")
    monkeypatch.syspath_prepend(tmp_path)
    model = Toy()
    before = model.norm.weight.detach().clone()
    optimizer = build_optimizer(
        OptimizerSettings(name="sign", lr=0.5, options={"strength": 2.0}), model.named_parameters()
    )
    update(model, optimizer, range(1))
    torch.testing.assert_close(model.norm.weight, before - model.norm.weight.grad.sign() * 0.5 * 2.0)
    state = named_state(optimizer, model.named_parameters())
    assert state["norm.weight/count"].item() == 1
    other = build_optimizer(OptimizerSettings(name="sign", options={"strength": 1.0}), model.named_parameters())
    load_named_state(other, model.named_parameters(), state, state.__getitem__)
    assert other.state[model.norm.weight]["count"] == 1


def test_state_that_cannot_be_saved_is_named() -> None:
    model = Toy()
    optimizer = build_optimizer(OptimizerSettings(), model.named_parameters())
    optimizer.state[model.norm.weight]["history"] = ["x"]
    with pytest.raises(TreadleError, match=r"keeps a list as 'history' of norm\.weight"):
        named_state(optimizer, model.named_parameters())


def test_state_of_an_unknown_parameter_is_refused() -> None:
    model = Toy()
    optimizer = build_optimizer(OptimizerSettings(), model.named_parameters())
    with pytest.raises(TreadleError, match=r"optimizer state of 'layers\.7\.weight'"):
        load_named_state(optimizer, model.named_parameters(), ["layers.7.weight/exp_avg"], lambda name: torch.zeros(1))


def test_a_step_count_goes_where_its_kernel_reads_it() -> None:
    parameter = nn.Parameter(torch.zeros(2, device="meta"))
    for fused, device in ((True, "meta"), (False, "cpu")):
        optimizer = torch.optim.SGD([parameter])
        optimizer.param_groups[0]["fused"] = fused
        load_named_state(optimizer, [("p", parameter)], ["p/step"], lambda name: torch.tensor(3.0))
        assert optimizer.state[parameter]["step"].device.type == device


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def trained(name: str, steps: range, state: dict | None, ranks_count: int | None) -> tuple[dict, dict]:
    """Train a fresh (or restored) toy over `steps`; return its whole parameters and optimizer state."""
    model = Toy()
    if state is not None:
        for key, parameter in model.named_parameters():
            parameter.data.copy_(state["parameters"][key])
    if ranks_count is not None:
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks_count,)))
    optimizer = build_optimizer(OptimizerSettings(name=name, lr=0.01), model.named_parameters())
    if state is not None:
        load_named_state(optimizer, model.named_parameters(), state["optimizer"], state["optimizer"].__getitem__)
    update(model, optimizer, steps)
    return (
        {key: whole(parameter.detach()) for key, parameter in model.named_parameters()},
        {key: whole(tensor) for key, tensor in named_state(optimizer, model.named_parameters()).items()},
    )


def continues_elsewhere(name: str, size: int) -> None:
    parameters, optimizer = trained(name, range(3), None, size)
    state = {"parameters": parameters, "optimizer": optimizer}
    straight, _ = trained(name, range(6), None, size)
    for ranks_count in (size, None):
        resumed, _ = trained(name, range(3, 6), state, ranks_count)
        for key, expected in straight.items():
            if ranks_count == size:
                assert torch.equal(resumed[key], expected), key
            else:
                torch.testing.assert_close(resumed[key], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_state_loads_into_the_same_and_into_another_layout(ranks: Callable, name: str) -> None:
    ranks(2).run(continues_elsewhere, name, 2)
