"""Starts a server: takes the port, starts the engines, says what runs, serves, and leaves in good order."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from treadle.config import TreadleError
from treadle.serve.settings import ServeSettings


def serve(settings: ServeSettings) -> None:
    """Serve until SIGTERM or Ctrl-C. Raises UserError for what cannot be served, TreadleError where an engine dies."""
    from treadle.serve.api.server import address_of, check_certificate, is_loopback, open_socket
    from treadle.serve.chat_format import check_parsers

    if settings.node_rank:
        from treadle.serve.nodes import serve_node

        serve_node(settings.nodes, settings.plan.ranks(), settings.model)
        print("Stopped.", flush=True)
        return
    if settings.trust_remote_code:
        print(
            "note: --trust-remote-code changes nothing, since no code of a model's repository is ever run",
            file=sys.stderr,
            flush=True,
        )
    check_parsers(settings.tool_call_parser, settings.reasoning_parser)
    check_certificate(settings.ssl_certfile, settings.ssl_keyfile)
    opened = open_socket(settings.host, settings.port)
    if not is_loopback(opened) and not settings.api_key:
        print(
            f"warning: {settings.host} is reached from other machines and there is no --api-key: whoever reaches it "
            "can use it",
            file=sys.stderr,
            flush=True,
        )

    from treadle.serve.api.app import create_app
    from treadle.serve.api.server import run_server
    from treadle.serve.client import EngineClient, EngineOptions

    options = EngineOptions(
        settings.model, settings.dtype, settings.device, settings.engine_settings(), settings.data_parallel_size
    )
    names = list(settings.served_model_name) or [default_name(settings.model)]
    with EngineClient(options) as client:
        app = create_app(
            client,
            names,
            settings.api_key or None,
            admin_key=settings.admin_key or None,
            allowed_origins=settings.allowed_origins,
            tool_call_parser=settings.tool_call_parser,
            reasoning_parser=settings.reasoning_parser,
        )
        for line in client.summary:
            print(line, flush=True)
        if app.state.service.chats is not None:
            for note in app.state.service.chats.notes():
                print(f"{'chats':<9} {note}", flush=True)
        address = address_of(opened, tls=settings.ssl_certfile is not None)
        ready = [
            f"Serving {', '.join(names)} at {address} (a page to chat with it; OpenAI's and Anthropic's APIs below /v1)"
        ]
        run_server(app, client, opened, ready, settings.shutdown_timeout, settings.ssl_certfile, settings.ssl_keyfile)
        if client.failure and not client.closing:
            raise TreadleError(f"the server has ended: {client.failure}")
    print("Stopped.", flush=True)


def default_name(model: str) -> str:
    """Return the name that a model is served under: that of its folder or file, without what follows the last dot."""
    path = Path(os.path.abspath(model))
    return path.stem if path.suffix == ".gguf" else path.name
