"""The benchmark of the latency bound: it runs through, counts what it asked for, and chooses a bound that matters."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import batch_latency
import pytest
from batch_latency import Request, Run, choose_bound, drive

from treadle.serve.engine import Engine
from treadle.serve.model import Model


def test_every_token_of_every_client_is_timed(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of(max_num_seqs=3, max_model_len=64)
    requests = [Request((1, 2, 3 + place), 1 + place % 4) for place in range(10)]
    run = drive(engine, requests, clients=3)
    assert len(run.first) == 10 and len(run.gaps) == sum(request.answer - 1 for request in requests)
    assert run.tokens == sum(3 + request.answer for request in requests)
    assert min(run.first) > 0 and max(run.gaps) <= run.seconds


def test_the_bound_lies_between_what_answers_take_and_what_prompts_do_to_them() -> None:
    assert choose_bound(0.04, Run(gaps=[0.04] * 90 + [1.44] * 10)) == 0.24  # the geometric mean
    assert choose_bound(0.04, Run(gaps=[0.05] * 100)) == 0.12  # three steps, though nothing breaks it then


def test_the_whole_script(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TREADLE_CACHE", "put back afterwards")
    model.save(tmp_path / "model")
    words = f"batch_latency.py {tmp_path / 'model'} --requests 8 --rounds 1 --max-num-seqs 3 --max-model-len 64"
    words += f" --prompt uniform:1,40 --answer fixed:6 --threads 1 --out {tmp_path}"
    monkeypatch.setattr(sys, "argv", words.split())
    holds = batch_latency.main() == 0
    (file,) = tmp_path.glob("*.json")
    result = json.loads(file.read_text())
    assert result["holds"] is holds and len(result["plain"]) == len(result["bounded"]) == 1
    assert f"{result['ratio']:.2f}x the plain policy's tokens/s" in capsys.readouterr().out
    assert str(tmp_path) not in result["command"], "only names of files"
