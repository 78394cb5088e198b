"""`treadle serve` as a process: start, summary, ports, signals."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.serve.running import serving
from treadle.cli import main
from treadle.serve.launch import default_name

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def stream(url: str, **body: Any) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """Open a stream of completions and return it once its first event has come."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)
    content = json.dumps({"prompt": "x", "stream": True, "ignore_eos": True, **body})
    connection.request("POST", "/v1/completions", content, {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200 and response.readline().startswith(b"data: ")
    return connection, response


def test_it_says_what_it_runs_serves_and_ends_well(tiny_model: Path) -> None:
    words = ("--port", "0", "--max-num-seqs", "3", "--max_model_len=100", "--served-model-name", "a")
    with serving(str(tiny_model), *words, "--served-model-name", "b", "--api-key", "k") as (process, url):
        summary = "".join(process.lines)
        for fact in (
            "llama",
            "float32 on cpu",
            "100 tokens (the model's: 128)",
            "336 tokens in blocks of 16, up to 3 sequences",
            "kernels",
        ):
            assert fact in summary
        client = openai.OpenAI(base_url=url + "/v1", api_key="k", max_retries=0)
        assert [model.id for model in client.models.list()] == ["a", "b"]
        assert client.completions.create(model="b", prompt="x", max_tokens=3).usage.prompt_tokens
        # A request at hand when the end is asked for is answered to its end.
        with client.completions.create(
            model="a", prompt="x", max_tokens=90, stream=True, extra_body={"ignore_eos": True}
        ) as chunks:
            next(iter(chunks))
            process.child.send_signal(signal.SIGTERM)
            assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
        assert process.end()[0] == 0
        assert process.lines[-1] == "Stopped.\n"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(url.removeprefix("http://").split(":"), timeout=5)  # pyrefly: ignore


@pytest.mark.parametrize("ask", [signal.SIGTERM, signal.SIGINT])
def test_patience_has_an_end(tiny_model: Path, ask: signal.Signals, tmp_path: Path) -> None:
    """A client that reads nothing holds up its answer for ever; the server still ends, with exit code 0."""
    with serving(str(tiny_model), "--port", "0", "--shutdown-timeout", "1") as (process, url):
        host, port = url.removeprefix("http://").split(":")
        stuck = socket.socket()
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        stuck.connect((host, int(port)))
        content = json.dumps({"prompt": "x", "stream": True, "ignore_eos": True, "n": 128, "logprobs": 20}).encode()
        stuck.sendall(HEAD + f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
        assert stuck.recv(12) == b"HTTP/1.1 200"
        process.child.send_signal(ask)
        code, err = process.end()
        assert code == 0 and err.count("\n") == 1, "no traceback"
        stuck.close()


def test_requests_that_do_not_finish_in_time_are_told(tiny_model: Path) -> None:
    with serving(str(tiny_model), "--port", "0", "--shutdown-timeout", "0", "--max-num-seqs", "1") as (process, url):
        connection, response = stream(url, n=128, max_tokens=100)
        process.child.send_signal(signal.SIGTERM)
        events = response.read().decode().strip().split("\n\n")
        assert "closed" in json.loads(events[-2].removeprefix("data: "))["error"]["message"]
        assert events[-1] == "data: [DONE]"
        code, err = process.end()
        assert code == 0 and err.count("\n") == 1, "no traceback"
        connection.close()


def test_asked_twice_it_waits_for_nothing(tiny_model: Path) -> None:
    with serving(str(tiny_model), "--port", "0", "--shutdown-timeout", "1000", "--max-num-seqs", "1") as (process, url):
        host, port = url.removeprefix("http://").split(":")
        idle = socket.create_connection((host, int(port)))
        idle.sendall(HEAD + b"Content-Length: 9\r\n\r\n{")  # a body that never comes
        connection, _ = stream(url, max_tokens=5)  # once this is answered, the request before it is being read
        process.child.send_signal(signal.SIGINT)
        assert process.child.stderr is not None and "Stopping" in process.child.stderr.readline()
        process.child.send_signal(signal.SIGINT)
        code, err = process.end()
        assert code == 0 and err == ""
        connection.close()
        idle.close()


def test_a_port_in_use_is_said_before_the_model_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as end:
            main(["serve", str(tmp_path / "not even there"), "--port", str(port)])
    err = capsys.readouterr().err
    assert end.value.code == 2 and f"port {port} of 127.0.0.1 is in use" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--port", "70000"), "between 0 and 65535"),
        (("--port", "0", "--host", "not.a.host.invalid"), "not.a.host.invalid"),
        (("--port", "0", "--host", "192.0.2.1"), "not an address of this machine"),
        (("--port", "0", "--max-model-len", "129"), "context of 128 tokens, it is 129"),
        (("--port", "0", "--max-num-seqs", "0"), "'max_num_seqs' is 0"),
        (("--port", "0", "--served-model-name", ""), "served_model_name is empty"),
        (("--port", "0", "--dtype", "int8"), "int8"),
    ],
)
def test_mistakes_are_one_sentence(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["serve", str(tiny_model), *words])
    shown = capsys.readouterr()
    assert end.value.code == 2 and message in shown.err and "Serving" not in shown.out


def test_a_wrong_model_path_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["serve", str(tmp_path / "nothing"), "--port", "0"])
    err = capsys.readouterr().err
    assert end.value.code == 2 and str(tmp_path / "nothing") in err and err.count("\n") == 1


def test_an_open_server_without_key_is_warned_about(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treadle.serve.api.server.run_server", lambda *_: None)
    before = threading.active_count()
    for words, warned in ((("--host", "0.0.0.0"), True), (("--host", "0.0.0.0", "--api-key", "k"), False), ((), False)):
        with pytest.raises(SystemExit) as end:
            main(["serve", str(tiny_model), "--port", "0", *words])
        assert end.value.code == 0 and ("warning:" in capsys.readouterr().err) == warned
    assert threading.active_count() <= before, "the engine is closed"


def test_names_come_from_the_path() -> None:
    assert default_name("models/SmolLM2.Q4_1.gguf") == "SmolLM2.Q4_1"
    assert default_name("models/Llama-3.2-1B/") == "Llama-3.2-1B"
    assert default_name(".") == Path.cwd().name
