"""A server in a thread of the test's process, and clients for it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import httpx
import openai
import uvicorn

from treadle.serve.api.app import create_app
from treadle.serve.api.server import address_of, open_socket
from treadle.serve.engine import Engine


class Served:
    """A server in a thread of this process."""

    def __init__(self, engine: Engine, names: Sequence[str] = ("tiny", "also-tiny"), **options: Any) -> None:
        self.engine = engine
        self.socket = open_socket("127.0.0.1", 0)
        self.url = address_of(self.socket)
        app = create_app(engine, names, **options)
        self.uvicorn = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
        self.thread = threading.Thread(target=self.uvicorn.run, kwargs={"sockets": [self.socket]}, daemon=True)
        self.thread.start()
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self.client = openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=60)

    def close(self) -> None:
        self.http.close()
        self.client.close()
        self.uvicorn.should_exit = True
        self.thread.join(30)
        self.engine.close()

    def error(self, path: str, status: int, **body: Any) -> dict[str, Any]:
        answer = self.http.post(path, json=body)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and "\n" not in error["message"]
        return error
