"""The load generator: what it reads from the wire, when it asks, what it counts, against a real server and by hand."""

from __future__ import annotations

import argparse
import asyncio
import http.client
import io
import json
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import serve_load
from hypothesis import given, settings
from hypothesis import strategies as st
from serving.client import Answer, Client, EventReader, HttpError, run_load
from serving.report import percentiles, picture, ratios, summarize
from serving.servers import Limits, Server
from serving.shapes import Ask, Lengths, Load, arrivals, asks, read_workload

from tests.serve.serving import Served
from treadle.serve.engine import Engine


def stream(events: list[str], chunked: bool, sizes: list[int]) -> bytes:
    """An answer of server-sent events, in chunks of these sizes or of known length."""
    body = b"".join(f"data: {event}\n\n".encode() for event in events) + b": a comment\n\n"
    if not chunked:
        return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    parts, rest = [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"], body
    for size in sizes:
        piece, rest = rest[:size], rest[size:]
        parts += [b"%x\r\n" % len(piece), piece, b"\r\n"] if piece else []
    parts += [b"%x;x=1\r\n" % len(rest), rest, b"\r\n"] if rest else []
    return b"".join([*parts, b"0\r\n\r\n"])


class FakeSocket:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def makefile(self, *_: object) -> io.BytesIO:
        return io.BytesIO(self.data)


@settings(max_examples=150, deadline=None)
@given(
    events=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=12).map(str.strip)),
    chunked=st.booleans(),
    sizes=st.lists(st.integers(1, 20), max_size=20),
    cuts=st.lists(st.integers(1, 30), max_size=60),
)
def test_events_are_the_same_however_the_bytes_arrive(
    events: list[str], chunked: bool, sizes: list[int], cuts: list[int]
) -> None:
    """Python's own HTTP client is the reference for what the body is."""
    raw = stream(events, chunked, sizes)
    response = http.client.HTTPResponse(FakeSocket(raw))  # pyrefly: ignore[bad-argument-type]
    response.begin()
    lines = response.read().decode().split("\n")
    expected = [line.removeprefix("data:").strip() for line in lines if line.startswith("data:")]
    reader, found = EventReader(), []
    for size in [*cuts, len(raw)]:
        piece, raw = raw[:size], raw[size:]
        found += reader.feed(piece)
    assert found == expected and reader.finished


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 9\r\n\r\n{no good}", "HTTP 400: {no good}"),
        (b"HTTP/1.1 500 Oh\r\n\r\nfell over", "HTTP 500: fell over"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\ndata", "closed within"),
        (b"", "closed within"),
        (b"SSH-2.0-x\r\n\r\n", "does not look like HTTP"),
    ],
)
def test_what_is_no_stream_is_an_error(raw: bytes, says: str) -> None:
    reader = EventReader()
    with pytest.raises(HttpError, match=says):
        reader.feed(raw)
        reader.close()


def test_a_server_is_measured(engine_of: Callable[..., Engine]) -> None:
    """Every answer has its tokens, its times in their order; what is refused counts as an error."""
    served = Served(engine_of(max_num_seqs=3, max_model_len=64), ["tiny"])
    try:
        client = Client(served.url + "/v1", "tiny")
        wanted = [Ask("def read", 1 + place % 5) for place in range(9)] + [Ask("def read", 1000)]
        answers, seconds = asyncio.run(run_load(client, Load(clients=4), wanted, [0.0] * len(wanted)))
        good = [answer for answer in answers if not answer.error]
        assert sorted(answer.tokens for answer in good) == sorted(ask.answer_tokens for ask in wanted[:-1])
        for answer in good:
            assert answer.prompt_tokens > 0 and answer.pieces == sorted(answer.pieces)
            assert answer.due <= answer.sent <= answer.pieces[0] <= answer.pieces[-1] <= answer.ended <= seconds
        (refused,) = (answer for answer in answers if answer.error)
        assert "HTTP 400" in refused.error and "max_tokens=1000" in refused.error
        figures = summarize(answers, seconds)
        assert figures["requests"] == 10 and sum(figures["errors"].values()) == 1
        assert figures["output_tokens_per_second"] == pytest.approx(sum(a.tokens for a in good) / seconds, abs=0.01)
        chat = Client(served.url, "tiny", chat=True)
        answers, _ = asyncio.run(run_load(chat, Load(rate=200.0), wanted[:3], [0.0, 0.01, 0.02]))
        assert {answer.error[:8] for answer in answers} <= {"", "HTTP 400"}  # this tokenizer has no chat template
        gone = Client("http://127.0.0.1:1", "tiny")
        answers, _ = asyncio.run(run_load(gone, Load(clients=1), wanted[:1], [0.0]))
        assert answers[0].error and summarize(answers, 1.0)["gap_ms"] == {}
    finally:
        served.close()


def test_a_closed_loop_keeps_its_clients_busy_and_an_open_one_does_not_wait() -> None:
    """A server that answers only once it is told to: how many ask at the same time shows which loop it is."""

    async def most_at_once(load: Load, count: int, hold_until: int) -> int:
        active = most = 0
        enough = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal active, most
            await reader.readuntil(b"\r\n\r\n")
            active += 1
            most = max(most, active)
            if active >= hold_until:
                enough.set()
            await enough.wait()
            active -= 1
            text = json.dumps({"choices": [{"text": "x"}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}})
            writer.write(stream([text, "[DONE]"], True, [7]))
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = Client(f"http://127.0.0.1:{port}", "m")
        answers, _ = await run_load(client, load, [Ask("a", 1)] * count, [0.0] * count)
        server.close()
        assert [answer.tokens for answer in answers] == [1] * count
        return most

    assert asyncio.run(most_at_once(Load(clients=3), 9, 3)) == 3
    assert asyncio.run(most_at_once(Load(rate=1.0), 9, 9)) == 9


def test_arrivals_are_a_poisson_process() -> None:
    """Gaps are exponential: their mean and deviation are 1 / rate, to three standard errors."""
    times = arrivals(Load(rate=4.0), 4000, "seed")
    gaps = np.diff([0.0, *times])
    assert np.mean(gaps) == pytest.approx(0.25, abs=3 * 0.25 / math.sqrt(4000))
    assert np.std(gaps) == pytest.approx(0.25, abs=3 * 0.25 * math.sqrt(2 / 4000))
    assert arrivals(Load(rate=4.0), 10, "seed") == times[:10] != arrivals(Load(rate=4.0), 10, "other")


def test_lengths_follow_their_distribution() -> None:
    dice = random.Random(0)
    drawn = [Lengths.parse("lognormal:200,0.8,1000").draw(dice) for _ in range(4000)]
    assert np.median(drawn) == pytest.approx(200, rel=0.06) and max(drawn) == 1000
    assert np.log(drawn).std() == pytest.approx(0.8, rel=0.1)
    assert {Lengths.parse("uniform:3,5").draw(dice) for _ in range(99)} == {3, 4, 5}
    assert Lengths.parse("fixed:7").draw(dice) == 7 and str(Lengths.parse("fixed:7")) == "fixed:7"
    for wrong in ("fixed", "fixed:a", "fixed:1,2", "uniform:5,3", "gamma:1", "fixed:-1", "fixed:nan", "lognormal:1"):
        with pytest.raises(argparse.ArgumentTypeError):
            Lengths.parse(wrong)


def test_every_server_is_asked_for_the_same_and_no_prompt_begins_like_another() -> None:
    shape = Lengths.parse("uniform:3,40")
    first, again = asks(shape, shape, "0"), asks(shape, shape, "0")
    taken = [next(first) for _ in range(200)]
    assert taken == [next(again) for _ in range(200)]
    assert len({ask.prompt.split()[0] for ask in taken}) == 200
    assert all(3 <= len(ask.prompt.split()) <= 40 and 3 <= ask.answer_tokens <= 40 for ask in taken)


def test_a_workload_is_read_from_the_peers_file(tmp_path: Path) -> None:
    file = tmp_path / "workloads.py"
    file.write_text("WORKLOADS = {'decode-4': (4, 128, 32)}\n")
    load, prompt, answer = read_workload(file, "decode-4")
    assert (load.clients, str(prompt), str(answer)) == (4, "fixed:128", "fixed:32")
    with pytest.raises(SystemExit, match="it has decode-4"):
        read_workload(file, "decode-5")


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200))
def test_percentiles_are_numpys(values: list[float]) -> None:
    found = percentiles(values)
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        assert found[name] == pytest.approx(np.quantile(values, share, method="inverted_cdf"), abs=1e-3)


def test_first_tokens_count_from_when_the_request_was_due() -> None:
    """A generator that sends late must not make the server look better."""
    answer = Answer(due=1.0, sent=3.0, ended=9.0, pieces=[4.0, 5.0, 7.0], tokens=3)
    figures = summarize([answer], 10.0)
    assert figures["first_token_ms"]["p50"] == 3000 and figures["request_ms"]["p50"] == 8000
    assert figures["gap_ms"]["max"] == 2000 and figures["per_token_ms"]["p50"] == 1500
    assert figures["late_ms"]["p50"] == 2000


def point(server: str, load: str, tokens: float, gap: float) -> dict[str, Any]:
    latency = {"p50": gap, "p99": 3 * gap}
    return {
        "server": server,
        "load": load,
        "level": float(load),
        "output_tokens_per_second": tokens,
        "first_token_ms": latency,
        "gap_ms": latency,
        "request_ms": latency,
    }


def test_ratios_are_of_the_medians_over_the_rounds() -> None:
    points = [point("a", "1", 30, 5), point("a", "1", 90, 7), point("a", "1", 40, 6), point("b", "1", 20, 12)]
    points += [point("a", "2", 50, 9)]
    (found,) = ratios(points, "a", "b")
    assert (found["load"], found["tokens"], found["p99_gap"]) == ("1", 2.0, 0.5)
    drawing = picture(points, "a < b", "clients")
    assert "a &lt; b" in drawing and drawing.count("<polyline") == 12 and "nan" not in drawing


def test_servers_are_started_with_the_same_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limits = Limits(8, 1024, 2)
    ours = Server.parse(r"treadle:bounded=m.gguf --batch {\"max_latency_ms\":300}")
    command = ours.command(8001, limits, tmp_path)
    assert ours.label == "bounded" and command[-2:] == ["--batch", '{"max_latency_ms":300}']
    flags = "-m treadle serve m.gguf --port 8001 --max-num-seqs 8 --max-model-len 1024 --batch"
    assert command[1:-1] == flags.split()
    with pytest.raises(SystemExit, match=r"setup llama\.cpp"):
        monkeypatch.setattr("serving.servers.PEERS_HOME", tmp_path)
        Server.parse("llama.cpp=m.gguf").command(8001, limits, tmp_path)
    for name in ("llama.cpp/bin/llama-server", "vllm/bin/python"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    peer = " ".join(Server.parse("llama.cpp=m.gguf").command(8001, limits, tmp_path))
    assert peer.endswith("llama-server -m m.gguf --port 8001 -t 2 -np 8 -c 8192")
    other = " ".join(Server.parse(f"vllm={tmp_path}").command(8001, limits, tmp_path))
    assert "-m vllm.entrypoints.openai.api_server --model" in other
    assert other.endswith("--port 8001 --dtype bfloat16 --max-num-seqs 8 --max-model-len 1024")
    for wrong in ("sglang=m", "treadle=", "treadle"):
        with pytest.raises(SystemExit, match="is not KIND"):
            Server.parse(wrong)


def test_the_whole_script(
    engine_of: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    served = Served(engine_of(max_num_seqs=3, max_model_len=64), ["tiny"])
    try:
        words = (
            f"serve_load.py {served.url} url:again={served.url} --clients 1 3 --requests 6 --rounds 2 --prompt fixed:5"
        )
        words += f" --answer fixed:4 --warmup 1 --out {tmp_path}"
        monkeypatch.setattr(sys, "argv", words.split())
        serve_load.main()
    finally:
        served.close()
    assert "x the tokens/s of again at 3 clients" in capsys.readouterr().out
    (file,) = tmp_path.glob("*.json")
    result = json.loads(file.read_text())
    assert [one["load"] for one in result["ratios"]] == ["1 clients", "3 clients"]
    assert len(result["points"]) == 2 * 2 * 2 and all(not one["errors"] for one in result["points"])
    servers = [one["server"] for one in result["points"]]
    assert servers[:4] == [served.url, "again"] * 2 and servers[4:] == ["again", served.url] * 2, "in turn"
    assert "<svg" in file.with_suffix(".svg").read_text()
