"""docs/extending.md as a package: built from the text of the page, installed by its entry points, every part used."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.tiny_models import ours_of, packed, reference_of, some_tokens, tiny
from treadle.config import UserError
from treadle.data.sources import sources
from treadle.model.families import families, read_spec
from treadle.ops.registry import OPERATORS
from treadle.train.optimizers import OptimizerSettings, build_optimizer
from treadle.train.schedules import ScheduleSettings, rate_factor

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
BLOCK = re.compile(r"^```(?:python|toml)\n# (\S+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def install(folder: Path) -> None:
    """Lay the page's files out as an installed package."""
    files = dict(BLOCK.findall(PAGE.read_text("utf-8")))
    project = tomllib.loads(files.pop("pyproject.toml"))["project"]
    (folder / "weaver").mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    info = folder / "weaver-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: weaver\nVersion: 1.0\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {place}" for name, place in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))


@pytest.fixture(scope="module", autouse=True)
def weaver(tmp_path_factory: pytest.TempPathFactory) -> object:
    folder = tmp_path_factory.mktemp("weaver")
    install(folder)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.mark.parametrize(
    "changes",
    [
        {
            "head_dim": 12,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        {"head_dim": 16, "sliding_window": 4},
        {"layer_types": ["full_attention"] * 3, "head_dim": 18, "tie_word_embeddings": True},
    ],
)
def test_the_family_equals_transformers(changes: dict[str, object]) -> None:
    config = tiny("ministral", **changes)
    reference = reference_of(config)
    tokens = some_tokens(23)
    with torch.no_grad():
        expected, logits = reference(tokens[None]).logits[0], ours_of(reference, config)(tokens, packed(23))
    assert (logits - expected).abs().max() <= 1e-5 * (expected.max() - expected.min())
    assert read_spec(reference.config.to_dict()) == read_spec(config)
    with pytest.raises(UserError, match="windw, did you mean"):
        read_spec({**config, "sliding_windw": 3})


def test_the_operator_and_its_kernel(weaver: Path) -> None:
    """In a process of its own: an operator cannot be taken back, and would be listed in other tests."""
    code = """
import torch
from treadle.ops.registry import OPERATORS
operator = OPERATORS.get("squared_relu")
x = torch.randn(7, 5, requires_grad=True)
torch.library.opcheck(torch.ops.treadle.squared_relu.default, (x,))
torch.library.opcheck(torch.ops.treadle.squared_relu.default, (x.double(),))
assert operator.kernel_for(x).name == "two_passes" and operator.kernel_for(x.double()).name == "reference"
torch.testing.assert_close(operator(x).double(), operator(x.double()))
torch.autograd.gradcheck(operator, (x.double().detach().requires_grad_(),))
"""
    assert "squared_relu" in OPERATORS.names()
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_optimizer_goes_downhill() -> None:
    weight = nn.Parameter(torch.full((4, 4), 2.0))
    optimizer = build_optimizer(OptimizerSettings(name="lion", lr=0.1, weight_decay=0.0), [("w", weight)])
    for _ in range(40):
        optimizer.zero_grad()
        weight.square().sum().backward()
        optimizer.step()
    assert weight.abs().max() < 0.35  # it swings around the minimum by a few steps of 0.1
    assert set(optimizer.state[weight]) == {"momentum"}


def test_the_schedule() -> None:
    settings = ScheduleSettings(name="inverse_sqrt", warmup_steps=100)
    factors = [rate_factor(step, 1000, settings) for step in (0, 99, 100, 400, 900)]
    assert factors == pytest.approx([1 / 101, 100 / 101, 1, 1 / 2, 1 / 3])


def test_the_source() -> None:
    documents = list(sources.get("multiplication")("12"))
    assert len(documents) == 12 and str(documents[6]).endswith("7 times 10 is 70.")


def test_all_are_listed_by_name() -> None:
    assert "ministral" in families.names()
    with pytest.raises(UserError, match="did you mean 'ministral'"):
        families.get("ministrl")
