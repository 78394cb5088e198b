"""`treadle generate` as a person meets it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import treadle
from treadle.cli import generate as module
from treadle.cli import main
from treadle.model.chat import encode_chat
from treadle.serve.request import Delta, SamplingSettings


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["generate", *words])
    shown = capsys.readouterr()
    return int(end.value.code or 0), shown.out, shown.err


def test_it_continues_a_prompt(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = treadle.load(tiny_model).generate("def read", temperature=0, max_tokens=12)
    code, out, err = run(capsys, str(tiny_model), "def read", "--temperature", "0", "--max-tokens", "12")
    assert (code, out, err) == (0, f"{expected}\n", "")
    code, out, _ = run(capsys, str(tiny_model), "def read", "--temperature=0", "--max_tokens=12", "--json")
    result = json.loads(out)
    assert (result["text"], result["tokens"]) == (expected.text, expected.tokens)
    assert result["completion_tokens"] == len(expected.tokens) and result["finish_reason"] == expected.finish_reason


@pytest.mark.parametrize(
    ("deltas", "rate"),
    [
        ([(1, "a"), (1, "b"), (2, "cd")], 1.5),  # 3 tokens in the 2 s after the first
        ([(5, "all at once")], None),
        ([(1, "a")], None),
        ([(3, "abc"), (1, "d")], 1.0),
        ([], None),
    ],
)
def test_the_speed_is_of_what_came_after_the_first_tokens(
    monkeypatch: pytest.MonkeyPatch, deltas: list[tuple[int, str]], rate: float | None
) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])

    class Engine:
        def deltas(self, tokens: list[int], settings: object) -> Iterator[Delta]:
            for count, text in deltas:
                now[0] += 1
                yield Delta(0, text, tuple(range(count)))
            now[0] += 100  # what ends it says nothing of the speed

    assert module.run(Engine(), [1], SamplingSettings(), quiet=True)["tokens_per_second"] == rate


def test_without_a_limit_it_goes_to_the_contexts_end(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = json.loads(run(capsys, str(tiny_model), "x", "--ignore-eos", "--json")[1])
    assert result["completion_tokens"] + result["prompt_tokens"] == 128


def test_the_prompt_can_come_through_a_pipe(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def piped(content: bytes) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        return run(capsys, str(tiny_model), "-", "--seed", "3", "--max-tokens", "9")

    # Code and output; on a busy machine there may be progress on stderr.
    expected = run(capsys, str(tiny_model), "caf\u00e9", "--seed", "3", "--max-tokens", "9")
    assert piped("caf\u00e9\n".encode())[:2] == expected[:2]
    code, _, err = piped(b"caf\xe9")
    assert code == 2 and "not valid UTF-8" in err


def test_chat_puts_the_prompt_through_the_template(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = treadle.load(tiny_model)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert model.tokenizer is not None
    expected = model.generate(encode_chat(model.tokenizer, messages), temperature=0, max_tokens=7)
    words = ("hi", "--chat", "--system", "be brief", "--temperature", "0", "--max-tokens", "7")
    assert run(capsys, str(tiny_model), *words)[1] == f"{expected}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("x", "--max-tokens", "500"), "max_tokens=500 exceed the context of 128"),
        (("x", "--top-p", "0"), "top_p"),
        (("x", "--stop", ""), "stop"),
        (("x", "--dtype", "bfloat"), "did you mean 'bfloat16'"),
        (("x", "--device", "qpu"), "'qpu'"),
        (("x", "--system", "s"), "--system needs --chat"),
        (("x y " * 300,), "context holds 128"),
    ],
)
def test_mistakes_are_one_sentence(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    code, out, err = run(capsys, str(tiny_model), *words)
    assert code == 2 and out == "" and message in err and err.count("\n") == 1


def test_wrong_models_are_one_sentence(
    tiny_model: Path, base_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\x00")
    for path in (tmp_path / "nowhere", tmp_path, tmp_path / "cut.gguf"):
        code, out, err = run(capsys, str(path), "x")
        assert code == 2 and out == "" and str(path) in err and err.count("\n") == 1
    code, _, err = run(capsys, str(base_model), "x", "--chat")
    assert code == 2 and "no chat template" in err


def test_nothing_heavy_is_imported_that_is_not_needed(tiny_model: Path) -> None:
    """What would cost the first token its five seconds."""
    code = (
        "import sys\n"
        "from treadle.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: print(end.code)\n"
        "heavy = ['transformers', 'fastapi', 'uvicorn', 'prometheus_client', 'torch._dynamo', 'sympy', 'pandas']\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    words = ["generate", str(tiny_model), "x", "--max-tokens", "2", "--temperature", "0"]
    shown = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120)
    assert shown.stdout.splitlines()[-2:] == ["0", "[]"], shown.stdout + shown.stderr
