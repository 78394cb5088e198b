"""Sends the page's files, and forbids the browser to load or run anything else."""

from __future__ import annotations

from importlib.resources import files

from fastapi import FastAPI
from fastapi.responses import Response

from treadle.serve.api.errors import ApiError
from treadle.serve.api.page import FILES

# Scripts come from files of this server only, and may make no HTML out of text; no page may put this one in a frame.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """Answer / and what it loads from below /page/."""
    folder = files("treadle.serve.api.page")
    found = {name: Response(folder.joinpath(name).read_bytes(), 200, HEADERS, kind) for name, kind in FILES.items()}

    @app.get("/")
    async def page() -> Response:
        return found["index.html"]

    @app.get("/page/{name}")
    async def part(name: str) -> Response:
        if name not in found or name == "index.html":
            raise ApiError(404, f"the page has no file '{name}'")
        return found[name]
