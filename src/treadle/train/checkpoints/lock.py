"""One run a folder: a lock that the operating system lets go of when its process dies, however it dies."""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from treadle.config import UserError
from treadle.config.files import disk_errors, remove_leftovers
from treadle.train.checkpoints.format import folder_of

# A process that was just killed lets go of its lock only once the kernel has taken down its memory.
PATIENCE_SECONDS = 5.0

_WHY = {
    FileExistsError: "is a file",
    NotADirectoryError: "lies below a file",
    FileNotFoundError: "cannot be created there",
}


@contextmanager
def lock_run(run: str | Path) -> Generator[None]:
    """Hold the folder of a run, which is created where it is missing, for this process alone.

    What an earlier process left half written in it is removed. One process of a job takes the lock (rank 0, or the
    launcher). Raises UserError naming the process that holds it.
    """
    run = Path(run)
    with disk_errors(run):
        try:
            run.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError, FileNotFoundError) as error:
            raise UserError(
                f"{run} cannot be a run's folder: {error.filename} {_WHY[type(error)]}; choose another one (run)"
            ) from error
        descriptor = os.open(run / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _acquire(descriptor, run)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
        remove_leftovers(run)
        remove_leftovers(folder_of(run))
        yield
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, run: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
                raise UserError(
                    f"the run folder {run} is in use by {holder}; wait for it, stop it, or set another folder"
                ) from None
            time.sleep(0.05)
        except OSError as error:
            print(
                f"warning: the file system of {run} has no locks ({error.strerror}); a second run in this folder "
                "would not be noticed",
                file=sys.stderr,
            )
            return
