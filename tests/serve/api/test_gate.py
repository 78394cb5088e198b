"""What stands before the routes: ids, keys, origins, the size of bodies, TLS."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.serve.serving import Served
from treadle.config import UserError
from treadle.serve.api.app import create_app
from treadle.serve.api.server import address_of, check_certificate, open_socket, run_server

BODY = {"prompt": "x", "max_tokens": 1}


def test_requests_have_names_of_their_own(scripted: Callable[..., Served]) -> None:
    server = scripted("x")
    named = server.http.post("/v1/completions", json=BODY, headers={"X-Request-Id": "job-7"})
    assert named.headers["x-request-id"] == "job-7"
    assert server.http.get("/v1/nothing", headers={"X-Request-Id": "job-8"}).headers["x-request-id"] == "job-8"
    made = {server.http.get("/v1/models").headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3
    for wrong in ("a b", "x" * 200, "é"):
        answer = server.http.get("/v1/models", headers={"X-Request-Id": wrong.encode()})  # pyrefly: ignore
        assert answer.headers["x-request-id"] != wrong and answer.status_code == 200
    bodies = [server.http.post("/v1/completions", json=BODY, headers={"X-Request-Id": "a"}).json() for _ in range(2)]
    assert bodies[0]["id"] != bodies[1]["id"]


def test_a_name_that_is_in_use_is_made_unique(scripted: Callable[..., Served]) -> None:
    server = scripted("x")
    app = server.uvicorn.config.app
    assert isinstance(app, FastAPI)
    transport = httpx.ASGITransport(app)
    entered, go_on = threading.Event(), threading.Event()

    @app.get("/wait")
    async def wait() -> str:
        entered.set()
        await asyncio.to_thread(go_on.wait)
        return ""

    async def both() -> list[str]:
        async with httpx.AsyncClient(transport=transport, base_url="http://x", timeout=30) as client:
            first = asyncio.create_task(client.get("/wait", headers={"X-Request-Id": "same"}))
            await asyncio.to_thread(entered.wait)
            second = await client.get("/v1/models", headers={"X-Request-Id": "same"})
            go_on.set()
            return [(await first).headers["x-request-id"], second.headers["x-request-id"]]

    first, second = asyncio.run(both())
    assert first == "same" and second.startswith("same-") and second != "same"


def test_keys(scripted: Callable[..., Served]) -> None:
    server = scripted("x", api_key="s3cret")
    for headers, status in (
        ({}, 401),
        ({"Authorization": "Bearer s3cret"}, 200),
        ({"authorization": "bearer  s3cret"}, 200),
        ({"x-api-key": "s3cret"}, 200),
        ({"x-api-key": "s3cre"}, 401),
        ({"Authorization": "Basic s3cret"}, 401),
        ({"Authorization": "Bearer wrong", "x-api-key": "s3cret"}, 401),
    ):
        assert server.http.get("/v1/models", headers=headers).status_code == status, headers
    assert server.http.get("/health").status_code == 200


def test_pages_of_other_origins_are_let_in_by_name_only(scripted: Callable[..., Served]) -> None:
    ask = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST",
           "Access-Control-Request-Headers": "authorization,content-type"}  # fmt: skip
    closed = scripted("x")
    answer = closed.http.get("/v1/models", headers={"Origin": "https://app.example"})
    assert "access-control-allow-origin" not in answer.headers
    assert closed.http.options("/v1/completions", headers=ask).status_code == 405
    server = scripted("x", api_key="k", allowed_origins=("https://app.example",))
    allowed = server.http.options("/v1/completions", headers=ask)
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == "https://app.example"
    other = server.http.options("/v1/completions", headers={**ask, "Origin": "https://evil.example"})
    assert other.status_code == 400 and "access-control-allow-origin" not in other.headers
    refused = server.http.get("/v1/models", headers={"Origin": "https://app.example"})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://app.example"


@pytest.mark.parametrize("declared", [True, False])
def test_a_large_body_is_refused_unread(scripted: Callable[..., Served], declared: bool) -> None:
    server = scripted("x")
    body = b'{"prompt": "' + b"x" * 10_000_000 + b'"}'
    sent = 0

    def pieces() -> Any:
        nonlocal sent
        for start in range(0, len(body), 1 << 16):
            sent = start
            yield body[start : start + (1 << 16)]

    headers = {"Content-Type": "application/json"} | ({"Content-Length": str(len(body))} if declared else {})
    answer = server.http.post("/v1/completions", content=pieces(), headers=headers)
    assert answer.status_code == 413 and answer.json()["error"]["type"] == "invalid_request_error"
    assert str(8 << 20) in answer.json()["error"]["message"]
    if declared:
        assert sent < len(body) // 2, "it was refused before it was read"
    assert server.http.post("/v1/completions", json=BODY).status_code == 200
    small = scripted("x", max_body_bytes=1024)
    assert small.http.post("/v1/messages", json={"x": "y" * 2000}).json()["error"]["type"] == "request_too_large"


def test_half_characters_are_named(scripted: Callable[..., Served]) -> None:
    server = scripted("x")
    for content in (
        b'{"prompt": "a\\ud800b"}',
        b'{"prompt": "\\udc00"}',
        b'{"prompt": "\\ud83d\\ud83d"}',
        b'{"\\ud800": 1}',
    ):
        answer = server.http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400 and "lone surrogate" in answer.json()["error"]["message"]
    whole = b'{"prompt": "\\ud83d\\ude00", "max_tokens": 1}'
    answer = server.http.post("/v1/completions", content=whole, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200


def test_methods_and_paths_in_openais_shape(scripted: Callable[..., Served]) -> None:
    server = scripted("x")
    for answer, status in (
        (server.http.get("/v1/chat/completions"), 405),
        (server.http.get("/nowhere"), 404),
        (server.http.post("/v1/completions", content=b"{}"), 415),
        (server.http.post("/v1/completions", content=b"{", headers={"Content-Type": "application/json"}), 400),
    ):
        assert answer.status_code == status and set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_silent_stream_is_kept_alive(scripted: Callable[..., Served], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.serve.api.streams.SECONDS_OF_SILENCE", 0.01)
    server = scripted()  # says nothing at all, for ever
    with server.http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
        assert next(answer.iter_lines()).startswith(":")
    messages = [{"role": "user", "content": "x"}]
    body = {"messages": messages, "max_tokens": 5, "stream": True}
    with server.http.stream("POST", "/v1/messages", json=body) as answer:
        lines = [line for line, _ in zip(answer.iter_lines(), range(5), strict=False)]
    assert lines[0] == "event: message_start" and lines[3] == "event: ping"


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    pair = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1", "-out", str(pair[0]), "-keyout", str(pair[1])],
        check=True, capture_output=True,
    )  # fmt: skip
    return pair


def test_https(scripted: Callable[..., Served], certificate: tuple[Path, Path], capsys: Any) -> None:
    engine = scripted("x").engine
    opened = open_socket("127.0.0.1", 0)
    url = address_of(opened, tls=True)
    assert url.startswith("https://127.0.0.1:")
    context = ssl.create_default_context(cafile=str(certificate[0]))
    found: list[Any] = []

    def ask() -> None:
        try:
            with httpx.Client(verify=context, timeout=30) as client:
                found.append(client.post(url + "/v1/completions", json=BODY).json()["choices"][0]["text"])
        finally:
            import signal

            signal.raise_signal(signal.SIGTERM)

    asker = threading.Thread(target=ask)
    asker.start()
    run_server(create_app(engine, ["tiny"]), engine, opened, [], 1.0, *map(str, certificate))
    asker.join()
    assert found == ["x"]


def test_certificates_that_cannot_be_used(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    check_certificate(None, None)
    check_certificate(str(certificate[0]), str(certificate[1]))
    (tmp_path / "not.pem").write_text("nothing")
    for pair, words in (
        ((str(tmp_path / "none.pem"), None), "is not a file"),
        ((str(tmp_path / "not.pem"), None), "cannot be used"),
        ((str(certificate[0]), None), "cannot be used"),
        ((str(certificate[0]), str(tmp_path / "not.pem")), "cannot be used"),
    ):
        with pytest.raises(UserError, match=words):
            check_certificate(*pair)


def test_settings_that_are_wrong(scripted: Callable[..., Served]) -> None:
    engine = scripted("x").engine
    for options, words in (
        ({"tool_call_parser": "herms"}, "did you mean 'hermes'"),
        ({"reasoning_parser": "x"}, "there are auto, none"),
        ({"max_body_byte": 5}, "did you mean 'max_body_bytes'"),
    ):
        with pytest.raises(UserError, match=words):
            create_app(engine, ["tiny"], **options)  # pyrefly: ignore
    assert create_app(engine, ["tiny"], max_body_bytes=2048).state.max_body_bytes == 2048
