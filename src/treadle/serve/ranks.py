"""The ranks of a parallel model, seen from rank 0: it starts the others, sends them commands, notices their end.

    ranks = Ranks(Plan(tp=2, dp_shard=1), model="path")
    ranks.all(LoadWeights(1, "", "auto"))
    output = ranks.step(Step(1, batch))
    ranks.close()

Rank 0 is this process. The others are processes of their own, on this machine or on other nodes (see nodes.py).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from treadle.config import TreadleError, UserError
from treadle.config.progress import progress
from treadle.device.choice import choose_device
from treadle.parallel.exchange import LostRankError
from treadle.parallel.mesh import Rendezvous, join
from treadle.parallel.plan import Plan
from treadle.serve import rank_commands as commands
from treadle.serve import worker as workers
from treadle.serve.batch import StepOutput
from treadle.serve.nodes import interface_towards
from treadle.serve.parallel_settings import TIMEOUT_SECONDS, Nodes
from treadle.serve.rank import Rank

START_SECONDS = 300.0  # that a local worker gets until it says hello: importing PyTorch on a busy machine takes long
REPORT_SECONDS = 3.0  # that ranks get to say why, once one of them has failed
LEAVE_SECONDS = 5.0


class Peer:
    """Another rank: how to reach it, and what is known of its end. Its own thread reads what it sends."""

    def __init__(self, rank: int, node: str = "") -> None:
        self.rank, self.node = rank, node
        self.connection: Connection | None = None
        self._socket: socket.socket | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.hello: Future[commands.Hello] = Future()
        self.ready: Future[None] = Future()
        self.calls: dict[int, Future[Any]] = {}
        self.report: commands.Failed | None = None
        self.end = ""  # how it ended, where it did: "was ended by SIGKILL"

    @property
    def name(self) -> str:
        return f"rank {self.rank}" + (f" on {self.node}" if self.node else "")

    def connect(self, end: socket.socket) -> None:
        """Take our end of what connects the two."""
        self._socket, self.connection = end, Connection(os.dup(end.fileno()))

    def cut(self) -> None:
        """End the connection, so that both sides notice, a thread that reads from it included."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()


class Ranks:
    """All ranks of a plan. Any thread may call `all`; `step` and `close` are the engine's.

    `on_lost` is called with the error, from a thread of its own, when a rank ends or fails that should not.
    """

    def __init__(
        self,
        plan: Plan,
        model: str,
        device: str = "auto",
        timeout: float = TIMEOUT_SECONDS,
        threads: int | None = None,
        nodes: Nodes | None = None,
        on_lost: Callable[[TreadleError], None] = lambda _: None,
    ) -> None:
        """Start the ranks and join them. `threads` is how many a rank computes with, by default its share of this
        process's. Raises UserError, TreadleError."""
        if dist.is_initialized():
            raise TreadleError("this process belongs to a group of ranks already; serve in a process of its own")
        self.plan, self.model, self.timeout, self.on_lost = plan, model, timeout, on_lost
        self.nodes = nodes or Nodes()
        self.node_ranks = self.nodes.ranks_each(plan.ranks())
        self.threads = threads or max(1, torch.get_num_threads() // self.node_ranks)
        self._doing = ["the start"]
        self.error: TreadleError | None = None
        self._closing = False
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._number = 0
        self._stack = ExitStack()
        self.peers = [Peer(rank) for rank in range(1, plan.ranks())]
        atexit.register(self.close)
        try:
            self._start(device)
        except BaseException:
            self.close()
            raise

    # --- starting

    def _start(self, device: str) -> None:
        local, remote = self.peers[: self.node_ranks - 1], self.peers[self.node_ranks - 1 :]
        place = choose_device(device, 0)
        self._store = store = _open_store(self.nodes, self.timeout)
        for peer in local:
            self._start_local(peer)
        if remote:
            self._accept(remote, store)
        self._start_peers(device, store.port)
        torch.set_num_threads(self.threads)
        meeting = Rendezvous(0, self.plan.ranks(), store)
        try:
            with _environment(interface_towards(self.nodes.master_addr)):
                mesh = self._stack.enter_context(join(self.plan, place, self.timeout, meeting))
            self.rank = Rank(mesh, self.model, self.node_ranks)
        except (RuntimeError, LostRankError) as error:
            raise self._explain(error) from error
        for peer in self.peers:
            self._wait(peer.ready, self.timeout, f"{peer.name} did not join the others")
        self._doing.clear()

    def _start_peers(self, device: str, port: int) -> None:
        """Wait until each rank is there, and tell it what it is."""
        with progress("Starting ranks", len(self.peers), "ranks") as step:
            for peer in self.peers:
                self._check_hello(peer, self._wait(peer.hello, START_SECONDS, f"{peer.name} did not start"))
                step()
        for peer in self.peers:
            start = commands.Start(
                rank=peer.rank,
                plan=self.plan.model_dump(),
                store=(self.nodes.master_addr, port),
                device=device,
                threads=self.threads,
                node_ranks=self.node_ranks,
                timeout=self.timeout,
                model=self.model,
            )
            self._send(peer, start)

    def _start_local(self, peer: Peer) -> None:
        ours, theirs = socket.socketpair()
        command = workers.command_line("--control", str(theirs.fileno()), "--rank", str(peer.rank))
        environment = workers.environment(self.threads) | interface_towards(self.nodes.master_addr)
        peer.connect(ours)

        def run() -> None:
            # A worker ends with the thread that started it: with this one, which lives until the worker does.
            try:
                peer.process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=2, env=environment, pass_fds=[theirs.fileno()]
                )
            except OSError as error:
                peer.end = f"could not be started: {error.strerror or error}"
                self._lost(peer)
                return
            finally:
                theirs.close()
            self._listen(peer)

        threading.Thread(target=run, name=f"treadle-rank-{peer.rank}", daemon=True).start()

    def _accept(self, remote: list[Peer], store: dist.Store) -> None:
        """Take the connections of the ranks on other nodes, whichever comes first."""
        key = secrets.token_hex(16)
        waiting = {peer.rank: peer for peer in remote}
        with socket.create_server((self.nodes.master_addr, 0)) as server:
            store.set(workers.CONTROL_KEY, f"{server.getsockname()[1]} {key}")
            print(f"waiting for {len(remote)} ranks of the other nodes", file=sys.stderr, flush=True)
            deadline = time.monotonic() + workers.JOIN_SECONDS
            while waiting:
                server.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    accepted, address = server.accept()
                except TimeoutError:
                    some = ", ".join(str(rank) for rank in sorted(waiting))
                    raise TreadleError(
                        f"rank {some} of the other nodes did not join within {workers.JOIN_SECONDS:.0f} s; start "
                        "treadle serve there with the same options and another --node-rank"
                    ) from None
                hello = _greet(accepted)
                if hello is None or not secrets.compare_digest(hello.key, key) or hello.rank not in waiting:
                    accepted.close()  # whoever that is, it is no rank of ours
                    continue
                peer = waiting.pop(hello.rank)
                peer.node = f"{hello.host} ({address[0]})"
                peer.connect(accepted)
                peer.hello.set_result(hello)
                name = f"treadle-rank-{peer.rank}"
                threading.Thread(target=self._listen, args=(peer,), name=name, daemon=True).start()

    def _check_hello(self, peer: Peer, hello: commands.Hello) -> None:
        ours = workers.versions()
        if hello.versions != ours:
            differ = [f"{name} {hello.versions.get(name)} instead of {ours[name]}" for name in ours]
            raise UserError(f"{peer.name} has {', '.join(differ)}; install the same versions on every node")

    def _wait(self, future: Future[Any], seconds: float, otherwise: str) -> Any:
        try:
            return future.result(seconds)
        except TimeoutError:
            raise TreadleError(f"{otherwise} within {seconds:.0f} s") from None

    # --- what other ranks say

    def _listen(self, peer: Peer) -> None:
        """Read what a rank sends until its connection ends."""
        assert peer.connection is not None
        try:
            while True:
                data = peer.connection.recv_bytes(commands.MAX_MESSAGE_BYTES)
                self._heard(peer, msgspec.msgpack.decode(data, type=commands.Answer))
        except (EOFError, OSError, msgspec.MsgspecError):
            pass
        if peer.process is not None:
            peer.end = _end_of(peer.process)
        else:
            peer.end = "lost its connection"
        self._lost(peer)

    def _heard(self, peer: Peer, answer: commands.Answer) -> None:
        match answer:
            case commands.Hello():
                peer.hello.set_result(answer)
            case commands.Failed(fatal=True):
                peer.report = answer
            case commands.Done(number=0):
                peer.ready.set_result(None)
            case commands.Done() | commands.Failed():
                future = peer.calls.pop(answer.number, Future())
                if isinstance(answer, commands.Done):
                    future.set_result(answer.value)
                else:
                    kind = UserError if answer.user else TreadleError
                    future.set_exception(kind(f"{peer.name}: {answer.message}"))

    def _lost(self, peer: Peer) -> None:
        """A rank has ended: tell whoever waits for it, and, unless all end, whoever asked to be told."""
        with self._changed:
            self._changed.notify_all()
            closing = self._closing
        error = TreadleError(f"{peer.name} has ended") if closing else self._explain(None)
        for future in (peer.hello, peer.ready, *list(peer.calls.values())):
            _fail(future, error)
        if not closing:
            self.on_lost(error)

    # --- commands

    @property
    def doing(self) -> str:
        """What the ranks are at."""
        return self._doing[-1] if self._doing else "waiting for work"

    @contextlib.contextmanager
    def _during(self, command: commands.Command) -> Generator[None]:
        """Say what is done meanwhile. Where it fails what was done stays, for whoever asks why."""
        what = commands.describe(command)
        self._doing.append(what)
        yield
        self._doing.remove(what)

    def all(self, command: commands.Command) -> list[Any]:
        """Carry a command out on every rank and return what each gave, rank 0 first.

        Where it fails on any rank, raises the error of the lowest that failed, once all are done.
        """
        with self._changed:
            if self.error is not None:
                raise self.error
            self._number += 1
            number = self._number
        futures: list[Future[Any]] = []
        with self._during(command):
            with self._sending:
                for peer in self.peers:
                    future: Future[Any] = Future()
                    peer.calls[number] = future
                    futures.append(future)
                    self._send(peer, commands.Call(number, command))
                    if peer.end:  # it may have ended before there was anyone to tell
                        _fail(future, self._explain(None))
            own: Future[Any] = Future()
            try:
                own.set_result(self.rank.run(command))
            except Exception as error:
                if _tells_of_another(error):
                    raise self._explain(error) from error
                own.set_exception(error)
            problems = [error for future in [own, *futures] if (error := future.exception()) is not None]
        if problems:
            raise problems[0]
        return [future.result() for future in [own, *futures]]

    def step(self, command: commands.Step) -> StepOutput:
        """Compute a step on all ranks. Raises TreadleError where a rank fails; no further step is possible then."""
        if self.error is not None:
            raise self.error
        data = msgspec.msgpack.encode(commands.Call(0, command))
        with self._during(command):
            try:
                with self._sending:
                    for peer in self.peers:
                        assert peer.connection is not None
                        peer.connection.send_bytes(data)
                return self.rank.step(command)
            except Exception as error:
                raise self._explain(error) from error

    def _send(self, peer: Peer, message: commands.Call | commands.Start) -> None:
        assert peer.connection is not None
        try:
            peer.connection.send_bytes(msgspec.msgpack.encode(message))
        except OSError as error:
            raise self._explain(error) from error

    # --- failing

    def _explain(self, error: Exception | None) -> TreadleError:
        """Return what really went wrong and keep it: the first cause, not what other ranks made of it.

        `error` is what rank 0 itself met with. Where that only says that another rank is gone or silent, the others get
        a moment to report.
        """
        with self._changed:
            if self.error is None and error is not None and not _tells_of_another(error):
                self.error = TreadleError(f"rank 0 failed during {self.doing}: {type(error).__name__}: {error}")
            if self.error is None:
                self._changed.wait_for(lambda: self.error is not None or self._cause() is not None, REPORT_SECONDS)
            if self.error is None:
                self.error = self._cause() or self._hanging()
            return self.error

    def _cause(self) -> TreadleError | None:
        """Return what a rank failed of that did not merely wait for another."""
        for peer in self.peers:
            if peer.report is not None and not peer.report.waiting:
                kind = UserError if peer.report.user else TreadleError
                return kind(f"{peer.name} failed during {self.doing}: {peer.report.message}")
            if peer.end and peer.report is None:
                hint = "; if the machine was out of memory, lower kv_cache_memory or max_num_seqs"
                return TreadleError(f"{peer.name} {peer.end} during {self.doing}{hint * ('SIGKILL' in peer.end)}")
        return None

    def _hanging(self) -> TreadleError:
        silent = [peer.name for peer in self.peers if not peer.end and peer.report is None]
        if not silent:
            return TreadleError(f"the ranks lost their connections to each other during {self.doing}")
        return TreadleError(f"{' and '.join(silent)} gave no sign for {self.timeout:g} s during {self.doing}")

    def close(self) -> None:
        """End every rank: well where all is well, at once otherwise."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
        atexit.unregister(self.close)
        if self.error is None and hasattr(self, "rank"):
            with contextlib.suppress(TreadleError), self._sending:
                for peer in self.peers:
                    self._send(peer, commands.Call(0, commands.Leave()))
            self._stack.close()
            deadline = time.monotonic() + LEAVE_SECONDS
            with self._changed:
                self._changed.wait_for(
                    lambda: all(peer.end for peer in self.peers), max(0.0, deadline - time.monotonic())
                )
        for peer in self.peers:
            if peer.process is not None:
                peer.process.kill()
                peer.process.wait()
            peer.cut()
        self._stack.close()


def _open_store(nodes: Nodes, timeout: float) -> dist.TCPStore:
    place, wait = (nodes.master_addr, nodes.master_port), timedelta(seconds=timeout)
    try:
        return dist.TCPStore(*place, is_master=True, wait_for_workers=False, timeout=wait)
    except (RuntimeError, OSError) as error:
        raise UserError(
            f"node 0 cannot listen at {place[0]}:{place[1]}; choose another master_port, and for master_addr an "
            f"address of this machine ({str(error).splitlines()[0][:200]})"
        ) from error


def _greet(accepted: socket.socket) -> commands.Hello | None:
    """Return what the other side of a new connection says it is; None where it does not say so at once."""
    seconds = struct.pack("ll", 10, 0)
    accepted.setblocking(True)
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
    connection = Connection(os.dup(accepted.fileno()))
    try:
        return msgspec.msgpack.decode(connection.recv_bytes(1 << 16), type=commands.Hello)
    except (OSError, EOFError, msgspec.MsgspecError, UnicodeError):
        return None
    finally:
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
        connection.close()


def _fail(future: Future[Any], error: Exception) -> None:
    with contextlib.suppress(InvalidStateError):  # it has its result
        future.set_exception(error)


def _tells_of_another(error: Exception) -> bool:
    return isinstance(error, OSError) or workers.lost_connection(error)


def _end_of(process: subprocess.Popen[bytes]) -> str:
    """Return how a process that closed its connection ended."""
    try:
        code = process.wait(LEAVE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return "closed its connection"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Generator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
