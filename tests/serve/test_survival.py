"""What a server must survive: crowds, storms of cancellations, long life, hung and killed processes."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.serve.running import Process, serving

# Blocks of 16 tokens of a tiny model in fp32 take 16 KiB: 640 KiB are 40 blocks, or 20 sequences of up to 32 tokens.
POOL = ("--kv-cache-memory", "660KiB", "--max-num-seqs", "32", "--max-model-len", "128", "--check-blocks")


@pytest.fixture(scope="module")
def server(tiny_folder: Path) -> Generator[tuple[Process, str]]:
    with serving(str(tiny_folder), "--port", "0", *POOL, "--served-model-name", "tiny") as running:
        yield running


@asynccontextmanager
async def connection(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


def request(path: str, body: dict[str, Any] | None = None) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Read one whole answer that says how long it is."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
    )
    return int(head.split()[1]), await reader.readexactly(length)


async def ask(url: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
    async with connection(url) as (reader, writer):
        writer.write(request(path, body))
        return await answer(reader)


async def metric(url: str, name: str) -> float:
    _, text = await ask(url, "/metrics")
    return sum(float(line.split()[-1]) for line in text.decode().splitlines() if line.split("{")[0].split()[0] == name)


async def until_idle(url: str) -> None:
    """Wait until the engine has nothing at hand and every block is free again."""
    for _ in range(3000):
        if await metric(url, "treadle_num_requests_running") + await metric(url, "treadle_kv_blocks_held") == 0:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the engine holds something still")


def test_200_clients_at_once_on_a_pool_that_holds_20(server: tuple[Process, str]) -> None:
    _, url = server

    async def crowd() -> None:
        prompts = [[n % 200 + 1] * (n % 12 + 1) for n in range(200)]
        bodies = [{"prompt": p, "max_tokens": 20, "ignore_eos": True, "temperature": 0} for p in prompts]
        alone = [json.loads((await ask(url, "/v1/completions", body))[1]) for body in bodies[:12]]
        together = await asyncio.gather(*(ask(url, "/v1/completions", body) for body in bodies))
        assert [status for status, _ in together] == [200] * 200
        answers = [json.loads(content) for _, content in together]
        assert all(one["usage"]["completion_tokens"] == 20 for one in answers)
        for one, other in zip(alone, answers, strict=False):
            assert one["choices"][0]["text"] == other["choices"][0]["text"]
        await until_idle(url)

    asyncio.run(crowd())


def test_cancel_storms_give_every_block_back(server: tuple[Process, str]) -> None:
    """Clients that leave before, during and after the prompt, in the middle of a stream, three choices each."""
    _, url = server
    dice = random.Random(1)

    async def leave(number: int) -> None:
        body = {"prompt": [number % 250 + 1] * dice.randint(1, 90), "n": 3, "max_tokens": 30, "ignore_eos": True}
        async with connection(url) as (reader, writer):
            writer.write(request("/v1/completions", {**body, "stream": number % 2 == 0}))
            for _ in range(dice.randint(0, 12)):
                await asyncio.sleep(0)
            if dice.random() < 0.6:
                await reader.read(dice.randint(1, 400))

    async def storm() -> None:
        for start in range(0, 200, 50):
            await asyncio.gather(*(leave(number) for number in range(start, start + 50)))
        await until_idle(url)
        status, content = await ask(url, "/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 3, "ignore_eos": True})
        assert status == 200 and json.loads(content)["usage"]["completion_tokens"] == 3

    asyncio.run(storm())


def test_10_000_requests_leave_memory_flat(server: tuple[Process, str]) -> None:
    process, url = server
    family = [psutil.Process(process.child.pid), *psutil.Process(process.child.pid).children(recursive=True)]

    def memory() -> int:
        return sum(one.memory_info().rss for one in family)

    async def client(count: int, number: int) -> None:
        async with connection(url) as (reader, writer):
            for turn in range(count):
                prompt = [(number * 7 + turn) % 250 + 1, turn % 250 + 1]
                writer.write(request("/v1/completions", {"prompt": prompt, "max_tokens": 1, "logprobs": 1}))
                status, _ = await answer(reader)
                assert status == 200

    async def many(count: int) -> None:
        await asyncio.gather(*(client(count // 50, number) for number in range(50)))

    asyncio.run(many(2000))  # caches of the interpreter and the allocator's fill
    before = memory()
    asyncio.run(many(10_000))
    # A leak of 1 KiB a request would show as 10 MiB; the allocator's noise is a few.
    assert memory() - before < 8 << 20


def test_500_small_requests_a_second(server: tuple[Process, str]) -> None:
    """The interface's own cost, by its processor time so that the machine's other work does not count."""
    process, url = server
    own = psutil.Process(process.child.pid)

    async def client(count: int) -> None:
        async with connection(url) as (reader, writer):
            for _ in range(count):
                writer.write(request("/tokenize", {"prompt": "def read(path):"}))
                status, content = await answer(reader)
                assert status == 200 and json.loads(content)["count"] > 0

    async def many(count: int) -> None:
        await asyncio.gather(*(client(count // 20) for _ in range(20)))

    asyncio.run(many(200))
    before = sum(own.cpu_times()[:2])
    asyncio.run(many(2000))
    seconds = sum(own.cpu_times()[:2]) - before
    assert seconds < 4.0, f"{2000 / seconds:.0f} requests for each second of one core"


def test_a_frozen_engine_is_not_healthy_and_a_killed_one_ends_the_server(tiny_folder: Path) -> None:
    with serving(str(tiny_folder), "--port", "0", "--served-model-name", "tiny") as (process, url):
        (child,) = [
            one for one in psutil.Process(process.child.pid).children() if "engine_process" in " ".join(one.cmdline())
        ]

        async def freeze_and_kill() -> None:
            assert (await ask(url, "/health"))[0] == 200
            os.kill(child.pid, signal.SIGSTOP)
            for _ in range(3000):
                status, content = await ask(url, "/health")
                if status == 503:
                    break
                await asyncio.sleep(0.01)
            assert status == 503 and str(child.pid) in content.decode()
            async with connection(url) as (reader, writer):
                writer.write(request("/v1/completions", {"prompt": "a", "max_tokens": 5, "stream": True}))
                await writer.drain()
                assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
                os.kill(child.pid, signal.SIGKILL)
                rest = await reader.read()
            assert b"SIGKILL" in rest and b"[DONE]" in rest, "running requests get an error, never silence"

        asyncio.run(freeze_and_kill())
        code, err = process.end()
        assert code == 1 and f"engine process 0 (pid {child.pid}): was killed by SIGKILL" in err
        assert "Traceback" not in err
