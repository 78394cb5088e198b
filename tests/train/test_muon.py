"""Muon against its definition by singular values in float64, in one process and sharded over several."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from treadle.train.muon import _deal, orthogonalize
from treadle.train.optimizers import OptimizerSettings, build_optimizer

SHAPES = {
    "layers.0.q.weight": (24, 16),
    "layers.0.o.weight": (16, 24),
    "layers.1.q.weight": (7, 16),  # 7 rows do not divide by 2 or 3
    "layers.1.k.weight": (1, 16),  # some ranks hold none of it
    "layers.1.norm.weight": (16,),
    "embedding.weight": (30, 16),
}


def by_singular_values(matrix: np.ndarray, steps: int) -> np.ndarray:
    """What Newton-Schulz computes, said otherwise: the odd quintic applied to every singular value."""
    left, values, right = np.linalg.svd(matrix / np.linalg.norm(matrix), full_matrices=False)
    for _ in range(steps):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left * values @ right


class Toy(nn.Module):
    """Parameters under the given names, as a module tree."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, value in values.items():
            *path, leaf = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(leaf, nn.Parameter(value))


def values(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def train(settings: OptimizerSettings, mesh_sizes: tuple[int, ...] | None, steps: int = 3) -> dict[str, torch.Tensor]:
    """Return the parameters after some steps on made-up gradients, under FSDP2 where a mesh is given."""
    model = Toy(values(0))
    if mesh_sizes is not None:
        names = ("dp_replicate", "dp_shard")[-len(mesh_sizes) :]
        fully_shard(model, mesh=init_device_mesh("cpu", mesh_sizes, mesh_dim_names=names))
    optimizer = build_optimizer(settings, model.named_parameters())
    for step in range(steps):
        gradients = values(step + 1)
        for name, parameter in model.named_parameters():
            gradient = gradients[name]
            if mesh_sizes is not None:
                from treadle.train.optimizers import laid_out_like

                gradient = laid_out_like(parameter, gradient)
            parameter.grad = gradient
        optimizer.step()
    whole = {name: getattr(p, "full_tensor", lambda p=p: p)().detach() for name, p in model.named_parameters()}
    return {name: tensor.clone() for name, tensor in whole.items()}


@pytest.mark.parametrize("shape", [(8, 8), (5, 12), (12, 5), (1, 9)])
def test_orthogonalize_moves_singular_values_by_the_quintic(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    expected = by_singular_values(matrix.double().numpy(), 5)
    # float32 rounding, amplified at most 3.4445**5 = 485 times for the smallest singular values
    np.testing.assert_allclose(orthogonalize(matrix, 5, torch.float32).numpy(), expected, atol=485 * 1e-7)
    singular = np.linalg.svd(orthogonalize(matrix).float().numpy(), compute_uv=False)
    assert 0.3 < singular.min() <= singular.max() < 1.3  # bf16: what the method promises of well-conditioned matrices


@pytest.mark.parametrize("lr_scale", ["shape", "rms"])
def test_update_equals_the_definition_in_float64(lr_scale: str) -> None:
    settings = OptimizerSettings.model_validate(
        {"name": "muon", "lr": 0.05, "weight_decay": 0.1, "lr_scale": lr_scale, "newton_schulz_dtype": "fp32"}
    )
    got = train(settings, None)
    for name in ("layers.0.q.weight", "layers.0.o.weight", "layers.1.q.weight"):
        weight = values(0)[name].double().numpy()
        average = np.zeros_like(weight)
        rows, columns = weight.shape
        scale = math.sqrt(max(1, rows / columns)) if lr_scale == "shape" else 0.2 * math.sqrt(max(rows, columns))
        for step in range(3):
            gradient = values(step + 1)[name].double().numpy()
            average = 0.95 * average + 0.05 * gradient
            update = by_singular_values(0.95 * average + 0.05 * gradient, 5)
            weight = weight * (1 - 0.05 * 0.1) - 0.05 * scale * update
        np.testing.assert_allclose(got[name].numpy(), weight, atol=3 * 0.05 * scale * 485 * 1e-7 + 1e-6)


def test_what_is_not_a_hidden_matrix_is_updated_by_adamw() -> None:
    muon = OptimizerSettings.model_validate({"name": "muon", "adamw_lr": 1e-3, "weight_decay": 0.1})
    adamw = OptimizerSettings.model_validate({"name": "adamw", "lr": 1e-3, "weight_decay": 0.1})
    for name in ("embedding.weight", "layers.1.norm.weight"):
        assert torch.equal(train(muon, None)[name], train(adamw, None)[name])


def same_as_one_process(dtype: str, mesh_sizes: tuple[int, ...]) -> None:
    settings = OptimizerSettings.model_validate({"name": "muon", "lr": 0.05, "newton_schulz_dtype": dtype})
    alone, together = train(settings, None), train(settings, mesh_sizes)
    for name, expected in alone.items():
        assert torch.equal(together[name], expected), name


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("mesh_sizes", [(2,), (3,), (2, 1), (1, 3)])
def test_sharded_update_is_the_one_of_a_single_process(
    ranks: Callable, dtype: str, mesh_sizes: tuple[int, ...]
) -> None:
    ranks(math.prod(mesh_sizes)).run(same_as_one_process, dtype, mesh_sizes)


def test_matrices_are_dealt_evenly() -> None:
    assert _deal([9, 1, 5, 4], 2) == [0, 0, 1, 1]
    assert _deal([3], 4) == [0]
    loads = [0.0] * 3
    for cost, owner in zip(range(1, 31), _deal(list(range(1, 31)), 3), strict=True):
        loads[owner] += cost
    assert max(loads) - min(loads) <= 1  # 155 each is possible
