"""`treadle chat` through a pipe, and on a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from treadle.cli import main

Chat = Callable[..., tuple[int, str, str]]


@pytest.fixture
def chat(tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Chat:
    """Return a function that pipes lines through `treadle chat`."""

    def run(lines: str | bytes, *words: str, model: Path = tiny_model) -> tuple[int, str, str]:
        content = lines.encode() if isinstance(lines, str) else lines
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))
        with pytest.raises(SystemExit) as end:
            main(["chat", str(model), "--temperature", "0", "--max-tokens", "5", *words])
        shown = capsys.readouterr()
        return int(end.value.code or 0), shown.out, shown.err

    return run


def test_a_pipe_gets_answers_and_nothing_else(chat: Chat, tmp_path: Path) -> None:
    saved = tmp_path / "chat.jsonl"
    code, out, err = chat(f"def\n\n//read\n/save {saved}\n/help\n/exit\nnever asked\n")
    assert (code, err) == (0, "")
    messages = json.loads(saved.read_text())["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant"] * 2
    assert [m["content"] for m in messages[::2]] == ["def", "/read"]
    assert out == "".join(m["content"] + "\n" for m in messages[1::2])


def test_lines_can_go_on_and_the_system_message_can_change(chat: Chat, tmp_path: Path) -> None:
    saved = tmp_path / "chat.jsonl"
    chat(f"forgotten\n/system be brief\nfirst\\\nsecond\n/save {saved}\n")
    messages = json.loads(saved.read_text())["messages"]
    assert messages[0] == {"role": "system", "content": "be brief"}
    assert messages[1] == {"role": "user", "content": "first\nsecond"} and len(messages) == 3
    saved.unlink()
    chat(f"forgotten\n/reset\n/save {saved}\n", "--system", "kept")
    assert json.loads(saved.read_text())["messages"] == [{"role": "system", "content": "kept"}]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("/rest\n", "did you mean '/reset'"),
        ("/save\n", "needs the name"),
        ("ab" * 300 + "\n", "leaves no room for an answer"),
        (b"caf\xe9\n", "not valid UTF-8"),
    ],
)
def test_mistakes_end_a_pipe_with_a_sentence(chat: Chat, lines: str | bytes, message: str) -> None:
    code, _, err = chat(lines)
    assert code == 2 and message in err


def test_a_base_model_is_pointed_to_generate(chat: Chat, base_model: Path) -> None:
    code, out, err = chat("hi\n", model=base_model)
    assert code == 2 and out == "" and "treadle generate" in err and err.count("\n") == 1


class Terminal:
    """A program on a pseudo-terminal: type into it, wait for what it shows."""

    def __init__(self, *words: str) -> None:
        self.ours, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "INPUTRC": os.devnull}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "treadle", *words], stdin=theirs, stdout=theirs, stderr=theirs, env=environment,
            start_new_session=True, preexec_fn=_own_terminal,
        )  # fmt: skip
        os.close(theirs)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self.ours, text.encode())

    def wait_for(self, pattern: str) -> str:
        """Return what was shown up to and with `pattern`, and forget it."""
        while not (found := re.search(pattern, self.shown, re.DOTALL)):
            ready, _, _ = select.select([self.ours], [], [], 120)
            assert ready, f"nothing like {pattern!r} in {self.shown!r}"
            try:
                self.shown += os.read(self.ours, 65536).decode("utf-8", "replace")
            except OSError as error:  # the program has ended
                raise AssertionError(f"ended before {pattern!r}: {self.shown!r}") from error
        shown, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return shown

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours)


def _own_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def endless_model(tmp_path: Path) -> Path:
    """A model whose answers never end by themselves: it has no end token, and a context that takes long to fill."""
    from tests.serve.tiny import CONFIG, TEXT, TOKENS, build
    from treadle.model.families import read_spec
    from treadle.model.tokenizer import Tokenizer
    from treadle.serve.model import Model

    config = {**CONFIG, "max_position_embeddings": 1 << 17, "hidden_size": 128, "num_hidden_layers": 8}
    trained = Tokenizer.train([TEXT] * 4, TOKENS)
    endless = Tokenizer(trained.backend, bos_token="<|bos|>", chat_templates=trained.chat_templates)
    Model(build(read_spec(config)), endless).save(tmp_path / "endless")
    assert Tokenizer.load(tmp_path / "endless").eos_ids == ()
    return tmp_path / "endless"


def test_on_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_leaves(endless_model: Path, tmp_path: Path) -> None:
    terminal = Terminal("chat", str(endless_model), "--max-tokens", "100000", "--seed", "1")
    try:
        terminal.wait_for(r"Ctrl-D leaves.*> ")
        terminal.type("hello\n")
        terminal.wait_for(r"\r\x1b\[K.")  # the dots are replaced by the answer's first piece
        terminal.type("\x03")
        terminal.wait_for(r"> ")
        terminal.type("/sav x\n")
        terminal.wait_for("did you mean '/save'")
        saved = tmp_path / "chat.jsonl"
        terminal.type(f"/save {saved}\n")
        terminal.wait_for("Saved 2 messages")
        assert [m["role"] for m in json.loads(saved.read_text())["messages"]] == ["user", "assistant"]
        terminal.wait_for("> ")
        terminal.type("never sent")
        terminal.wait_for("never sent")  # the line is being edited
        terminal.type("\x03")
        terminal.wait_for("Ctrl-D leaves.*> ")
        terminal.type("\x04")
        assert terminal.process.wait(60) == 0
    finally:
        terminal.close()
