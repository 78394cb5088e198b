"""The examples of docs/python.md run as they stand, in order, on a tiny model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from treadle.serve.model import Model

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


def test_the_examples_of_the_python_page_run(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model.save(tmp_path / "path" / "to" / "model")
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert len(examples) == 6
    names: dict[str, Any] = {}
    for example in examples:
        exec(compile(example, str(PAGE), "exec"), names)
    shown = capsys.readouterr().out
    assert "Model(llama, 34.7k parameters, float32 on cpu)" in shown
    assert names["logits"].shape == (5, 300)
    assert " length 16\n" in shown
