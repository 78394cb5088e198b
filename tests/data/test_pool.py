"""The processes that tokenize: in order, with their errors, and gone afterwards."""

from __future__ import annotations

import io
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from treadle.config import TreadleError, UserError
from treadle.data import pool
from treadle.data.documents import TokenizeSettings, tokenize
from treadle.data.reading import Block, Cursor, Piece
from treadle.model.tokenizer import Tokenizer

SETTINGS = TokenizeSettings(validation=0.2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    Tokenizer.train(["some words to learn, and more words; words"] * 3, 300).save(path)
    return path


def blocks(count: int, bad: int | None = None) -> Iterator[Block]:
    for number in range(count):
        # Early blocks are larger, so that later ones are done first.
        data = b"\xff" if number == bad else f"block {number} ".encode() * (4000 if number < 3 else 1)
        pieces = [Piece("text", f"{number}.txt", data), Piece("lines", "l", b'{"text": "a line"}\n', record=number)]
        yield Block(Cursor(file=number), pieces)


def test_frames_carry_everything() -> None:
    tokenizer = Tokenizer.train(["some words"], 300)
    chat = b'{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}\n'
    pieces = [
        Piece("text", "ü.txt", b"\xff\0", 3, True, True, "ab" * 32, True),
        Piece("lines", "x", chat),
        Piece("text", "", b""),
    ]
    pipe = io.BytesIO()
    pool.send_block(pipe, pieces)
    pipe.seek(0)
    assert pool.receive_block(pipe) == pieces
    with pytest.raises(EOFError):
        pool.receive_block(pipe)
    block = tokenize(pieces, SETTINGS, tokenizer)
    pipe = io.BytesIO()
    pool.send_tokens(pipe, block)
    pipe.seek(0)
    again = pool.receive_tokens(pipe)
    assert again.counts == block.counts and again.splits.keys() == block.splits.keys()
    for name, split in block.splits.items():
        for key, value in vars(split).items():
            np.testing.assert_array_equal(getattr(again.splits[name], key), value)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_blocks_come_back_in_order_whoever_made_them(folder: Path, workers: int) -> None:
    found = list(pool.tokenize_blocks(blocks(12), folder, SETTINGS, workers))
    assert [block.cursor.file for block, _ in found] == list(range(12))
    tokenizer = Tokenizer.load(folder)
    for block, result in found:
        expected = tokenize(block.pieces, SETTINGS, tokenizer)
        assert result.counts == expected.counts
        for name, split in expected.splits.items():
            assert result.splits[name].tokens.tolist() == split.tokens.tolist()
    assert not psutil.Process().children()


def test_an_error_arrives_in_its_place_and_ends_the_processes(folder: Path) -> None:
    settings = TokenizeSettings(invalid_utf8="error")
    stream = pool.tokenize_blocks(blocks(20, bad=5), folder, settings, 2)
    assert [next(stream)[0].cursor.file for _ in range(5)] == list(range(5))
    with pytest.raises(UserError, match=r"5.txt is not valid UTF-8"):
        next(stream)
    assert not psutil.Process().children()


def test_a_process_that_dies_is_an_error(folder: Path) -> None:
    stream = pool.tokenize_blocks(blocks(1000), folder, SETTINGS, 2)
    next(stream)
    for child in psutil.Process().children():
        os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(TreadleError, match=r"was killed by signal 9; the machine may be out of memory"):
        list(stream)
    assert not psutil.Process().children()


def test_closing_ends_the_processes(folder: Path) -> None:
    stream = pool.tokenize_blocks(blocks(1000), folder, SETTINGS, 2)
    next(stream)
    assert len(psutil.Process().children()) == 2
    stream.close()
    assert not psutil.Process().children()


def test_a_process_ends_by_itself_when_its_input_closes(folder: Path) -> None:
    with pool._worker(folder, SETTINGS) as worker:
        assert worker.process.stdin is not None
        worker.process.stdin.close()
        assert worker.process.wait(timeout=60) == 0
        started = time.monotonic()
    assert time.monotonic() - started < 5
