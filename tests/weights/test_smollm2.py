"""A real model, SmolLM2-135M-Instruct from its GGUF file, against Transformers in fp32: the figure that the project
promises is that 64 greedy tokens on 20 prompts are equal.

Our engine generates. Transformers then reads prompt and answer in one forward pass; where each token of the answer is
its likeliest after those before it, it would have generated the same, and at a fraction of the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.tiny_models import packed
from tests.weights.gguf_files import smollm2
from treadle.model.families import family_of
from treadle.model.tokenizer import Tokenizer
from treadle.model.transformer import Transformer
from treadle.serve.engine import Engine
from treadle.serve.model import Model
from treadle.weights.convert import convert_model
from treadle.weights.load import load_model, load_tokenizer

pytestmark = pytest.mark.timeout(600)  # a real model on whatever machine this is
NEW = 64
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea,",
    "Water boils at",
    "La tour Eiffel se trouve",
    "import numpy as np\n\n",
    "1, 1, 2, 3, 5, 8,",
    "Dear Sir or Madam,",
    "The mitochondria is",
    "In 1969, the first human",
    "SELECT name FROM users WHERE",
    "Q: What is 12 times 12?\nA:",
    "To make a good soup you need",
    "Die Hauptstadt von Deutschland",
    "The three laws of thermodynamics",
    "<html>\n<head>",
    "My favourite colour is",
    "Roses are red, violets are blue,",
    "Photosynthesis is the process by which",
    "機械学習とは",
]


@dataclass(frozen=True)
class Both:
    ours: Transformer
    tokenizer: Tokenizer
    theirs: PreTrainedModel
    prompts: list[list[int]]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    convert_model(smollm2(), folder)
    theirs, info = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    assert not any(info.values()), info
    tokenizer = load_tokenizer(smollm2(), vocabulary=theirs.config.vocab_size)
    assert tokenizer is not None
    return Both(load_model(smollm2()), tokenizer, theirs, [tokenizer.encode(prompt) for prompt in PROMPTS])


def test_greedy_tokens_equal_those_of_transformers(both: Both) -> None:
    with Engine(Model(both.ours, both.tokenizer)) as engine:
        found = engine.generate(both.prompts, temperature=0, max_tokens=NEW, ignore_eos=True)
    answers = [completion.tokens for completion in found]
    sequences = [prompt + answer for prompt, answer in zip(both.prompts, answers, strict=True)]
    lengths = [len(sequence) for sequence in sequences]
    rows = pad_sequence([torch.tensor(sequence) for sequence in sequences], batch_first=True)
    with torch.no_grad():
        expected = both.theirs(rows).logits
        ours = both.ours(torch.tensor([token for sequence in sequences for token in sequence]), packed(*lengths))
    for prompt, answer, theirs, logits in zip(both.prompts, answers, expected, ours.split(lengths), strict=True):
        assert len(answer) == NEW
        end = len(prompt) + NEW
        assert theirs[len(prompt) - 1 : end - 1].argmax(-1).tolist() == answer
        # Decoding with a cache and reading at once are the same model.
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer
        # 30 layers of fp32 rounding; a wrong rotation or norm shows as 1e-2 and more.
        assert (logits - theirs[:end]).abs().max() <= 1e-4 * (theirs.max() - theirs.min())


WAYS = {
    "chunks of a few tokens beside answers": {"max_num_seqs": 32, "max_num_batched_tokens": 36},
    "few blocks, so that sequences are preempted": {"max_num_seqs": 32, "kv_cache_memory": "30MB"},
    "blocks of five tokens, guesses": {"max_num_seqs": 4, "block_size": 5, "num_speculative_tokens": 4},
    # Its 9 heads and 3 key-value heads cannot be shared by two: tests/distributed has small models that can be.
    "two ranks of 15 layers": {"pipeline_parallel_size": 2},
}


@pytest.fixture(scope="module")
def greedy(both: Both) -> list[list[int]]:
    """The answers that the test above holds against Transformers."""
    with Engine(Model(both.ours, both.tokenizer), max_model_len=128) as engine:
        found = engine.generate(both.prompts, temperature=0, max_tokens=NEW, ignore_eos=True)
        # Again, from the blocks that are there.
        again = engine.generate(both.prompts, temperature=0, max_tokens=NEW, ignore_eos=True)
    assert sum(completion.cached_tokens for completion in again) > 0
    answers = [completion.tokens for completion in found]
    assert [completion.tokens for completion in again] == answers
    return answers


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_greedy_tokens_are_the_same_however_they_are_computed(
    both: Both, greedy: list[list[int]], way: dict[str, Any]
) -> None:
    model = smollm2() if "pipeline_parallel_size" in way else Model(both.ours, both.tokenizer)
    with Engine(model, max_model_len=128, check_blocks=True, **way) as engine:
        found = engine.generate(both.prompts, temperature=0, max_tokens=NEW, ignore_eos=True)
        if "kv_cache_memory" in way:
            assert engine.stats.preemptions > 0
        if "num_speculative_tokens" in way:
            assert engine.stats.accepted_tokens > 0
    assert [completion.tokens for completion in found] == greedy


def test_transformers_own_reading_of_the_gguf_file_gives_the_same_weights(both: Both) -> None:
    """Independent of our reader and of our converter."""
    theirs = AutoModelForCausalLM.from_pretrained(
        smollm2().parent, gguf_file=smollm2().name, dtype=torch.float32, attn_implementation="eager"
    )
    state, names = theirs.state_dict(), family_of(both.ours.spec.config).names(both.ours.spec)
    assert set(state) == {*names.values(), "lm_head.weight"}
    for ours, name in names.items():
        assert torch.equal(both.ours.get_parameter(ours), state[name]), name
    tokens = torch.tensor(both.prompts[2])
    with torch.no_grad():
        expected, logits = theirs(tokens[None]).logits[0], both.ours(tokens, packed(len(tokens)))
    assert (logits - expected).abs().max() <= 1e-4 * (expected.max() - expected.min())
