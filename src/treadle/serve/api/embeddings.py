"""POST /v1/embeddings: OpenAI's, of texts and token ids."""

from __future__ import annotations

import base64
import math
from typing import Any, Literal

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import Field, field_validator

from treadle.config import Settings, TreadleError
from treadle.serve.api.errors import ApiError, as_api_error
from treadle.serve.api.protocol import read_body
from treadle.serve.api.service import MAX_WAITING, Service
from treadle.serve.api.streams import JsonAnswer, while_connected

MAX_INPUTS = 256


class EmbeddingBody(Settings):
    """POST /v1/embeddings."""

    model: str | None = None
    input: str | list[int] | list[str] | list[list[int]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)

    @field_validator("input")
    @classmethod
    def _some(cls, value: Any) -> Any:
        if not value or (isinstance(value, list) and any(one in ("", []) for one in value)):
            raise ValueError("the input is empty; give at least one token")
        return value

    def inputs(self) -> list[str | list[int]]:
        if isinstance(self.input, str) or isinstance(self.input[0], int):
            return [self.input]  # pyrefly: ignore
        if len(self.input) > MAX_INPUTS:
            raise ApiError(400, f"{len(self.input)} inputs in one request; at most {MAX_INPUTS}", "input")
        return list(self.input)  # pyrefly: ignore


def add_embeddings(app: FastAPI, service: Service) -> None:
    engine = service.engine

    @app.post("/v1/embeddings")
    async def embed(request: Request) -> Response:
        body = await read_body(request, EmbeddingBody)
        name = service.check_model(body.model)
        if name not in service.names:
            raise ApiError(400, f"'{name}' is an adapter, which gives no embeddings; ask for the model", "model")
        width = engine.spec.width
        if body.dimensions is not None and body.dimensions > width:
            raise ApiError(
                400, f"dimensions is {body.dimensions}, but the model's embeddings have {width}", "dimensions"
            )
        if engine.failure:
            raise ApiError(503, engine.failure)
        inputs = body.inputs()
        if engine.stats.waiting + len(inputs) > MAX_WAITING:
            raise ApiError(503, f"{engine.stats.waiting} requests wait already; try again later")
        try:
            prompts = await service.encode(inputs)
            found = await while_connected(request, [engine.embed(prompt) for prompt in prompts])
        except TreadleError as error:
            raise as_api_error(error, "input") from error
        tokens = sum(count for _, count in found)
        data = [
            {"object": "embedding", "index": index, "embedding": _shown(values, body.dimensions, body.encoding_format)}
            for index, (values, _) in enumerate(found)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        answer = {"object": "list", "data": data, "model": name, "usage": usage}
        return JsonAnswer(answer | ({"system_fingerprint": version} if (version := engine.weight_version) else {}))


def _shown(values: list[float], dimensions: int | None, form: str) -> list[float] | str:
    """Return an embedding as it is sent: its first numbers, scaled to length 1 again where some are left out."""
    if dimensions is not None and dimensions < len(values):
        values = values[:dimensions]
        length = math.hypot(*values)
        values = [value / length for value in values] if length else values
    return values if form == "float" else base64.b64encode(np.asarray(values, np.float32).tobytes()).decode()
