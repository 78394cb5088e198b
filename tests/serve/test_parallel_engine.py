"""An engine whose model lies on several ranks: it generates what one process does, and ends when a rank is lost."""

from __future__ import annotations

import asyncio
import queue
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.serve.tiny import TOKENS, build
from treadle.config import TreadleError, UserError
from treadle.model.families import read_spec
from treadle.serve.client import EngineClient, EngineOptions
from treadle.serve.engine import Engine
from treadle.serve.model import load
from treadle.weights.save import save_model

CONFIG = {
    "model_type": "mistral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": TOKENS + 1,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "sliding_window": 24,
}
PROMPTS = [[7, 8, 9], list(range(1, 60)), [250] * 17, [5], list(range(100, 130)), [299, 300, 1]]
SETTINGS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "block_size": 4, "check_blocks": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    module = build(read_spec(CONFIG))
    save_model(found, module.spec, dict(module.named_parameters()))
    return found


def answers(engine: Engine) -> list[tuple[tuple[int, ...], str]]:
    """Return greedy and sampled answers; prompts are cut into pieces, share steps, and hit each other's prefixes."""
    found = []
    for options in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3, "n": 2}):
        for done in engine.generate(PROMPTS + PROMPTS[1:2], max_tokens=20, **options):
            found.append((done.tokens, done.finish_reason))
    return found


@pytest.fixture(scope="module")
def reference(folder: Path) -> dict[tuple[int, ...], list[int]]:
    """Return what Transformers answers greedily, in fp32, to 20 prompts of 1 to 39 tokens."""
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", attn_implementation="eager").eval()
    theirs.generation_config.eos_token_id = None  # no token ends an answer
    found = {}
    for index in range(20):
        prompt = torch.randint(0, TOKENS, (2 * index + 1,), generator=torch.Generator().manual_seed(index))
        with torch.no_grad():
            made = theirs.generate(prompt[None], max_new_tokens=64, do_sample=False)[0]
        found[tuple(prompt.tolist())] = made[len(prompt) :].tolist()
    return found


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=["tp", "pp"])
def test_it_generates_what_one_process_does_and_transformers(
    folder: Path, sizes: tuple[int, int], reference: dict[tuple[int, ...], list[int]]
) -> None:
    with Engine(folder, **SETTINGS) as engine:
        expected = answers(engine)
        embedding, _ = asyncio.run(engine.embed(PROMPTS[1]))
    parallel = {"tensor_parallel_size": sizes[0], "pipeline_parallel_size": sizes[1]}
    with Engine(folder, **SETTINGS, **parallel) as engine:
        assert answers(engine) == expected
        assert asyncio.run(engine.embed(PROMPTS[1]))[0] == pytest.approx(embedding, abs=1e-5)
        prompts = [list(prompt) for prompt in reference]
        made = engine.generate(prompts, max_tokens=64, temperature=0.0, ignore_eos=True)
    assert [list(completion.tokens) for completion in made] == list(reference.values())
    assert engine.model.ranks is not None
    # The engine loaded the model, so it ended the ranks.
    assert all(peer.process is not None and peer.process.poll() == 0 for peer in engine.model.ranks.peers)


def test_a_model_loaded_on_ranks_serves_engine_after_engine(folder: Path) -> None:
    model = load(folder, pipeline_parallel_size=2)
    try:
        first, second = (model.generate(PROMPTS[1], max_tokens=6, temperature=0.0) for _ in range(2))
        assert first == second
        with pytest.raises(UserError, match="logits needs the whole model"):
            model.logits([1])
        with pytest.raises(UserError, match="saving needs the whole model"):
            model.save(folder / "copy")
    finally:
        model.close()
    with pytest.raises(UserError, match="loaded whole cannot be shared"):
        Engine(load(folder), tensor_parallel_size=2)


@pytest.mark.parametrize("busy", [True, False])
def test_a_lost_rank_ends_the_engine_and_every_request(folder: Path, busy: bool) -> None:
    with Engine(folder, tensor_parallel_size=2, **SETTINGS) as engine:
        assert engine.model.ranks is not None
        process = engine.model.ranks.peers[0].process
        assert process is not None
        if busy:
            with pytest.raises(TreadleError, match="rank 1 was ended by SIGKILL during a step"):
                for _ in engine.deltas(PROMPTS[0], max_tokens=120, ignore_eos=True):
                    process.kill()
        process.kill()
        engine._thread.join(30)
        assert engine.ended and "rank 1 was ended by SIGKILL" in engine.failure
        with pytest.raises(TreadleError, match="rank 1 was ended by SIGKILL"):
            engine.generate([PROMPTS[0]], max_tokens=1)


def test_a_lost_rank_ends_an_engine_process(folder: Path) -> None:
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    settings = {**SETTINGS, "pipeline_parallel_size": 2}
    options = EngineOptions(str(folder), "float32", "cpu", settings)
    client = EngineClient(options, told.put)
    try:
        assert client.generate([PROMPTS[0]], max_tokens=3)[0].tokens
        (engine,) = [one for one in psutil.Process().children() if "engine_process" in " ".join(one.cmdline())]
        (worker,) = engine.children()
        worker.kill()
        assert "rank 1 was ended by SIGKILL" in told.get(timeout=30)
        with pytest.raises(TreadleError, match="rank 1 was ended by SIGKILL"):
            client.generate([PROMPTS[0]], max_tokens=1)
        psutil.wait_procs([engine, worker], timeout=20)
        assert not worker.is_running()
    finally:
        client.close()
