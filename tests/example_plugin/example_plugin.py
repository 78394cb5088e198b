"""Parts for Treadle from another package, each as short as it can be; pyproject.toml names them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from treadle.model.families import family_of
from treadle.model.families.base import Family
from treadle.model.spec import ModelSpec
from treadle.ops import Operator
from treadle.train.optimizers import OptimizerSettings
from treadle.train.schedules import ScheduleSettings


def primes(argument: str) -> Iterator[str]:
    """A source of documents: `treadle data prepare primes://1000` reads lists of primes below 1000."""
    found: list[int] = []
    for number in range(2, int(argument)):
        if all(number % prime for prime in found):
            found.append(number)
            yield "the primes so far are " + ", ".join(map(str, found))


def read_twin(config: Mapping[str, Any]) -> ModelSpec:
    """A family: a Llama that goes by another name."""
    spec = family_of({"model_type": "llama"}).read({**config, "model_type": "llama"})
    return replace(spec, family="twin", config=dict(config))


TWIN = Family("twin", "TwinForCausalLM", read_twin, family_of({"model_type": "llama"}).names)

HALVE = Operator(
    "example_halve",
    "(Tensor x) -> Tensor",
    reference=lambda x: x / 2,
    fake=lambda x: torch.empty_like(x),
    backward=lambda ctx, grad: grad / 2,
)


def sign(settings: OptimizerSettings, named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """An optimizer: every parameter moves by the rate against the sign of its averaged gradient (Bernstein 2018)."""
    return SignDescent([parameter for _, parameter in named_parameters], settings.lr, settings.betas[0])


class SignDescent(torch.optim.Optimizer):
    def __init__(self, parameters: list[nn.Parameter], lr: float, beta: float) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                    average.mul_(group["beta"]).add_(parameter.grad, alpha=1 - group["beta"])
                    parameter.add_(average.sign(), alpha=-group["lr"])


def steps(step: int, total_steps: int, settings: ScheduleSettings) -> float:
    """A schedule: the rate is halved each tenth of the run, or as often as its own option says."""
    return 0.5 ** (step * int(settings.options.get("halvings", 10)) // total_steps)


class Csv:
    """A sink: the loss of each step as a line."""

    def __init__(self, settings: Any, folder: Path, done: int, run_settings: Mapping[str, Any]) -> None:
        self.file = (folder / "loss.csv").open("a")

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        if "loss" in record:
            self.file.write(f"{step},{record['loss']:.6f}\n")

    def close(self) -> None:
        self.file.close()
