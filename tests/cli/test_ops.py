"""The verbs `ops` and `doctor`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from treadle.cli import main
from treadle.device import ceilings
from treadle.ops import OPERATORS, native
from treadle.ops.registry import rechoose


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return ended.value.code or 0, capsys.readouterr().out


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path))
    monkeypatch.setattr(ceilings, "SECONDS", 0.02)
    monkeypatch.delenv("TREADLE_KERNELS", raising=False)
    monkeypatch.setenv("COLUMNS", "80")


def test_ops_names_every_operator_and_its_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, "ops")
    assert code == 0
    assert all(any(line.startswith(name + " ") for line in text.splitlines()) for name in OPERATORS.names())
    code, text = run(capsys, "ops", "--json")
    entries = {entry["operator"]: entry for entry in json.loads(text)["operators"]}
    assert set(entries) == set(OPERATORS.names())
    assert entries["rms_norm"]["runs"] == ("native" if native.variant() else "reference")
    assert entries["packed_attention"]["runs"] == "pytorch_flash"


def test_ops_says_why_a_kernel_does_not_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TREADLE_KERNELS", "pytorch_flash")
    rechoose()
    _, text = run(capsys, "ops")
    assert "TREADLE_KERNELS is set: only pytorch_flash and the references run" in text
    assert "native not here" in text
    monkeypatch.undo()
    rechoose()


def test_doctor_ends_in_a_verdict_within_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, "doctor")
    assert code == 0 and text.splitlines()[-1].startswith("Ready: ")
    assert max(len(line) for line in text.splitlines()) <= 80
    for row in ("Packages", "Processor", "Memory", "Accelerators", "Measured", "Native", "Operators", "Cache"):
        assert any(line.startswith(row) for line in text.splitlines())


def test_doctor_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, text = run(capsys, "doctor", "--json")
    report = json.loads(text)
    assert report["cache"]["folder"] == str(tmp_path) and report["problems"] == []
    assert report["native"]["variant"] == native.variant()
    assert report["ceilings"]["float32"] > 0


def test_doctor_without_a_library_is_ready_but_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(native, "__path__", [str(tmp_path)])
    native._load.cache_clear()
    try:
        code, text = run(capsys, "doctor")
        assert code == 0 and "with slower kernels" in text.splitlines()[-1]
        assert "no C++20 compiler was found" in " ".join(text.split())
        (tmp_path / native.NAME).write_bytes(b"damaged")
        native._load.cache_clear()
        code, text = run(capsys, "doctor")
        assert code == 1 and "Not ready: 1 problem to mend." in text and "does not load" in " ".join(text.split())
    finally:
        monkeypatch.undo()
        native._load.cache_clear()


def test_doctor_with_a_cache_that_cannot_be_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "file"))
    code, text = run(capsys, "doctor")
    assert code == 0 and "set TREADLE_CACHE to one that can" in " ".join(text.split())
