"""Each rank reads its shards and nothing else: from safetensors and GGUF they are those of the whole model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.tiny_models import TINY, ours_of, reference_of, tiny
from tests.weights.gguf_files import smollm2
from treadle.model.layout import Layout
from treadle.model.parallel import lay_out
from treadle.model.transformer import Transformer
from treadle.parallel.plan import Plan
from treadle.weights import load as loading
from treadle.weights.ledger import LoadReport
from treadle.weights.load import load_model
from treadle.weights.save import save_model


def load_rank(path: Path, plan: Plan, rank: int, **options: Any) -> Transformer:
    def lay(model: Transformer) -> None:
        layout = Layout(model.spec, plan, rank)
        group: Any = SimpleNamespace(size=plan.tp, index=layout.coordinates["tp"]) if plan.tp > 1 else None
        lay_out(model, layout, group)

    return load_model(path, lay_out=lay, **options)


def check(whole: Transformer, part: Transformer) -> None:
    layout = part.layout
    assert layout is not None
    held = {name for name, _ in whole.named_parameters() if layout.holds(name)}
    assert held == {name for name, _ in part.named_parameters()}
    for name, parameter in part.named_parameters():
        shard, expected = layout.shard(name), whole.get_parameter(name)
        assert torch.equal(parameter, expected if shard is None else shard.of(expected)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gemma3_text-odd", "qwen3-odd"])
def test_shards_of_a_folder(name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A few rows at a time, as a large matrix would be.
    monkeypatch.setattr(loading, "CHUNK_ELEMENTS", 200)
    config = {**TINY[name], **({"num_key_value_heads": 2} if name == "qwen3-odd" else {})}
    model = ours_of(reference_of(config), config).requires_grad_(False)
    folder = tmp_path / "model"
    folder.mkdir()
    save_model(folder, model.spec, dict(model.named_parameters()), dtype=dtype)
    whole, plan = load_model(folder), Plan(pp=2, tp=2).resolve(4)
    reports: list[LoadReport] = []
    for rank in range(4):
        check(whole, load_rank(folder, plan, rank, report=reports.append))
    assert [report.rank for report in reports] == [f"rank {rank} of 4" for rank in range(4)]
    size = sum(parameter.numel() for parameter in whole.parameters())
    assert max(report.parameters for report in reports) < size / 2, "no rank has nearly all"


def test_shards_of_a_quantized_file() -> None:
    whole, plan = load_model(smollm2(), torch.bfloat16), Plan(pp=2, tp=3).resolve(6)
    reports: list[LoadReport] = []
    for rank in (0, 2, 4):
        check(whole, load_rank(smollm2(), plan, rank, dtype=torch.bfloat16, report=reports.append))
    # A third of half the layers, and of the embedding that both stages have.
    assert all(report.bytes_read < smollm2().stat().st_size / 4 for report in reports)


def test_a_rank_without_any_row_of_the_vocabulary(tmp_path: Path) -> None:
    config = tiny(
        "llama", vocab_size=9, num_attention_heads=8, num_key_value_heads=8, intermediate_size=80, hidden_size=64
    )
    model = ours_of(reference_of(config), config).requires_grad_(False)
    (tmp_path / "model").mkdir()
    save_model(tmp_path / "model", model.spec, dict(model.named_parameters()))
    plan = Plan(tp=8).resolve(8)
    for rank in range(8):  # two rows each: the fifth has one, the last three have none
        check(model, load_rank(tmp_path / "model", plan, rank))
