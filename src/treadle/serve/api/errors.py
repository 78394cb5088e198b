"""Errors as OpenAI's clients expect them: {"error": {message, type, param, code}}."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from treadle.config import TreadleError, UserError

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """An answer other than success: HTTP status, one sentence, the field at fault, a code for programs."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, dict[str, str | int | None]]:
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status in (429, 503):
            headers["Retry-After"] = "1"
        return JSONResponse(self.body(), self.status, headers)


def as_api_error(error: TreadleError) -> ApiError:
    """Return the answer to what the engine refused (400), or failed at (500)."""
    return ApiError(400 if isinstance(error, UserError) else 500, str(error))


def handle_errors(app: FastAPI) -> None:
    """Make `app` answer every error in OpenAI's shape, its own and those of the framework."""

    @app.exception_handler(ApiError)
    async def ours(request: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(TreadleError)
    async def engine(request: Request, error: TreadleError) -> JSONResponse:
        return as_api_error(error).response()

    @app.exception_handler(HTTPException)
    async def framework(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{error.detail}: {request.method} {request.url.path} is not part of this server's API"
        answer = ApiError(error.status_code, message).response()
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(Exception)
    async def defect(request: Request, error: Exception) -> JSONResponse:
        return ApiError(500, f"internal error: {type(error).__name__}").response()
