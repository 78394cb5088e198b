"""The routes that change a running server: who may, what they do, what clients see of it."""

from __future__ import annotations

import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serve.serving import Served
from tests.serve.tiny import CONFIG, TEXT, TOKENS, build
from treadle.config import UserError
from treadle.model.families import read_spec
from treadle.model.lora import LoraSpec, adapters, attach_lora
from treadle.model.tokenizer import Tokenizer
from treadle.serve.api.admin import PATHS
from treadle.serve.api.app import create_app
from treadle.serve.engine import Engine
from treadle.serve.model import Model
from treadle.weights.adapter import save_adapter
from treadle.weights.identity import content_version

KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, tokenizer = tmp_path_factory.mktemp("weights"), Tokenizer.train([TEXT] * 4, TOKENS)
    for name, seed in (("one", 1), ("two", 2)):
        Model(build(read_spec(CONFIG), seed), tokenizer).save(root / name)
    trained = build(read_spec(CONFIG), 1)
    attach_lora(trained, LoraSpec(4, 8.0))
    for adapter in adapters(trained).values():
        adapter.b.data = torch.randn(adapter.b.shape, generator=torch.Generator().manual_seed(1)) * 0.3
    (root / "x").mkdir()
    save_adapter(root / "x", trained)
    return {name: root / name for name in ("one", "two", "x")}


@pytest.fixture
def served(disk: dict[str, Path]) -> Generator[Served]:
    server = Served(Engine(disk["one"], max_num_seqs=4), ["tiny"], admin_key="secret", api_key="plain")
    server.http.headers["Authorization"] = "Bearer plain"
    yield server
    server.close()


def post(served: Served, route: str, status: int = 200, headers: dict[str, str] = KEY, **body: Any) -> dict[str, Any]:
    answer = served.http.post(route, json=body, headers=headers)
    assert answer.status_code == status, answer.text
    return answer.json()


def complete(served: Served, model: str = "tiny", status: int = 200) -> dict[str, Any]:
    body = {"model": model, "prompt": "def read(path", "max_tokens": 8, "temperature": 0}
    answer = served.http.post("/v1/completions", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


@pytest.mark.parametrize("path", sorted(PATHS))
def test_nobody_may_without_the_key(served: Served, path: str) -> None:
    method = "GET" if path in ("/admin/state", "/admin/adapters") else "POST"
    for headers in ({}, {"Authorization": "Bearer plain"}, {"x-admin-key": "secre"}, {"x-admin-key": "s\u00e9cret"}):
        encoded = {name: value.encode("latin-1") for name, value in headers.items()}
        answer = served.http.request(method, path, headers=encoded, json={} if method == "POST" else None)  # pyrefly: ignore
        assert answer.status_code == 401 and "admin key is missing or wrong" in answer.json()["error"]["message"]
    assert served.engine.asleep == ""


def test_without_a_configured_key_it_says_how_to_set_one(disk: dict[str, Path]) -> None:
    server = Served(Engine(disk["one"]), ["tiny"])
    try:
        for headers in ({}, KEY, {"x-admin-key": ""}):
            error = post(server, "/admin/sleep", 403, headers)["error"]
            assert "--admin-key" in error["message"] and error["type"] == "permission_error"
    finally:
        server.close()


def test_new_weights(served: Served, disk: dict[str, Path]) -> None:
    before = complete(served)
    assert before["system_fingerprint"] == content_version(disk["one"])
    result = post(served, "/admin/weights", path=str(disk["two"]), version="step-200", restart=True)
    assert result["weight_version"] == "step-200" and result["previous"] == content_version(disk["one"])
    after = complete(served)
    assert after["system_fingerprint"] == "step-200" and after["choices"] != before["choices"]
    assert 'weight_version="step-200"' in served.http.get("/metrics").text
    for body, words in (
        ({"path": str(disk["two"] / "nowhere")}, "does not exist"),
        ({}, "path"),
        ({"path": str(disk["one"]), "reboot": True}, "reboot"),
        ({"path": str(disk["one"]), "restart": "perhaps"}, "restart"),
        ({"path": str(disk["one"]), "version": "step-200"}, "called 'step-200' already"),
    ):
        assert words in post(served, "/admin/weights", 400, **body)["error"]["message"]
    assert complete(served)["choices"] == after["choices"]


def test_adapters_are_models(served: Served, disk: dict[str, Path]) -> None:
    assert "not served here" in complete(served, "x", 404)["error"]["message"]
    plain = complete(served)
    result = post(served, "/v1/load_lora_adapter", lora_name="x", lora_path=str(disk["x"]))
    assert result["adapters"] == ["x"] and result["rank"] == 4
    adapted = complete(served, "x")
    assert adapted["model"] == "x" and adapted["choices"] != plain["choices"]
    assert complete(served)["choices"] == plain["choices"]
    models = served.http.get("/v1/models").json()["data"]
    assert [(one["id"], one.get("parent")) for one in models] == [("tiny", None), ("x", "tiny")]
    assert served.http.get("/v1/models/x").json()["id"] == "x"
    listed = served.http.get("/admin/adapters", headers=KEY).json()["adapters"]
    assert [one["path"] for one in listed] == [str(disk["x"])]
    refused = served.http.post("/v1/embeddings", json={"model": "x", "input": "a"})
    assert refused.status_code == 400 and "gives no embeddings" in refused.text
    for body, words in (
        ({"lora_name": "x", "lora_path": str(disk["x"])}, "there is an adapter 'x' already"),
        ({"lora_name": "tiny", "lora_path": str(disk["x"])}, "the model itself is served as 'tiny'"),
        ({"lora_name": "y", "lora_path": str(disk["one"])}, "has no adapter_config.json"),
        ({"lora_name": "y"}, "lora_path"),
    ):
        assert words in post(served, "/v1/load_lora_adapter", 400, **body)["error"]["message"]
    post(served, "/v1/load_lora_adapter", lora_name="x", lora_path=str(disk["x"]), load_inplace=True)
    assert post(served, "/v1/unload_lora_adapter", lora_name="x")["adapters"] == []
    assert "no adapter 'x'" in post(served, "/v1/unload_lora_adapter", 400, lora_name="x")["error"]["message"]
    complete(served, "x", 404)


def test_an_adapter_with_the_models_name_is_refused_at_the_start(disk: dict[str, Path]) -> None:
    with (
        Engine(disk["one"], lora_modules={"tiny": str(disk["x"])}) as engine,
        pytest.raises(UserError, match="both called 'tiny'"),
    ):
        create_app(engine, ["tiny"])


def test_sleep_and_wake(served: Served) -> None:
    before = complete(served)
    # No body is as good as an empty one.
    assert served.http.post("/admin/sleep", headers=KEY).json()["weights"] == "freed"
    assert complete(served, status=503)["error"]["message"] == "the engine is asleep; wake it"
    refused = served.http.post("/v1/embeddings", json={"model": "tiny", "input": "a"})
    assert refused.status_code == 503 and "asleep" in refused.text
    health = served.http.get("/health")
    assert health.status_code == 503 and health.json()["status"] == "asleep"
    assert served.http.get("/admin/state", headers=KEY).json()["asleep"] is True
    assert served.http.get("/state").json()["status"] == "asleep"
    assert re.search(r"^treadle_engine_asleep\{.*\} 1\.0$", served.http.get("/metrics").text, re.MULTILINE)
    assert "asleep" in post(served, "/admin/weights", 503, path="x")["error"]["message"]
    assert served.http.post("/admin/wake", headers=KEY).json()["asleep"] is False
    assert served.http.get("/health").status_code == 200
    assert served.http.get("/state").json()["status"] != "asleep"
    after = complete(served)
    assert after["choices"] == before["choices"] and after["system_fingerprint"] == before["system_fingerprint"]
    for body in ({"level": 3}, {"mode": "gently"}, {"deeply": True}):
        assert next(iter(body)) in post(served, "/admin/sleep", 400, **body)["error"]["message"]
