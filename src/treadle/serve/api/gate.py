"""What every request goes through before its route: an id, the key, a count of the answers."""

from __future__ import annotations

import hmac
import re
import uuid

from prometheus_client import Counter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from treadle.serve.api.admin import PATHS as ADMIN_PATHS
from treadle.serve.api.errors import ApiError
from treadle.serve.api.page import PATHS as PAGE_PATHS

# The paths that metrics tell apart; others could be anything.
PATHS = frozenset(
    "/v1/chat/completions /v1/completions /v1/responses /v1/messages /v1/messages/count_tokens /v1/embeddings "
    "/v1/models /tokenize /detokenize /health /metrics /state /".split()
)
OPEN_PATHS = frozenset(["/health"]) | PAGE_PATHS | ADMIN_PATHS  # need no key, or check one of their own
_ID = re.compile(r"[\x21-\x7e]{1,128}", re.ASCII)


class Gate:
    """Names each request in the header X-Request-Id, checks its key, and counts its answer."""

    def __init__(self, app: ASGIApp, key: str | None, responses: Counter) -> None:
        self.app, self.key, self.responses = app, key, responses
        self._ids: set[str] = set()  # of the requests that are being answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        name = self._unique(headers.get(b"x-request-id", b"").decode("latin-1"))

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in PATHS else "other"
                self.responses.labels(path, message["status"]).inc()
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", name.encode())]
            await send(message)

        self._ids.add(name)
        try:
            if self.key is None or scope["path"] in OPEN_PATHS or self._has_key(headers, self.key):
                await self.app(scope, receive, named)
            else:
                said = "the API key is missing or wrong; send it as Authorization: Bearer KEY, or as x-api-key"
                error = ApiError(401, said, None, "invalid_api_key")
                await error.response(scope["path"])(scope, receive, named)
        finally:
            self._ids.discard(name)

    def _unique(self, given: str) -> str:
        """Return the client's name for its request where that is one, and no other that is being answered has it."""
        name = given if _ID.fullmatch(given) else uuid.uuid4().hex
        return f"{name}-{uuid.uuid4().hex[:8]}" if name in self._ids else name

    def _has_key(self, headers: dict[bytes, bytes], wanted: str) -> bool:
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        given = key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        return hmac.compare_digest(given, wanted.encode())
