"""The servers under load: Treadle, llama.cpp's and vLLM's, started and ended here, or any that runs already.

The peers are those that ../shared/peers/setup builds under $PEERS_HOME (default ~/.cache/peers).
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PEERS_HOME = Path(os.environ.get("PEERS_HOME", Path.home() / ".cache/peers"))
SETUP = "../shared/peers/setup"
READY_SECONDS = 600.0
# A process that has not ended so long after it was asked to is killed.
GRACE_SECONDS = 20.0


@dataclass(frozen=True)
class Limits:
    """What every server is started with."""

    seqs: int
    length: int  # tokens of the longest sequence
    threads: int


@dataclass(frozen=True)
class Server:
    """One side: its label, its kind (treadle, llama.cpp, vllm or url), the model or address, more of its own flags."""

    label: str
    kind: str
    target: str
    flags: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Server:
        """Read KIND[:LABEL]=TARGET [FLAGS], or an address."""
        if text.startswith(("http://", "https://")):
            return cls(text, "url", text)
        name, equals, rest = text.partition("=")
        kind, _, label = name.partition(":")
        target, *flags = shlex.split(rest) or [""]
        if not equals or kind not in ("treadle", "llama.cpp", "vllm", "url") or not target:
            raise SystemExit(f"'{text}' is not KIND[:LABEL]=MODEL [FLAGS] with KIND treadle, llama.cpp, vllm or url")
        return cls(label or kind, kind, target, tuple(flags))

    def command(self, port: int, limits: Limits, folder: Path) -> list[str]:
        """Return the command that starts it, after making what it needs in `folder`."""
        if self.kind == "treadle":
            words = [sys.executable, "-m", "treadle", "serve", self.target, "--port", str(port)]
            return [*words, "--max-num-seqs", str(limits.seqs), "--max-model-len", str(limits.length), *self.flags]
        if self.kind == "llama.cpp":
            program = _peer("llama.cpp", "bin/llama-server")
            words = [program, "-m", self.target, "--port", str(port), "-t", str(limits.threads)]
            # Its context is that of all slots together.
            return [*words, "-np", str(limits.seqs), "-c", str(limits.seqs * limits.length), *self.flags]
        # Not by its command: that of the CPU package looks for the metadata of a package of another name.
        words = [_peer("vllm", "bin/python"), "-m", "vllm.entrypoints.openai.api_server"]
        words += ["--model", _as_folder(self.target, folder), "--host", "127.0.0.1", "--port", str(port)]
        words += ["--dtype", "bfloat16", "--max-num-seqs", str(limits.seqs), "--max-model-len", str(limits.length)]
        return [*words, *self.flags]


@dataclass
class Running:
    """A server that answers: its address and the model's name there."""

    server: Server
    url: str
    model: str
    startup_seconds: float | None = None


@contextlib.contextmanager
def running(server: Server, limits: Limits) -> Iterator[Running]:
    """Start a server (or reach the one that runs), wait until it answers, end it afterwards."""
    if server.kind == "url":
        url = server.target.rstrip("/").removesuffix("/v1")
        yield Running(server, url, _model_at(url))
        return
    with tempfile.TemporaryDirectory() as folder:
        port = _free_port()
        command = server.command(port, limits, Path(folder))
        environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "4", "HF_HUB_OFFLINE": "1"}
        environment["OMP_NUM_THREADS"] = str(limits.threads)
        if server.kind == "treadle":
            root = Path(__file__).parents[2] / "src"
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH", ""))))
        log = Path(folder, "log.txt")
        print(f"starting {server.label}: {' '.join(command)}", file=sys.stderr, flush=True)
        started = time.perf_counter()
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True
            )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(url, process, server.label, log)
            yield Running(server, url, _model_at(url), round(time.perf_counter() - started, 1))
            if process.poll() is not None:
                raise SystemExit(f"{server.label} ended under the load:\n{_tail(log)}")
        finally:
            _end(process)


def _peer(name: str, program: str) -> str:
    path = PEERS_HOME / name / program
    if not path.exists():
        raise SystemExit(f"{path} is not there; build it with: {SETUP} {name}")
    return str(path)


def _as_folder(model: str, folder: Path) -> str:
    """Return a Hugging Face folder of the model in bf16; vLLM reads GGUF files only with a plug-in."""
    if Path(model).is_dir():
        return model
    import treadle

    target = str(folder / "model")
    treadle.load(model, "bfloat16").save(target)
    return target


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], label: str, log: Path) -> None:
    begun = said = time.monotonic()
    while True:
        if process.poll() is not None:
            raise SystemExit(f"{label} did not start (exit {process.returncode}):\n{_tail(log)}")
        with (
            contextlib.suppress(OSError, urllib.error.URLError),
            urllib.request.urlopen(url + "/health", timeout=5) as one,
        ):
            if one.status == 200:
                return
        now = time.monotonic()
        if now - begun > READY_SECONDS:
            raise SystemExit(f"{label} did not answer within {READY_SECONDS:g} s:\n{_tail(log)}")
        if now - said > 5:
            said = now
            print(f"  {label} starts since {now - begun:.0f} s", file=sys.stderr, flush=True)
        time.sleep(0.1)


def _model_at(url: str) -> str:
    """Return the name of the model that a server has."""
    try:
        with urllib.request.urlopen(url + "/v1/models", timeout=30) as answer:
            return json.load(answer)["data"][0]["id"]
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise SystemExit(f"{url} names no model at /v1/models: {error}") from error


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a server and whatever it started: its session is its own."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])
