"""The benchmark of the interface's own cost: what it counts, against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import serve_interface
from serving.servers import Running, Server

from tests.serve.serving import Served
from treadle.serve.engine import Engine


def test_requests_and_errors_are_counted(engine_of: Callable[..., Engine]) -> None:
    served = Served(engine_of(max_num_seqs=1, max_model_len=64), ["tiny"])
    try:
        server = Server.parse(served.url)
        point = asyncio.run(serve_interface.run(Running(server, served.url, "tiny"), 200.0, 0.25, 4))
        assert point["errors"] == [] and point["answered_per_second"] > 0
        assert 0 < point["ms"]["p50"] <= point["ms"]["p99"] <= point["ms"]["max"]
        unknown = asyncio.run(serve_interface.run(Running(server, served.url, "nothing"), 200.0, 0.05, 4))
        assert unknown["errors"] == ["HTTP 404"] * 10
        gone = asyncio.run(serve_interface.run(Running(server, "http://127.0.0.1:1", "tiny"), 200.0, 0.05, 4))
        assert len(gone["errors"]) == 4, "one a connection"
    finally:
        served.close()
