"""/state: what the page shows, from engines that have counted."""

from __future__ import annotations

from collections.abc import Callable, Generator

import pytest

from tests.serve.serving import Served
from treadle.serve.engine import Engine
from treadle.serve.model import Model
from treadle.serve.stats import EngineStats
from treadle.serve.summary import engine_summary


@pytest.fixture
def server(model: Model) -> Generator[Served]:
    engine = Engine(model, max_num_seqs=4, max_model_len=256)
    engine.summary = engine_summary(engine)
    started = Served(engine)
    yield started
    started.close()


def test_it_tells_what_is_served_and_what_happened(server: Served) -> None:
    body = {"prompt": list(range(1, 41)), "max_tokens": 5, "ignore_eos": True}
    for _ in range(2):
        assert server.http.post("/v1/completions", json=body).status_code == 200
    server.engine.call(lambda: None)
    answer = server.http.get("/state")
    assert answer.headers["cache-control"] == "no-store"
    state = answer.json()
    assert (state["status"], state["reason"], state["model"]) == ("ok", "", "tiny")
    assert state["names"] == ["tiny", "also-tiny"] and state["max_model_len"] == 256
    assert state["chats"] and state["takes_text"] and state["takes_system"]
    assert state["kv_cache"]["tokens"] == 4 * 256 and state["kv_cache"]["sequences"] == 4
    assert state["summary"]["dtype"].startswith("float32 on cpu") and "rms_norm" in state["summary"]["kernels"]
    assert state["summary"]["KV cache"].startswith("float32, 1024 tokens in blocks of 16")
    (engine,) = state["engines"]
    expected = {
        "running": 0, "waiting": 0, "generated_tokens": 10, "prompt_tokens": 80, "looked_up_tokens": 80,
        "cached_tokens": 32, "steps": 10, "finished": {"length": 2}, "kv_usage": 0, "last_step_tokens": 1,
        "last_step_seqs": 1, "stepped_tokens": 40 + 8 + 8, "stepped_sequences": 10, "preemptions": 0,
    }  # fmt: skip
    assert {name: engine[name] for name in expected} == expected
    assert "1 sequences" in engine["decision"] and 0 <= engine["seconds_since_step"] < 60


def test_it_tells_when_the_engine_sleeps_or_is_stuck(
    scripted: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = scripted("x")
    assert server.http.get("/state").json()["engines"][0]["seconds_since_step"] is None, "there was no step"
    both = [EngineStats(blocks=8, blocks_held=2), EngineStats(asleep=True)]
    monkeypatch.setattr(type(server.engine), "engine_stats", both)
    state = server.http.get("/state").json()
    assert state["status"] == "asleep" and [one["kv_usage"] for one in state["engines"]] == [0.25, 0]
    monkeypatch.setattr(server.engine, "unhealthy", "it hangs")
    state = server.http.get("/state").json()
    assert (state["status"], state["reason"]) == ("failed", "it hangs")
