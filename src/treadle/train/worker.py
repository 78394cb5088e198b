"""One rank of a run, from its settings to its outcome; and the program that a launcher starts on each rank."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import torch

from treadle.config import TreadleError, load_settings
from treadle.device.choice import choose_device
from treadle.device.host import cores
from treadle.parallel.collectives import together
from treadle.parallel.mesh import join, world_from_environment
from treadle.train.feed import Feed, open_feed
from treadle.train.loop import Outcome, Run
from treadle.train.settings import RunSettings
from treadle.train.signals import LAUNCHED, listening

# Where a worker writes why it failed; the launcher shows the first to be written.
FAILURE_FILE = "TREADLE_FAILURE_FILE"
# What the messages of PyTorch's communication errors say, which have no class of their own.
LOST_CONNECTION = ("Connection closed by peer", "Connection reset", "gloo/transport", "NCCL", "Broken pipe")


def run_rank(settings: RunSettings, feed: Feed | None = None) -> Outcome:
    """Train as this process's rank and return how it ended; the run's folder is already locked.

    `feed` is the run's data where it is open already. Raises UserError, TreadleError.
    """
    _, _, local_rank = world_from_environment()
    device = choose_device(settings.train.device, local_rank)
    torch.set_num_threads(settings.train.threads or default_threads())
    with listening() as stop, join(settings.plan, device, settings.train.timeout_minutes * 60) as mesh:
        feed = feed or together(lambda: open_feed(settings.data))
        try:
            return Run(settings, feed, mesh, stop).go()
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
                raise TreadleError(
                    f"rank {mesh.rank} ran out of memory; lower train.microbatch_tokens, or set train.recompute=full "
                    "or train.reshard=forward"
                ) from error
            raise


def default_threads() -> int:
    """Return this machine's usable cores divided by the processes that a launcher started on it."""
    return max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def main() -> None:
    """Run as a worker: `python -m treadle.train.worker SETTINGS_FILE`, with the environment of a launcher."""
    _end_with_the_launcher()
    rank = int(os.environ.get("RANK", "0"))
    debug = bool(os.environ.get("TREADLE_DEBUG"))
    code = 0
    try:
        settings = load_settings(RunSettings, sys.argv[1])
        if rank:
            _write_to(settings.run / "log" / f"rank-{rank}.txt")
        run_rank(settings)
    except BaseException as error:
        code = (
            error.exit_code if isinstance(error, TreadleError) else 130 if isinstance(error, KeyboardInterrupt) else 1
        )
        _record_failure(error, rank, code)
        if debug or rank:
            traceback.print_exc()
    # Libraries' threads may still wait for ranks that are gone; there is nothing left that they could save.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _record_failure(error: BaseException, rank: int, code: int) -> None:
    path = os.environ.get(FAILURE_FILE)
    if not path:
        return
    lost = not isinstance(error, TreadleError) and any(sign in str(error) for sign in LOST_CONNECTION)
    if isinstance(error, TreadleError):
        sentence = str(error)
    elif lost:
        sentence = f"rank {rank} lost its connection to another rank"
    else:
        sentence = f"internal error on rank {rank}: {type(error).__name__}: {error} (--debug shows where)"
    record = {"rank": rank, "time": time.time(), "exit_code": code, "message": sentence, "lost_connection": lost}
    with contextlib.suppress(OSError):
        Path(f"{path}-{rank}.json").write_text(json.dumps(record))


def _write_to(path: Path) -> None:
    """Send this process's output to a file: only rank 0 speaks on the terminal."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _end_with_the_launcher() -> None:
    """Make sure that this process does not outlive the launcher, even if that is killed: no worker is left behind."""
    launcher = os.environ.get(LAUNCHED)
    if not launcher:
        return
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)

    def watch() -> None:
        while os.getppid() == int(launcher):
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)

    # Where there is no such signal, and for a launcher that died before it was asked for.
    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main()
