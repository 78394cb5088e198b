"""How much cache an engine gets: all numbers by hand, for a model whose tokens take 512 bytes."""

from __future__ import annotations

import pytest
import torch

from tests.serve.tiny import attention, build, model_spec
from treadle.config import UserError
from treadle.serve.batch import layer_groups
from treadle.serve.capacity import Capacity, Wanted, fit_capacity
from treadle.serve.kv_cache import KVFormat, group_bytes_per_token
from treadle.serve.measure import step_bytes_of

SPEC = model_spec(max_positions=1000)
FP32 = KVFormat.of("auto", torch.float32)
EACH = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, head size, bytes


def fit(tokens: int, step: int = 0, spec=SPEC, **wanted: int | bool) -> Capacity:
    """What fits where there is room for `tokens` tokens in blocks of 10, the null block aside, and a step."""
    available = int(((tokens + 10) * EACH + step) / 0.8) + 2
    return fit_capacity(spec, FP32, Wanted(block_size=10, **wanted), available, lambda *_: step)  # pyrefly: ignore


def test_a_token_takes_what_it_should() -> None:
    assert sum(group_bytes_per_token(SPEC, group, FP32) for group in layer_groups(SPEC)) == EACH


def test_what_was_asked_is_kept_and_the_rest_fits() -> None:
    def found(capacity: Capacity) -> tuple[int, int, int, int]:
        return capacity.seqs, capacity.length, capacity.tokens, len(capacity.notes)

    assert found(fit(16000)) == (16, 1000, 16000, 0)
    assert found(fit(6500)) == (6, 1000, 6000, 1)
    assert found(fit(1200)) == (4, 1000, 1200, 2), "sequences share what there is"
    assert found(fit(700)) == (4, 700, 700, 3)
    assert found(fit(1200, max_seqs=2)) == (2, 1000, 1200, 1)
    assert found(fit(1200, max_length=100)) == (12, 100, 1200, 1)
    assert found(fit(1200, max_seqs=3, max_length=400)) == (3, 400, 1200, 0)
    assert found(fit(16000, max_seqs=3, max_length=400, cache_bytes=810 * EACH)) == (3, 400, 800, 1)
    assert found(fit(400, step=12345, max_seqs=1, max_length=400)) == (1, 400, 400, 0), "the step's own is left over"


def test_layers_with_a_window_get_fewer_blocks() -> None:
    spec = model_spec(attention(window=25), attention(), max_positions=1000)
    capacity = fit(16000, spec=spec, max_seqs=8, step_tokens=100, prefixes=False)
    # 8 sequences that see 25 tokens (4 blocks, not aligned) and fill one more, and the blocks that a step fills.
    assert capacity.blocks == (8 * 5 + 10, 800)
    assert fit(16000, spec=spec, max_seqs=8, step_tokens=100).blocks == (100, 800)


@pytest.mark.parametrize(
    ("tokens", "wanted", "words"),
    [
        (600, {"max_seqs": 64, "max_length": 1000}, ["single sequence of 1000 tokens", "252.5 KiB", "max_model_len"]),
        (600, {"max_length": 1000, "cache_bytes": 5000}, ["kv_cache_memory", "4.9 KiB", "raise"]),
        (0, {}, ["max_num_batched_tokens"]),
        (99999, {"max_seqs": 1, "max_length": 1001}, ["context of 1000 tokens", "1001"]),
        (99999, {"max_seqs": 64, "step_tokens": 63}, ["max_num_batched_tokens=63", "max_num_seqs=64"]),
    ],
)
def test_what_does_not_fit_is_refused_with_its_numbers(tokens: int, wanted: dict[str, int], words: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        fit(tokens, **wanted)
    assert all(word in str(refused.value) for word in words), refused.value


def test_a_step_is_measured_to_take_at_least_its_activations() -> None:
    spec = model_spec(max_positions=4096)
    module = build(spec)
    small, large = step_bytes_of(module, 256)(4, 512), step_bytes_of(module, 1024)(4, 512)
    # The gate and up projections and the residual stream of each token, in fp32.
    assert large - small >= 768 * (2 * 48 + 3 * 32) * 4
    assert step_bytes_of(module, 256)(64, 512) - small >= 60 * spec.vocabulary * 4, "the logits of more sequences"
