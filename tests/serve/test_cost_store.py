"""What was learned survives a restart; what is damaged or of another machine is left out with a line that says so."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serve.test_cost_model import learned, linear, mixed
from treadle.serve.cost_model import CostModel
from treadle.serve.cost_store import cost_identity, cost_path, load_costs, save_costs
from treadle.serve.lengths import LengthHistogram
from treadle.serve.model import Model

IDENTITY = {"model": "a", "machine": "b"}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    lengths = LengthHistogram()
    for length in (10, 200, 200, 3000):
        lengths.add(length)
    path = tmp_path / "costs.json"
    save_costs(path, IDENTITY, learned(linear), lengths)
    return path


def test_a_restart_knows_what_was_learned(saved: Path) -> None:
    costs, lengths, note = load_costs(saved, IDENTITY)
    assert costs is not None and lengths is not None and note == ""
    before, dice = learned(linear), random.Random(3)
    before.refit()
    for _ in range(50):
        work = mixed(dice)
        # Old measurements count a little less, each the same way: what they say is the same.
        assert costs.fit.expected(work) == pytest.approx(before.fit.expected(work), rel=0.05)
    assert costs.fit.largest == before.fit.largest
    assert lengths.typical() == (12, 216, 3445)
    # What is measured now soon counts for more than what was loaded.
    for _ in range(300):
        work = mixed(dice)
        costs.observe(work, 3 * linear(work))
    assert costs.fit.expected(work) > 2 * linear(work)


def test_what_was_never_saved_is_no_fault(tmp_path: Path) -> None:
    assert load_costs(tmp_path / "none.json", IDENTITY) == (None, None, "")


def test_those_of_another_machine_are_left_out_and_it_is_named(saved: Path) -> None:
    costs, lengths, note = load_costs(saved, {"model": "a", "machine": "c", "threads": "2"})
    assert costs is None and lengths is None
    assert str(saved) in note and "another machine, threads" in note and "\n" not in note


def change(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "edit",
    [
        lambda content: content.pop("samples"),
        lambda content: content.update(samples=[[1, 1, 1, 1]]),
        lambda content: content.update(samples=[[1, 1, 1, 1, -0.5]]),
        lambda content: content.update(samples=[[0, 1, 1, 1, 0.5]]),
        lambda content: content.update(samples=[[1.5, 1, 1, 1, 0.5]]),
        lambda content: content.update(samples=[[True, 1, 1, 1, 0.5]]),
        lambda content: content.update(samples=[[1, 1, 1, 10**30, 0.5]]),
        lambda content: content.update(samples=[[1, 1, 1, 1, float("nan")]]),
        lambda content: content.update(samples=[[1, 1, 1, 1, 0.5]] * 100_000),
        lambda content: content.update(lengths=[1.0]),
        lambda content: content.update(lengths=["x"] * 96),
        lambda content: content.update(identity=[]),
        lambda content: content.update(format="other"),
    ],
)
def test_a_damaged_file_is_left_out(saved: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    change(saved, edit)
    costs, _, note = load_costs(saved, IDENTITY)
    assert costs is None and "are left out" in note and "learned again" in note


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=40), st.integers(0, 1 << 20))
def test_no_bytes_break_the_start(tmp_path: Path, junk: bytes, place: int) -> None:
    path = tmp_path / "costs.json"
    costs = CostModel()
    save_costs(path, IDENTITY, costs, LengthHistogram())
    whole = path.read_bytes()
    cut = place % len(whole)
    path.write_bytes(whole[:cut] + junk + whole[cut + len(junk) :])
    found, _, note = load_costs(path, IDENTITY)
    assert (found is None) == bool(note)


def test_models_and_machines_have_a_file_each(model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path))
    plain = cost_identity(model)
    assert cost_path(plain) == cost_path(dict(reversed(plain.items())))
    assert cost_path(plain).parent == tmp_path / "step-costs"
    assert cost_path(plain) != cost_path(cost_identity(model, kv_cache_dtype="int8"))
