"""The README's Python example does what it says, on a run as small as a test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM

from tests.train.runs import TINY, run_settings, write_run_corpus

README = Path(__file__).parents[1] / "README.md"


def test_python_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    # The run of the quickstart, but tiny: the steps that the example asks for are more than a test should take.
    assert "train.steps=220" in code
    code = code.replace("train.steps=220", "train.steps=3")
    monkeypatch.chdir(tmp_path)
    corpus = write_run_corpus(tmp_path / "corpus")
    Path("quickstart").mkdir()
    # Room for the example's prompts and the tokens that it asks for.
    model = {"config": {**TINY, "max_position_embeddings": 128}}
    settings = run_settings(tmp_path / "quickstart" / "run", corpus, model=model)
    Path("quickstart/run.yaml").write_text(yaml.safe_dump(settings))
    exec(compile(code, str(README), "exec"), {})
    shown = capsys.readouterr().out
    assert "torch.Size([" in shown
    _, problems = AutoModelForCausalLM.from_pretrained("my-model", output_loading_info=True)
    assert not problems["missing_keys"]
    assert not problems["unexpected_keys"]
