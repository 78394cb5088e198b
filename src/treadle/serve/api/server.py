"""The server's life: take the port, load the model, say what runs, serve, and leave in good order."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import math
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Generator, Sequence
from types import FrameType

import uvicorn
from fastapi import FastAPI

from treadle.config import UserError
from treadle.serve.client import EngineClient
from treadle.serve.interface import EngineInterface

SECONDS_TO_SAY_SO = 2


def open_socket(host: str, port: int) -> socket.socket:
    """Return a socket bound to `host` and `port` (0: any free one). Raises UserError where that cannot be had."""
    if not 0 <= port <= 65535:
        raise UserError(f"the port must lie between 0 and 65535, it is {port}")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise UserError(f"the host '{host}' is not an address of this machine: {error}; use 127.0.0.1") from error
    family, kind, protocol, _, address = found[0]
    opened = socket.socket(family, kind, protocol)
    try:
        if sys.platform != "win32":
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
        # Listening at once makes the port ours: a second server fails now, not after it has loaded its model.
        opened.listen(2048)
    except OSError as error:
        opened.close()
        raise UserError(_why_not(host, port, error)) from error
    return opened


def _why_not(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is in use; choose another with --port, or --port 0 for any free one"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"port {port} of {host} may not be opened by this user; choose one above 1023 with --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is not an address of this machine; use 127.0.0.1, or 0.0.0.0 for all of them"
    return f"port {port} of {host} cannot be opened: {error.strerror}; choose another with --port"


def address_of(opened: socket.socket, tls: bool = False) -> str:
    """Return the http:// or https:// address of a bound socket."""
    host, port = opened.getsockname()[:2]
    shown = f"[{host}]" if opened.family == socket.AF_INET6 else host
    return f"{'https' if tls else 'http'}://{shown}:{port}"


def check_certificate(certificate: str | None, key: str | None) -> None:
    """Raise UserError where a server could not speak TLS with these PEM files. Without a certificate it need not."""
    if certificate is None:
        return
    for file in (certificate, key):
        if file is not None and not os.path.isfile(file):
            raise UserError(f"{file} is not a file; --ssl-certfile and --ssl-keyfile take PEM files")
    try:
        # A key that is locked would make OpenSSL ask on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: "")
    except (ssl.SSLError, OSError) as error:
        reason = getattr(error, "reason", None) or error
        raise UserError(
            f"{certificate} and its key cannot be used for TLS ({reason}); give a PEM pair that fits"
        ) from error


def is_loopback(opened: socket.socket) -> bool:
    """Whether only this machine can reach the socket."""
    return ipaddress.ip_address(opened.getsockname()[0].partition("%")[0]).is_loopback


class _Server(uvicorn.Server):
    """Uvicorn, which would end by the signal that stopped it; here that is a good end, with exit code 0."""

    def __init__(self, config: uvicorn.Config, engine: EngineInterface, ready: Sequence[str], patience: float) -> None:
        super().__init__(config)
        self.engine, self.ready, self.patience = engine, ready, patience

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if isinstance(self.engine, EngineClient):
            self.engine.on_failure = self._end_by_failure
            if self.engine.failure:
                self._end_by_failure(self.engine.failure)
        for line in self.ready:
            print(line, flush=True)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        handled = (signal.SIGINT, signal.SIGTERM)
        before = {one: signal.signal(one, self.handle_exit) for one in handled}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop; asked again, stop without waiting."""
        again, self.should_exit = self.should_exit, True
        self.force_exit = again
        # In a thread of its own: a handler runs in the middle of anything, the engine's lock may be held.
        patience = 0.0 if again else self.patience
        threading.Thread(target=self._end_requests, args=(patience,), daemon=True).start()
        if not again:
            print(
                "Stopping: finishing the running requests, taking no new ones; a second signal ends at once.",
                file=sys.stderr,
                flush=True,
            )

    def _end_by_failure(self, why: str) -> None:
        """Stop serving once the answers that say why are out."""
        print(f"The engine has failed: {why}", file=sys.stderr, flush=True)
        self.should_exit = True

    def _end_requests(self, patience: float) -> None:
        """Let requests finish, then end the rest with an error that their clients can read."""
        self.engine.close(patience)
        # Whoever still holds a connection open reads nothing; cutting it is no error of ours to report.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)


def run_server(
    app: FastAPI,
    engine: EngineInterface,
    opened: socket.socket,
    ready: Sequence[str],
    shutdown_timeout: float,
    certificate: str | None = None,
    key: str | None = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C, then let running requests finish for `shutdown_timeout` seconds.

    `ready` is printed once requests are answered. With a certificate (and its key, if that is apart) it is https.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        # When the engine's time is up, answers that say so must still get out.
        timeout_graceful_shutdown=math.ceil(shutdown_timeout) + SECONDS_TO_SAY_SO,
        server_header=False,
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )
    asyncio.run(_Server(config, engine, ready, shutdown_timeout).serve(sockets=[opened]))
