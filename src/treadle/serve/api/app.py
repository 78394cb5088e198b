"""The FastAPI application: the routes of each API behind one gate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import Field
from starlette.middleware.cors import CORSMiddleware

from treadle.config import Settings, parse_settings
from treadle.serve.api.admin import add_admin
from treadle.serve.api.chat import add_chat
from treadle.serve.api.completions import add_completions
from treadle.serve.api.embeddings import add_embeddings
from treadle.serve.api.errors import handle_errors
from treadle.serve.api.gate import Gate
from treadle.serve.api.information import add_information
from treadle.serve.api.messages import add_messages
from treadle.serve.api.page.routes import add_page
from treadle.serve.api.protocol import MAX_BODY_BYTES
from treadle.serve.api.responses import add_responses
from treadle.serve.api.service import Service
from treadle.serve.api.state import add_state
from treadle.serve.interface import EngineInterface


class ApiSettings(Settings):
    """What a server's HTTP side is started with."""

    api_key: str | None = None  # what clients must send; None: nothing
    admin_key: str | None = None  # for what changes the server; None: nobody may
    allowed_origins: tuple[str, ...] = ()  # of web pages in browsers (CORS), "*" for any; none by default
    max_body_bytes: int = Field(MAX_BODY_BYTES, ge=1 << 10)
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"


def create_app(engine: EngineInterface, names: Sequence[str], api_key: str | None = None, **settings: Any) -> FastAPI:
    """Return the application that serves `engine` under `names`. It does not close the engine.

    `settings` are those of ApiSettings. Raises UserError for wrong ones.
    """
    chosen = parse_settings(ApiSettings, {"api_key": api_key, **settings}, source="the server's settings")
    service = Service(engine, names, chosen.tool_call_parser, chosen.reasoning_parser)
    app = FastAPI(title="Treadle", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service, app.state.max_body_bytes = service, chosen.max_body_bytes
    app.add_middleware(Gate, key=chosen.api_key, responses=service.metrics.responses)
    if chosen.allowed_origins:  # outside of the gate: what a browser asks beforehand has no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=chosen.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    handle_errors(app)
    for add in (add_chat, add_completions, add_responses, add_messages, add_embeddings, add_information, add_state):
        add(app, service)
    add_page(app)
    add_admin(app, service, chosen.admin_key)
    return app
