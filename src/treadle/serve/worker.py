"""The program of every rank but the first: it takes commands from rank 0 until that says so, or is gone.

python -m treadle.serve.worker --parent PID --control FD                                    # started by rank 0
python -m treadle.serve.worker --parent PID --join HOST:PORT --rank 2 --model PATH          # by another node
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import os
import signal
import socket
import sys
import threading
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import msgspec
import torch
import torch.distributed as dist

from treadle.config import TreadleError, UserError
from treadle.parallel.exchange import LostRankError
from treadle.parallel.mesh import Rendezvous, join, pick_device
from treadle.parallel.plan import Plan
from treadle.serve import rank_commands as commands
from treadle.serve.rank import Rank

# What the messages of PyTorch's communication errors say, which have no class of their own.
LOST_CONNECTION = ("Connection closed", "Connection reset", "gloo/transport", "NCCL", "Broken pipe", "pair closure")
JOIN_SECONDS = 600.0
CONTROL_KEY = "treadle/control"


def lost_connection(error: BaseException) -> bool:
    """Return whether an error says that another rank is gone or silent, and nothing of its own."""
    if isinstance(error, TreadleError):
        return isinstance(error, LostRankError)
    return any(sign in str(error) for sign in LOST_CONNECTION)


def versions() -> dict[str, str]:
    """Return what must be the same on every rank."""
    package = importlib.import_module("treadle")  # by its name: it also stands for what serving must not know
    return {"treadle": package.__version__, "torch": torch.__version__.partition("+")[0]}


def main() -> None:
    """Run as a worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--control", type=int)
    parser.add_argument("--join")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--model", default="")
    arguments = parser.parse_args()
    end_with(arguments.parent)
    # A terminal or a service manager signals every process; rank 0 alone decides when it is time to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    key = ""
    try:
        if arguments.control is not None:
            control = Connection(arguments.control)
        else:
            control, key = reach(arguments.join, arguments.rank)
    except TreadleError as error:
        print(f"treadle: {error}", file=sys.stderr)
        _leave(1)
    hello = commands.Hello(arguments.rank, os.getpid(), socket.gethostname(), versions(), key)
    control.send_bytes(msgspec.msgpack.encode(hello))
    code = 1
    try:
        start = msgspec.msgpack.decode(control.recv_bytes(commands.MAX_MESSAGE_BYTES), type=commands.Start)
        code = Worker(control, start, arguments.model or start.model).serve(start)
    except (EOFError, ConnectionError):
        pass  # rank 0 is gone: whatever it had to say, it said
    except BaseException:
        traceback.print_exc()
    _leave(code)


def end_with(parent: int) -> None:
    """Make sure that this process does not outlive the one that started it, even if that is killed."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        _leave(1)  # it died before the signal was asked for


def reach(address: str, rank: int) -> tuple[Connection, str]:
    """Return the connection to rank 0 on another node, and the key that it wants to see. Raises TreadleError."""
    host, _, port = address.rpartition(":")
    try:
        store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=JOIN_SECONDS))
        control_port, key = store.get(CONTROL_KEY).decode().split(" ")
        connection = socket.create_connection((host, int(control_port)), timeout=JOIN_SECONDS)
    except (OSError, RuntimeError) as error:
        raise TreadleError(f"rank {rank} does not reach rank 0 at {address}: {' '.join(str(error).split())}") from error
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(connection.detach()), key


class Worker:
    """Carries out rank 0's commands, in their order; weights are read beside the steps."""

    def __init__(self, control: Connection, start: commands.Start, model: str) -> None:
        self.control, self.rank, self.model = control, start.rank, model
        self._sending = threading.Lock()

    def serve(self, start: commands.Start) -> int:
        """Join the other ranks and work until it is time to leave. Returns the exit code."""
        torch.set_num_threads(start.threads)
        os.environ["RANK"] = str(start.rank)  # progress is rank 0's to show
        plan = Plan(**start.plan)
        try:
            device = pick_device(start.device, start.rank % start.node_ranks)
            store = dist.TCPStore(*start.store, is_master=False, timeout=timedelta(seconds=start.timeout))
            with join(plan, device, start.timeout, Rendezvous(start.rank, plan.ranks(), store)) as mesh:
                try:
                    self._work(Rank(mesh, self.model, start.node_ranks))
                except BaseException as error:
                    self._give_up(error)
        except BaseException as error:
            self._give_up(error)
        return 0

    def _give_up(self, error: BaseException) -> NoReturn:
        """Say why, and end at once: there may be no one left with whom the group could be left in order."""
        if not isinstance(error, EOFError | ConnectionError):  # rank 0 is gone: whatever it had to say, it said
            self._fail(0, error, fatal=True)
        _leave(1)

    def _work(self, rank: Rank) -> None:
        self._answer(commands.Done(0))
        while True:
            call = msgspec.msgpack.decode(self.control.recv_bytes(commands.MAX_MESSAGE_BYTES), type=commands.Call)
            if isinstance(call.command, commands.Leave):
                return
            if isinstance(call.command, commands.Step):
                rank.step(call.command)
            elif isinstance(call.command, commands.LoadWeights | commands.LoadAdapter):
                threading.Thread(target=self._carry_out, args=(rank, call), daemon=True).start()
            else:
                self._carry_out(rank, call)

    def _carry_out(self, rank: Rank, call: commands.Call) -> None:
        """Do what involves no other rank, so that a failure leaves this one able to go on."""
        try:
            value = rank.run(call.command)
        except Exception as error:
            self._fail(call.number, error)
        else:
            self._answer(commands.Done(call.number, value))

    def _fail(self, number: int, error: BaseException, fatal: bool = False) -> None:
        sentence = " ".join(str(error).split())[:2000]
        if not isinstance(error, TreadleError):
            sentence = f"{type(error).__name__}: {sentence}"
            if os.environ.get("TREADLE_DEBUG"):
                traceback.print_exception(error)
        failed = commands.Failed(number, sentence, isinstance(error, UserError), fatal, lost_connection(error))
        with contextlib.suppress(OSError):
            self._answer(failed)

    def _answer(self, answer: commands.Answer) -> None:
        with self._sending:
            self.control.send_bytes(msgspec.msgpack.encode(answer))


def _leave(code: int) -> NoReturn:
    """End at once: libraries' threads may wait for ranks that are gone, and there is nothing to save."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def command_line(*words: str) -> list[str]:
    """Return the command that starts a worker from this process."""
    return [sys.executable, "-m", "treadle.serve.worker", "--parent", str(os.getpid()), *words]


def environment(threads: int) -> dict[str, str]:
    """Return the environment of a worker: this process's, and where Treadle is."""
    source = str(Path(__file__).parents[2])
    paths = [source, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


if __name__ == "__main__":
    main()
