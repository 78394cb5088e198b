"""Measured ceilings and their cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from treadle.device import ceilings


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path))
    monkeypatch.setattr(ceilings, "SECONDS", 0.05)
    return tmp_path


def cached(folder: Path) -> tuple[Path, dict[str, float]]:
    (path,) = (folder / "ceilings").glob("*.json")
    return path, json.loads(path.read_text())


def test_a_peak_is_plausible_and_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    rate = ceilings.matmul_peak(torch.float32, threads=1)
    # Any machine does a billion operations a second, and none a hundred trillion on one core.
    assert 1e8 < rate < 1e14
    assert 1e7 < ceilings.read_bandwidth(threads=1) < 1e13
    assert torch.get_num_threads() == before


def test_it_is_measured_once_for_each_type_and_thread_count(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    monkeypatch.setattr(
        ceilings, "_measure_matmul", lambda dtype, device: measured.append(dtype) or 5.0 + len(measured)
    )
    assert [ceilings.matmul_peak(torch.float32, 1) for _ in range(3)] == [6.0, 6.0, 6.0]
    assert ceilings.matmul_peak(torch.bfloat16, 1) == 7.0
    assert ceilings.matmul_peak(torch.float32, 2) == 8.0
    assert len(measured) == 3 and len(cached(own_cache)[1]) == 3


def test_measuring_again_keeps_the_better(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([5.0, 3.0, 9.0])
    monkeypatch.setattr(ceilings, "_measure_read", lambda: next(rates))
    assert [ceilings.read_bandwidth(1, again=True) for _ in range(3)] == [5.0, 5.0, 9.0]
    assert ceilings.read_bandwidth(1) == 9.0


@pytest.mark.parametrize("content", ["", "not json", "[1]", '{"read 1 threads": "fast"}', '{"read 1 threads": -3}'])
def test_a_damaged_cache_is_measured_anew(own_cache: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    monkeypatch.setattr(ceilings, "_measure_read", lambda: 5.0)
    ceilings.read_bandwidth(1)
    cached(own_cache)[0].write_text(content)
    assert ceilings.read_bandwidth(1) == 5.0
    assert cached(own_cache)[1] == {"read 1 threads": 5.0}


def test_a_cache_that_cannot_be_written_does_no_harm(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own_cache / "ceilings").write_text("a file where the folder should be")
    monkeypatch.setattr(ceilings, "_measure_read", lambda: 5.0)
    assert ceilings.read_bandwidth(1) == 5.0


def test_another_machine_measures_for_itself(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "_measure_read", lambda: 5.0)
    ceilings.read_bandwidth(1)
    monkeypatch.setattr(torch, "__version__", "99.0")
    monkeypatch.setattr(ceilings, "_measure_read", lambda: 7.0)
    assert ceilings.read_bandwidth(1) == 7.0
