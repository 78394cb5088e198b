"""The HTTP interface's own cost: `/tokenize` requests at a steady rate, answered without touching the model.

    python benchmarks/serve_interface.py MODEL.gguf --rate 500 --seconds 10

Requests are due at even intervals (an open loop: a slow server does not slow them down) and go over connections that
stay open. The generator shares the machine's cores with the server. Prints the rate first; figures go to
benchmarks/results/.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from serving.report import percentiles, write_result
from serving.servers import Limits, Running, Server, running

TEXT = "The shuttle carries the weft between the warp threads, row after row. " * 4
GRACE_SECONDS = 30.0  # an answer later than this after the last request was due counts as an error


def request(one: Running) -> bytes:
    """Return the bytes of one request."""
    body = json.dumps({"model": one.model, "prompt": TEXT}).encode()
    host = one.url.removeprefix("http://")
    head = f"POST /tokenize HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def answer(reader: asyncio.StreamReader) -> int:
    """Read one answer; returns its status."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    (length,) = (line.split(":")[1] for line in head.split("\r\n") if line.startswith("content-length:"))
    await reader.readexactly(int(length))
    return int(head.split()[1])


async def run(one: Running, rate: float, seconds: float, connections: int) -> dict[str, Any]:
    """Send rate x seconds requests and return what became of them. Latencies count from when a request was due."""
    host, port = one.url.removeprefix("http://").split(":")
    data, due = request(one), iter([index / rate for index in range(round(rate * seconds))])
    latencies: list[float] = []
    errors: list[str] = []

    async def client(started: float) -> None:
        writer = None
        try:
            reader, writer = await asyncio.open_connection(host, int(port))
            for at in due:
                await asyncio.sleep(max(0.0, started + at - time.perf_counter()))
                writer.write(data)
                status = await answer(reader)
                latencies.append(time.perf_counter() - started - at)
                if status != 200:
                    errors.append(f"HTTP {status}")
        except (OSError, asyncio.IncompleteReadError) as error:
            errors.append(str(error) or type(error).__name__)
        finally:
            if writer:
                writer.close()

    started = time.perf_counter()
    try:
        async with asyncio.timeout(seconds + GRACE_SECONDS):
            await asyncio.gather(*(client(started) for _ in range(connections)))
    except TimeoutError:
        errors.append(f"not all were answered {GRACE_SECONDS:g} s after the last was due")
    took = time.perf_counter() - started
    milliseconds = percentiles(1000 * value for value in latencies)
    return {"rate": rate, "answered_per_second": round(len(latencies) / took, 1), "ms": milliseconds, "errors": errors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a model's folder or GGUF file")
    parser.add_argument("--rate", type=float, nargs="+", default=[500.0], help="requests a second")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    limits = Limits(16, 2048, len(os.sched_getaffinity(0)))
    with running(Server("treadle", "treadle", options.model), limits) as one:
        asyncio.run(run(one, 50.0, 1.0, options.connections))  # the first requests fill caches
        points = [asyncio.run(run(one, rate, options.seconds, options.connections)) for rate in options.rate]
    for point in points:
        times = f"ms p50 {point['ms']['p50']:.1f}, p99 {point['ms']['p99']:.1f}, " if point["ms"] else ""
        print(
            f"{point['answered_per_second']:.0f} /tokenize requests a second of {point['rate']:g} asked, "
            f"{times}{len(point['errors'])} errors"
        )
    result = {"claim": "500 requests a second of /tokenize size without errors", "points": points}
    print(f"wrote {write_result(options.out, 'serve_interface', result)}")


if __name__ == "__main__":
    main()
