"""Errors as clients expect them: OpenAI's {"error": {message, type, param, code}}, Anthropic's below /v1/messages."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from treadle.config import TreadleError, UserError
from treadle.serve.versions import Unavailable

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
}
ANTHROPIC_KINDS = {**KINDS, 413: "request_too_large", 500: "api_error", 503: "overloaded_error"}
ANTHROPIC_PATH = "/v1/messages"


class ApiError(Exception):
    """An answer other than success: HTTP status, one sentence, the field at fault, a code for programs."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's shape."""
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        """Return the error in Anthropic's shape."""
        kind = ANTHROPIC_KINDS.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def response(self, path: str = "") -> JSONResponse:
        """Return the answer to a request for `path`."""
        headers = {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status in (429, 503):
            headers["Retry-After"] = "1"
        if self.status == 413:
            headers["Connection"] = "close"  # the rest of the body is not read
        body = self.anthropic_body() if path.startswith(ANTHROPIC_PATH) else self.body()
        return JSONResponse(body, self.status, headers)


def as_api_error(error: TreadleError, param: str | None = None) -> ApiError:
    """Return the answer to what the engine refused (400), cannot do for now (503), or failed at (500)."""
    if isinstance(error, Unavailable):
        return ApiError(503, str(error), param)
    return ApiError(400, str(error), param) if isinstance(error, UserError) else ApiError(500, str(error))


def handle_errors(app: FastAPI) -> None:
    """Make `app` answer every error in the shape of the API that was asked, its own and those of the framework."""

    @app.exception_handler(ApiError)
    async def ours(request: Request, error: ApiError) -> JSONResponse:
        return error.response(request.url.path)

    @app.exception_handler(TreadleError)
    async def engine(request: Request, error: TreadleError) -> JSONResponse:
        return as_api_error(error).response(request.url.path)

    @app.exception_handler(HTTPException)
    async def framework(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{error.detail}: {request.method} {request.url.path} is not part of this server's API"
        answer = ApiError(error.status_code, message).response(request.url.path)
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(RequestValidationError)
    async def validation(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        return ApiError(422, f"'{where}': {first['msg']}", where).response(request.url.path)

    @app.exception_handler(Exception)
    async def defect(request: Request, error: Exception) -> JSONResponse:
        return ApiError(500, f"internal error: {type(error).__name__}").response(request.url.path)
