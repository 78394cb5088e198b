"""/metrics, read with Prometheus's own parser, and /health."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Generator
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.serving import Served
from treadle.serve.api.metrics import ServerMetrics
from treadle.serve.engine import Engine
from treadle.serve.model import Model
from treadle.serve.request import Delta, FinishReason
from treadle.serve.stats import Distribution, EngineStats

SLOTS = 4


@pytest.fixture
def server(model: Model) -> Generator[Served]:
    started = Served(Engine(model, max_num_seqs=SLOTS, max_model_len=256))
    yield started
    started.close()


def families(server: Served) -> dict[str, Metric]:
    answer = server.http.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = list(text_string_to_metric_families(answer.text))
    assert len({family.name for family in found}) == len(found)
    return {family.name: family for family in found}


def values(server: Served) -> dict[str, float]:
    """Return each sample by its name and what tells it from others of the name."""
    found: dict[str, float] = {}
    for family in families(server).values():
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key not in ("model_name", "engine")}
            name = "".join([sample.name, *labels.values()])
            assert name not in found
            found[name] = sample.value
    return found


def test_they_count_what_happened(server: Served) -> None:
    before = values(server)
    body: dict[str, Any] = {"prompt": list(range(1, 41)), "max_tokens": 7, "ignore_eos": True}
    for _ in range(2):
        assert server.http.post("/v1/completions", json=body).status_code == 200
    server.engine.call(lambda: None)  # between two steps: the last one has been counted
    after = values(server)
    grown = {name: after[name] - before[name] for name in before}
    expected = {
        "treadle_requests_total": 2,
        "treadle_prompt_tokens_total": 80,
        "treadle_generation_tokens_total": 14,
        "treadle_prefix_cache_queries_total": 80,
        "treadle_prefix_cache_hits_total": 32,  # two whole blocks of 16
        "treadle_request_success_totallength": 2,
        "treadle_request_success_totalstop": 0,
        "treadle_time_to_first_token_seconds_count": 2,
        "treadle_inter_token_latency_seconds_count": 12,
        "treadle_e2e_request_latency_seconds_count": 2,
        "treadle_request_queue_time_seconds_count": 2,
        "treadle_request_prompt_tokens_sum": 80,
        "treadle_request_generation_tokens_sum": 14,
        "treadle_steps_total": 14,
        "treadle_step_budgets_totalfree": 14,
        "treadle_step_budgets_totalbound": 0,
        "treadle_step_seconds_count": 14,
        "treadle_iteration_tokens_total_count": 14,
        "treadle_iteration_tokens_total_sum": 40 + 8 + 12,
        "treadle_iteration_tokens_total_bucket1.0": 12,
        "treadle_iteration_tokens_total_bucket8.0": 13,
        "treadle_iteration_tokens_total_bucket+Inf": 14,
        "treadle_step_sequences_sum": 14,
    }
    assert {name: grown[name] for name in expected} == expected
    assert after["treadle_http_responses_total/v1/completions200"] == 2
    assert after["treadle_kv_cache_tokens"] == SLOTS * 256
    assert after["treadle_num_requests_running"] == after["treadle_num_requests_waiting"] == 0
    assert after["treadle_kv_cache_usage_perc"] == 0 and after["treadle_engine_healthy"] == 1
    assert 0 < after["treadle_step_seconds_sum"] < 60
    waits = after["treadle_request_queue_time_seconds_sum"] + after["treadle_time_to_first_token_seconds_sum"]
    assert waits > 0 and after["treadle_e2e_request_latency_seconds_sum"] < 60


def test_series_do_not_grow_with_what_clients_send(server: Served) -> None:
    """A client must not be able to fill the memory of whoever collects the metrics."""
    server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
    server.http.get("/nothing")
    server.http.get("/metrics")
    before = set(values(server))
    for number in range(5):
        server.http.get(f"/nothing/{number}")
        extra = {"max_tokens": 1 + number, "seed": number, "cache_salt": f"{number}", "user": f"{number}"}
        assert server.http.post("/v1/completions", json={"prompt": "y" * number + "x", **extra}).status_code == 200
    assert set(values(server)) == before


def test_buckets_are_as_prometheus_wants_them(server: Served) -> None:
    server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3, "n": 2})
    found = families(server)
    for name, family in found.items():
        assert name.startswith("treadle_") and family.documentation.strip() and "_created" not in name
    histograms = [family for family in found.values() if family.type == "histogram"]
    assert len(histograms) == 9
    for family in histograms:
        buckets = [(float(sample.labels["le"]), sample.value) for sample in family.samples if "le" in sample.labels]
        assert buckets == sorted(buckets) and buckets[-1][0] == float("inf")
        assert [count for _, count in buckets] == sorted(count for _, count in buckets)
        (count,) = [sample.value for sample in family.samples if sample.name == f"{family.name}_count"]
        assert count == buckets[-1][1]


def test_each_replica_has_its_own_series(scripted: Callable[..., Served], monkeypatch: pytest.MonkeyPatch) -> None:
    server = scripted("x")
    both = [EngineStats(steps=3, running=1, blocks=8, blocks_held=2), EngineStats(steps=5, running=2, asleep=True)]
    monkeypatch.setattr(type(server.engine), "engine_stats", both)
    found = families(server)
    for name, expected in (
        ("treadle_steps", [3, 5]),
        ("treadle_num_requests_running", [1, 2]),
        ("treadle_kv_cache_usage_perc", [0.25, 0]),
        ("treadle_engine_asleep", [0, 1]),
    ):
        samples = found[name].samples
        assert [(one.labels["model_name"], one.labels["engine"]) for one in samples] == [("tiny", "0"), ("tiny", "1")]
        assert [one.value for one in samples] == expected
    reasons = {
        (one.labels["engine"], one.labels["finished_reason"]) for one in found["treadle_request_success"].samples
    }
    assert reasons == {(engine, reason.value) for engine in "01" for reason in FinishReason}


def test_distributions_add_up() -> None:
    one, other = Distribution((1, 10)), Distribution((1, 10))
    for value in (0.5, 1, 2, 11):
        one.add(value)
    other.add(10)
    assert one.counts == [2, 1, 1] and one.total == 14.5
    assert one.plus(other).counts == [2, 2, 1] and one.plus(other).total == 24.5


def test_health_says_why_the_engine_makes_no_steps(
    scripted: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = scripted("x")
    assert server.http.get("/health").json() == {"status": "ok"}
    monkeypatch.setattr(server.engine, "unhealthy", "engine process 0 (pid 1) has not answered for 9 s")
    answer = server.http.get("/health")
    assert answer.status_code == 503 and "not answered for 9 s" in answer.json()["reason"]
    assert values(server)["treadle_engine_healthy"] == 0


def test_times_are_counted_by_choice(scripted: Callable[..., Served]) -> None:
    metrics = ServerMetrics(scripted("x").engine, "m")
    clock = metrics.watch()
    for index, seconds in ((0, 0.5), (1, 2.0), (0, 0.75), (1, 2.0)):
        clock.see(Delta(index, tokens=(1,), queue_seconds=0.125), seconds)
    clock.see(Delta(0, finish_reason=FinishReason.STOP, prompt_tokens=9, completion_tokens=2), 3.0)
    clock.see(Delta(1, finish_reason=FinishReason.CANCELLED), 4.0)
    found = {name: metrics.registry.get_sample_value(f"treadle_{name}", {"model_name": "m"}) for name in (
        "time_to_first_token_seconds_sum", "inter_token_latency_seconds_sum", "inter_token_latency_seconds_count",
        "request_queue_time_seconds_sum", "e2e_request_latency_seconds_sum", "e2e_request_latency_seconds_count",
    )}  # fmt: skip
    assert list(found.values()) == [2.5, 0.25, 2, 0.25, 3.0, 1]


def test_a_client_that_reads_late_spoils_no_times(scripted: Callable[..., Served]) -> None:
    """They tell how the server does: what is here at once counts as that, whenever it is read."""
    server = scripted(*("x" * 50000 for _ in range(200)))  # more than sockets and buffers hold
    host, port = server.url.removeprefix("http://").split(":")
    body = b'{"prompt": "x", "stream": true, "max_tokens": 300}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.socket() as late:
        late.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        late.settimeout(30)
        late.connect((host, int(port)))
        late.sendall(head.encode() + b"\r\nConnection: close\r\n\r\n" + body)
        begun = time.monotonic()
        while time.monotonic() - begun < 0.5:  # others are served meanwhile
            server.http.get("/health")
        while late.recv(1 << 20):
            pass
    found = values(server)
    assert found["treadle_inter_token_latency_seconds_count"] == 199
    assert (
        found["treadle_inter_token_latency_seconds_sum"] < 0.4
        and found["treadle_e2e_request_latency_seconds_sum"] < 0.4
    )
