"""`treadle data` as a user types it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from treadle.cli import main
from treadle.data import Corpus


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(50):
        (folder / f"{number}.txt").write_text(f"The text number {number}, with some words.\n" * 5)
    chat = [{"role": "user", "content": "A question?"}, {"role": "assistant", "content": "The answer."}]
    (folder / "chat.jsonl").write_text(json.dumps({"messages": chat}))
    (folder / "broken.txt").write_bytes(b"plain words and one wrong byte: \xff, then more plain words")
    return folder


def treadle(*words: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["data", *map(str, words)])
    return ended.value.code if isinstance(ended.value.code, int) else 1


def prepared(texts: Path, *options: str) -> Path:
    out = texts.parent / "corpus"
    assert treadle("prepare", texts, "--out", out, "--train-tokenizer", "400", "--validation", "0.2", *options) == 0
    return out


def test_prepare_says_what_it_made_and_that_it_is_there(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = prepared(texts)
    said = capsys.readouterr().out
    corpus = Corpus.open(out)
    assert re.search(rf"train +{corpus.tokens:,} tokens in {corpus.documents} documents", said)
    assert "note: 1 document not valid UTF-8, with U+FFFD in place of the wrong bytes, such as" in said
    prepared(texts)
    assert "is there already, made from the same sources and settings" in capsys.readouterr().out
    prepared(texts, "--json")
    report = json.loads(capsys.readouterr().out)
    assert report["reused"] and report["manifest"]["splits"]["train"]["tokens"] == corpus.tokens


def test_inspect_shows_statistics_and_samples(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = prepared(texts)
    capsys.readouterr()
    assert treadle("inspect", out, "--samples", "60", "--tokens", "40", "--verify") == 0
    said = capsys.readouterr().out
    corpus = Corpus.open(out)
    assert f"{corpus.tokens:,} (uint16)" in said and "verified" in said and "of them learnt" in said
    assert "The answer.<|im_end|>" in said
    assert all(len(line) <= 80 for line in said.splitlines() if "/" not in line)
    assert treadle("inspect", out, "--split", "validation", "--samples", "1", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["documents"] == Corpus.open(out, "validation").documents
    assert len(found["samples"][0]["tokens"]) == len(found["samples"][0]["learnt"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prepare", "missing.txt", "--out", "x", "--train-tokenizer", "400"], "missing.txt does not exist"),
        (["prepare", "texts", "--out", "x"], "choose one of --tokenizer"),
        (["prepare", "texts", "--out", "x", "--tokenizer", "nowhere"], "nowhere"),
        (["prepare", "texts", "--out", "x", "--train-tokenizer", "9"], "--train-tokenizer is 9, below"),
        (
            ["prepare", "texts", "--out", "x", "--train-tokenizer", "400", "--invalid-utf8", "error"],
            "broken.txt is not",
        ),
        (["prepare", "texts", "--out", "texts", "--train-tokenizer", "400"], "texts is not empty and holds no corpus"),
        (["inspect", "texts"], "texts is not a prepared corpus"),
        (["inspect", "nowhere"], "the corpus nowhere does not exist"),
    ],
)
def test_mistakes_are_one_sentence_and_leave_nothing(
    texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    monkeypatch.chdir(texts.parent)
    assert treadle(*words) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("treadle: ")]
    assert len(said) == 1 and message in said[0]
    assert not Path("x").exists() and not list(texts.glob(".*"))


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_running(texts: Path, how: signal.Signals) -> None:
    """Ctrl-C and a kill while the processes work: they all end, and the same command then finishes."""
    for number in range(3):
        (texts / f"large-{number}.txt").write_text(f"Words {number} and more of them, again and again.\n" * 60_000)
    out = texts.parent / "corpus"
    options = ["--out", str(out), "--train-tokenizer", "400", "--tokenizer-bytes", "100000", "--workers", "2"]
    command = [sys.executable, "-m", "treadle", "data", "prepare", str(texts), *options]
    with subprocess.Popen(command, start_new_session=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}) as process:
        workers: list[psutil.Process] = []
        while len(workers) < 2 or not (out / ".preparing" / "train-00000.tokens").exists():
            assert process.poll() is None, "it ended before it could be stopped"
            workers = [
                child for child in psutil.Process(process.pid).children() if "treadle.data.pool" in child.cmdline()
            ]
            time.sleep(0.005)  # polls
        process.send_signal(how)
        assert process.wait(timeout=60) == (130 if how == signal.SIGINT else -how)
    psutil.wait_procs(workers, timeout=60)
    assert not any(worker.is_running() for worker in workers)
    assert treadle(*command[4:]) == 0
    Corpus.open(out).verify()
