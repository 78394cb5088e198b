"""Adapters, new weights and sleep on replicas and on ranks: the same as in one process, on all or on none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serve.tiny import CONFIG, build
from treadle.config import UserError
from treadle.model.families import read_spec
from treadle.model.lora import LoraSpec, adapters, attach_lora
from treadle.serve.client import EngineClient, EngineOptions
from treadle.serve.engine import Engine
from treadle.serve.interface import EngineInterface
from treadle.serve.model import Model
from treadle.serve.versions import Unavailable
from treadle.weights.adapter import save_adapter
from treadle.weights.identity import content_version

SETTINGS: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 100, "block_size": 4, "check_blocks": True}
PROMPTS = [list(range(3, 40)), [7, 8, 9], [250] * 17]


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("weights")
    for name, seed in (("one", 1), ("two", 2)):
        Model(build(read_spec(CONFIG), seed)).save(root / name)
    trained = build(read_spec(CONFIG), 1)
    attach_lora(trained, LoraSpec(4, 8.0))
    for adapter in adapters(trained).values():
        adapter.b.data = torch.randn(adapter.b.shape, generator=torch.Generator().manual_seed(1)) * 0.3
    (root / "x").mkdir()
    save_adapter(root / "x", trained)
    return {name: root / name for name in ("one", "two", "x")}


def story(engine: EngineInterface, disk: dict[str, Path]) -> list[Any]:
    """Change an engine in every way, and return what it said in between."""
    found: list[Any] = []

    def say(adapter: str = "") -> None:
        for one in engine.generate(PROMPTS, adapter=adapter, temperature=0.0, max_tokens=8, ignore_eos=True):
            found.append((one.tokens, one.weight_version))

    say()
    assert engine.command("add_adapter", name="x", path=str(disk["x"]))["rank"] == 4
    assert engine.adapters == ("x",)
    say("x")
    say()
    engine.command("load_weights", path=str(disk["two"]))
    assert engine.weight_version == content_version(disk["two"])
    say()
    say("x")
    engine.command("sleep")
    assert engine.asleep
    with pytest.raises(Unavailable, match="asleep"):
        engine.generate(PROMPTS)
    engine.command("wake")
    assert not engine.asleep
    say("x")
    say()
    engine.command("remove_adapter", name="x")
    with pytest.raises(UserError, match="no adapter 'x'"):
        engine.generate(PROMPTS, adapter="x")
    for command, arguments in (
        ("load_weights", {"path": "nowhere"}),
        ("add_adapter", {"name": "y", "path": "nowhere"}),
    ):
        with pytest.raises(UserError, match="nowhere"):
            engine.command(command, **arguments)
    assert engine.adapters == ()
    say()
    return found


@pytest.fixture(scope="module")
def expected(disk: dict[str, Path]) -> list[Any]:
    with Engine(disk["one"], **SETTINGS) as engine:
        found = story(engine, disk)
    assert len({str(one) for one in found}) >= 4 * len(PROMPTS) - 2
    return found


def test_on_replicas(disk: dict[str, Path], expected: list[Any]) -> None:
    with EngineClient(EngineOptions(str(disk["one"]), "float32", "cpu", SETTINGS, replicas=2)) as client:
        assert story(client, disk) == expected


def test_what_fails_on_one_replica_is_undone_on_the_others(disk: dict[str, Path], tmp_path: Path) -> None:
    """The second replica does not see the adapter, as a replica on a full machine would not take it."""
    with EngineClient(EngineOptions(str(disk["one"]), "float32", "cpu", SETTINGS, replicas=2)) as client:
        (failed,) = client._ask_all("add_adapter", {"name": "x", "path": str(disk["x"])}, client._replicas[1:])
        assert failed.exception() is None  # so that the second has one of that name already
        with pytest.raises(UserError, match="there is an adapter 'x' already"):
            client.command("add_adapter", name="x", path=str(disk["x"]))
        assert client.adapters == ()
        listed = [one.result()["adapters"] for one in client._ask_all("adapters", {})]
        assert [len(one) for one in listed] == [0, 1]


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=["tp", "pp"])
def test_on_ranks(disk: dict[str, Path], expected: list[Any], sizes: tuple[int, int]) -> None:
    parallel = {"tensor_parallel_size": sizes[0], "pipeline_parallel_size": sizes[1]}
    with Engine(disk["one"], **SETTINGS, **parallel) as engine:
        assert story(engine, disk) == expected
