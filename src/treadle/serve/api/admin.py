"""What changes a running server, behind a key of its own: new weights, adapters, sleep."""

from __future__ import annotations

import asyncio
import hmac
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import Field

from treadle.config import Settings
from treadle.serve.api.errors import ApiError
from treadle.serve.api.protocol import read_body
from treadle.serve.api.service import Service
from treadle.serve.api.streams import JsonAnswer
from treadle.serve.commands import LoadArguments, NoArguments, SleepArguments

PATHS = frozenset(
    "/admin/weights /admin/sleep /admin/wake /admin/state /admin/adapters /v1/load_lora_adapter "
    "/v1/unload_lora_adapter".split()
)


class LoadAdapterBody(Settings):
    """POST /v1/load_lora_adapter, with vLLM's names."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False  # take the place of another one of that name


class UnloadAdapterBody(Settings):
    """POST /v1/unload_lora_adapter, with vLLM's names."""

    lora_name: str
    lora_int_id: int | None = Field(None, description="vLLM's clients may send it; the name is what counts")


def add_admin(app: FastAPI, service: Service, admin_key: str | None) -> None:
    """Add the routes of PATHS to `app`; without a key each of them says how to set one (403)."""

    async def command(name: str, /, **arguments: Any) -> Response:
        return JsonAnswer(await asyncio.to_thread(service.engine.command, name, **arguments))

    @app.post("/admin/weights")
    async def weights(request: Request) -> Response:
        check_key(request, admin_key)
        body = await read_body(request, LoadArguments)
        return await command("load_weights", **dict(body))

    @app.post("/admin/sleep")
    async def sleep(request: Request) -> Response:
        check_key(request, admin_key)
        body = await read_body(request, SleepArguments) if _has_body(request) else SleepArguments()
        return await command("sleep", **dict(body))

    @app.post("/admin/wake")
    async def wake(request: Request) -> Response:
        check_key(request, admin_key)
        if _has_body(request):
            await read_body(request, NoArguments)
        return await command("wake")

    @app.get("/admin/state")
    async def state(request: Request) -> Response:
        check_key(request, admin_key)
        return await command("state")

    @app.get("/admin/adapters")
    async def adapters(request: Request) -> Response:
        check_key(request, admin_key)
        return await command("adapters")

    @app.post("/v1/load_lora_adapter")
    async def load_adapter(request: Request) -> Response:
        check_key(request, admin_key)
        body = await read_body(request, LoadAdapterBody)
        if body.lora_name in service.names:
            raise ApiError(400, f"the model itself is served as '{body.lora_name}'; choose another name", "lora_name")
        given = {"name": body.lora_name, "path": body.lora_path, "replace": body.load_inplace}
        return await command("add_adapter", **given)

    @app.post("/v1/unload_lora_adapter")
    async def unload_adapter(request: Request) -> Response:
        check_key(request, admin_key)
        body = await read_body(request, UnloadAdapterBody)
        return await command("remove_adapter", name=body.lora_name)


def _has_body(request: Request) -> bool:
    return request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers


def check_key(request: Request, admin_key: str | None) -> None:
    """Raise ApiError where the request does not carry the admin key: 403 where there is none, else 401."""
    if not admin_key:
        raise ApiError(
            403,
            "changing the running server is not allowed; start it with --admin-key KEY (or TREADLE_ADMIN_KEY) and send "
            "that key",
            None,
            "admin_key_not_set",
        )
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    given = request.headers.get("x-admin-key") or (key.strip() if scheme.lower() == "bearer" else "")
    if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), admin_key.encode()):
        said = "the admin key is missing or wrong; send it as Authorization: Bearer KEY, or as x-admin-key"
        raise ApiError(401, said, None, "invalid_admin_key")
