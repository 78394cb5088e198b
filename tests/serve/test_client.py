"""Engines in processes of their own: the same answers, and what happens when one hangs or dies."""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Generator
from pathlib import Path

import psutil
import pytest

from treadle.config import TreadleError, UserError
from treadle.serve.client import SILENCE, EngineClient, EngineOptions
from treadle.serve.engine import Engine
from treadle.serve.model import Model
from treadle.serve.request import Delta, FinishReason, SamplingSettings

SETTINGS = {"max_num_seqs": 4, "max_model_len": 128, "seed": 1}


def start(folder: Path, **options: object) -> EngineClient:
    chosen = EngineOptions(str(folder), "float32", "cpu", SETTINGS, **options)  # pyrefly: ignore[bad-argument-type]
    return EngineClient(chosen)


@pytest.fixture(scope="module")
def client(tiny_folder: Path) -> Generator[EngineClient]:
    with start(tiny_folder) as client:
        yield client


def test_answers_are_those_of_an_engine_in_this_process(client: EngineClient, model: Model) -> None:
    prompts = ["def read(", "the quick", [1, 2, 3]]
    several = {"seed": 5, "logprobs": 2, "prompt_logprobs": 1, "n": 2}
    for sampling in ({"temperature": 0}, several, {"stop": "e", "seed": 3}):
        with Engine(model, **SETTINGS) as engine:
            expected = engine.generate(prompts, max_tokens=9, **sampling)
        got = client.generate(prompts, max_tokens=9, **sampling)
        for one, other in zip(got, expected, strict=True):
            same = ("text", "tokens", "finish_reason", "stop_reason", "prompt_tokens")
            assert all(getattr(one, name) == getattr(other, name) for name in same)
            # What shares a step may differ, and with it the order of fp32 sums.
            for a, b in zip(one.logprobs, other.logprobs, strict=True):
                assert a.token == b.token and a.logprob == pytest.approx(b.logprob, abs=1e-4)
            assert len(one.prompt_logprobs) == len(other.prompt_logprobs)
    assert client.stats.generated_tokens > 0 and client.capacity.length == 128


def test_what_cannot_be_carried_out_is_refused_here(client: EngineClient) -> None:
    with pytest.raises(UserError, match="max_tokens=200"):
        client.generate(["a"], max_tokens=200)
    with pytest.raises(UserError, match="no command 'dance'"):
        client.command("dance")
    assert client.command("forget_prefixes") == {"forgotten": True}


def test_cancelling_reaches_the_process(client: EngineClient) -> None:
    deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
    ticket = client.submit("a", SamplingSettings(ignore_eos=True, max_tokens=100), deltas.put)
    deltas.get(timeout=30)
    ticket.cancel()
    reasons = iter(lambda: deltas.get(timeout=30).finish_reason, "never")
    assert next(reason for reason in reasons if reason) in (FinishReason.CANCELLED, FinishReason.LENGTH)
    assert client.generate(["a"], max_tokens=1)[0].tokens


def test_a_killed_process_is_named_and_nobody_waits(tiny_folder: Path) -> None:
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    options = EngineOptions(str(tiny_folder), "float32", "cpu", {**SETTINGS, "max_model_len": 128})
    client = EngineClient(options, told.put)
    deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
    (pid,) = client.pids
    os.kill(pid, signal.SIGSTOP)  # so that the requests are surely at hand
    for _ in range(6):
        client.submit("a", SamplingSettings(ignore_eos=True), deltas.put)
    os.kill(pid, signal.SIGKILL)
    why = told.get(timeout=30)
    assert f"engine process 0 (pid {pid}): was killed by SIGKILL" in why
    assert [deltas.get(timeout=30).error for _ in range(6)] == [why] * 6
    assert client.failure == why == client.unhealthy
    with pytest.raises(TreadleError, match="SIGKILL"):
        client.generate(["a"])
    client.close()


def test_a_frozen_process_is_unhealthy_until_it_goes_on(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.serve.client.PING_EVERY", 0.01)
    monkeypatch.setattr("treadle.serve.client.SILENCE", SILENCE / 20)
    with start(tiny_folder) as client:
        (pid,) = client.pids
        assert client.unhealthy == ""
        os.kill(pid, signal.SIGSTOP)
        assert _until(lambda: f"(pid {pid}) has not answered" in client.unhealthy)
        os.kill(pid, signal.SIGCONT)
        assert _until(lambda: client.unhealthy == "")
        assert client.generate(["a"], max_tokens=1)[0].tokens


def test_two_replicas_answer_alike_and_keep_to_their_prefixes(tiny_folder: Path) -> None:
    prompt = list(range(100, 180))
    with start(tiny_folder, replicas=2) as client:
        first = client.generate([prompt], max_tokens=5, temperature=0)
        for _ in range(3):
            client.generate([[7] * 70], max_tokens=5, temperature=0)
            again = client.generate([prompt], max_tokens=5, temperature=0)
            assert again[0].tokens == first[0].tokens and again[0].cached_tokens == 64
        assert sum(psutil.Process(pid).is_running() for pid in client.pids) == 2


def test_a_model_that_cannot_be_loaded_is_refused_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="missing"):
        EngineClient(EngineOptions(str(tmp_path / "missing")))


def test_no_process_is_left(tiny_folder: Path) -> None:
    with start(tiny_folder) as client:
        pids = client.pids
    assert not any(psutil.pid_exists(pid) for pid in pids)


def _until(condition, seconds: float = 30.0) -> bool:
    """Wait for a condition that another process brings about."""
    import threading
    import time

    deadline, pause = time.monotonic() + seconds, threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            return False
        pause.wait(0.01)
    return True
