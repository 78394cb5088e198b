"""What tests share: a pool of worker processes, started once, that run a function on every rank."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Generator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

# A job in the background of a script has Ctrl-C ignored, and so would every program that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


class Ranks:
    """`size` processes joined by Gloo. `run` calls a module-level function on each and returns what each returned.

    A rank that raises fails the test with its traceback; the processes are then replaced, since the others may wait.
    """

    def __init__(self, size: int, folder: Path) -> None:
        self.size, self.folder = size, folder
        self.started = 0
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 120) -> list[Any]:
        if not self.processes:
            self._start()
        for pipe in self.pipes:
            pipe.send((function, arguments))
        results, problem = [], ""
        for rank, pipe in enumerate(self.pipes):
            try:
                if not pipe.poll(timeout if not problem else 1):
                    problem = problem or f"rank {rank} gave no answer within {timeout} s"
                    continue
                good, value = pipe.recv()
            except EOFError:
                problem = problem or f"rank {rank} died"
                continue
            if good:
                results.append(value)
            else:
                problem = f"rank {rank}:\n{value}"
        if problem:
            self.close()
            pytest.fail(problem)
        return results

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        store = self.folder / f"store-{self.size}-{self.started}"
        self.started += 1
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, rank, self.size, str(store)), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.join()
        self.processes, self.pipes = [], []


def _work(pipe: Connection, rank: int, size: int, store: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(*arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Generator[Callable[[int], Ranks]]:
    """Return a function: `ranks(2).run(function, ...)` runs the function on two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    pools: dict[int, Ranks] = {}

    def of(size: int) -> Ranks:
        if size not in pools:
            pools[size] = Ranks(size, folder)
        return pools[size]

    yield of
    for pool in pools.values():
        pool.close()
