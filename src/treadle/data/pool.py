"""Processes that tokenize: blocks go in over a pipe, tokens come back in the order of the blocks.

Each process is our own program, `python -m treadle.data.pool`, not a fork or a pickle: it loads no torch, works the
same from a notebook, and ends by itself when its input closes, so nothing is left when this process is killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import numpy as np

from treadle.config import TreadleError, UserError
from treadle.data.documents import Counts, TokenizedBlock, TokenizeSettings, tokenize
from treadle.data.reading import Block, Piece
from treadle.data.writer import TokenizedDocuments

_HEADER = struct.Struct("<IQ")


def tokenize_blocks(
    blocks: Iterable[Block], tokenizer_folder: Path, settings: TokenizeSettings, workers: int
) -> Generator[tuple[Block, TokenizedBlock]]:
    """Yield each block with its tokens, in order, made by `workers` processes, or by this one where that is 0.

    At most two blocks a process are in memory. Closing the generator ends the processes.
    Raises what `tokenize` raises; TreadleError when a process dies.
    """
    if workers == 0:
        from treadle.model.tokenizer import Tokenizer

        tokenizer = Tokenizer.load(tokenizer_folder)
        for block in blocks:
            yield block, tokenize(block.pieces, settings, tokenizer)
        return
    with contextlib.ExitStack() as stack:
        idle: deque[_Worker] = deque()
        for _ in range(workers):
            idle.append(stack.enter_context(_worker(tokenizer_folder, settings)))

        def work(block: Block) -> TokenizedBlock:
            worker = idle.popleft()
            try:
                return worker.tokenize(block)
            finally:
                idle.append(worker)

        threads = ThreadPoolExecutor(workers, thread_name_prefix="treadle-tokenize")
        # The processes are ended first, which frees the threads that wait for them.
        stack.callback(lambda: threads.shutdown(wait=False, cancel_futures=True))
        yield from _in_order(blocks, threads, work, 2 * workers)


def _in_order(
    blocks: Iterable[Block], threads: ThreadPoolExecutor, work: Any, at_once: int
) -> Iterator[tuple[Block, TokenizedBlock]]:
    waiting: deque[tuple[Block, Future[TokenizedBlock]]] = deque()
    source, problem = iter(blocks), None
    while True:
        while problem is None and len(waiting) < at_once:
            try:
                block = next(source)
            except StopIteration:
                break
            except TreadleError as error:
                # What was read before the place that cannot be read is still done, and kept.
                problem = error
            else:
                waiting.append((block, threads.submit(work, block)))
        if not waiting:
            break
        done, future = waiting.popleft()
        yield done, future.result()
    if problem is not None:
        raise problem


class _Worker:
    """One process and the pipes to it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def tokenize(self, block: Block) -> TokenizedBlock:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            send_block(self.process.stdin, block.pieces)
            return receive_tokens(self.process.stdout)
        except (EOFError, OSError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=5)
            code = self.process.returncode
            why = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
            hint = "; the machine may be out of memory, try fewer --workers" if code == -signal.SIGKILL else ""
            raise TreadleError(f"a tokenizing process {why}{hint}; run the same command again to go on") from error


@contextlib.contextmanager
def _worker(tokenizer_folder: Path, settings: TokenizeSettings) -> Generator[_Worker]:

    home = str(Path(__file__).parents[2])
    paths = [home, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "treadle.data.pool", str(tokenizer_folder.resolve()), settings.model_dump_json()]
    # A session of its own, so that Ctrl-C reaches this process alone, which then ends the others.
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
    )
    try:
        yield _Worker(process)
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def main(tokenizer_folder: str, settings: str) -> None:
    """Tokenize blocks from stdin to stdout until stdin closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    incoming, outgoing = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not come between the frames
    parsed = TokenizeSettings.model_validate_json(settings)
    from treadle.model.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(tokenizer_folder)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            pieces = receive_block(incoming)
            try:
                send_tokens(outgoing, tokenize(pieces, parsed, tokenizer))
            except TreadleError as error:
                _send(outgoing, {"error": str(error), "user": isinstance(error, UserError)}, [])
    with contextlib.suppress(BrokenPipeError):
        outgoing.close()


def send_block(pipe: IO[bytes], pieces: list[Piece]) -> None:
    """Write pieces as one frame."""
    fields = [dataclasses.asdict(piece) | {"data": len(piece.data)} for piece in pieces]
    _send(pipe, fields, [piece.data for piece in pieces])


def receive_block(pipe: IO[bytes]) -> list[Piece]:
    """Read what `send_block` wrote. Raises EOFError at the end."""
    fields, payload = _receive(pipe)
    pieces, start = [], 0
    for field in fields:
        end = start + field["data"]
        pieces.append(Piece(**field | {"data": payload[start:end]}))
        start = end
    return pieces


def send_tokens(pipe: IO[bytes], block: TokenizedBlock) -> None:
    """Write a tokenized block as one frame."""
    splits, buffers = {}, []
    for name, found in block.splits.items():
        arrays = {"tokens": found.tokens, "lengths": found.lengths, "mask": found.mask}
        shapes = {key: None if array is None else [array.dtype.str, len(array)] for key, array in arrays.items()}
        splits[name] = shapes | {key: getattr(found, key) for key in ("continues", "text_bytes", "words")}
        buffers += [array.tobytes() for array in arrays.values() if array is not None]
    _send(pipe, {"splits": splits, "counts": block.counts.model_dump()}, buffers)


def receive_tokens(pipe: IO[bytes]) -> TokenizedBlock:
    """Read what `send_tokens` wrote. Raises EOFError at the end, and the error that came instead."""
    header, payload = _receive(pipe)
    if "error" in header:
        raise (UserError if header["user"] else TreadleError)(header["error"])
    splits, start = {}, 0
    for name, fields in header["splits"].items():
        for key in ("tokens", "lengths", "mask"):
            if fields[key] is not None:
                dtype, length = fields[key]
                fields[key] = np.frombuffer(payload, dtype, length, start)
                start += fields[key].nbytes
        splits[name] = TokenizedDocuments(**fields)
    return TokenizedBlock(splits, Counts(**header["counts"]))


def _send(pipe: IO[bytes], header: Any, buffers: list[bytes]) -> None:
    text = json.dumps(header).encode()
    pipe.write(_HEADER.pack(len(text), sum(map(len, buffers))))
    pipe.write(text)
    for buffer in buffers:
        pipe.write(buffer)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> tuple[Any, bytes]:
    header_size, payload_size = _HEADER.unpack(_exactly(pipe, _HEADER.size))
    return json.loads(_exactly(pipe, header_size)), _exactly(pipe, payload_size)


def _exactly(pipe: IO[bytes], count: int) -> bytes:
    data = pipe.read(count)
    if len(data) < count:
        raise EOFError("the pipe was closed")
    return data


if __name__ == "__main__":
    main(*sys.argv[1:])
