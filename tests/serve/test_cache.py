"""The cache: what is computed piece by piece equals what is computed at once; slots; how much memory it takes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.serve.tiny import attention, build, model_spec
from tests.tiny_models import TINY
from treadle.config import UserError
from treadle.model.context import PackedContext
from treadle.model.families import read_spec
from treadle.model.spec import ModelSpec, RopeSpec
from treadle.serve.cache import (
    Chunk,
    KeyValueCache,
    Slots,
    bytes_per_token,
    fit_capacity,
    length_dependent_ropes,
    rope_regime,
)
from treadle.serve.runner import Runner

longrope = RopeSpec(
    10000.0,
    8,
    128,
    "longrope",
    (("factor", 4.0), ("long_factor", (2.0, 3.0, 4.0, 5.0)), ("original_max_position_embeddings", 24),
     ("short_factor", (1.0, 1.1, 1.2, 1.3))),
)  # fmt: skip
SPECS = {
    "plain": model_spec(),
    "one key-value head": model_spec(attention(kv_heads=1), attention(kv_heads=1)),
    "windows shorter and longer than the text": model_spec(attention(window=5), attention(window=64), attention()),
    "window of one": model_spec(attention(window=1)),
    "Gemma 2": model_spec(
        attention(window=7, softcap=20.0, scale=0.3), attention(softcap=20.0, scale=0.3),
        final_softcap=10.0, norm_offset=1.0, embedding_scale=32**0.5, tied=True,
    ),
    "sinks": model_spec(attention(sinks=True, window=6), attention(sinks=True)),
    "norms, biases, no rotation in one layer": model_spec(
        attention(qk_norm=True, qkv_bias=True, output_bias=True), attention(rope=None)
    ),
    "half of the head rotated": model_spec(attention(rope=RopeSpec(500.0, 4, 128))),
    "longrope": model_spec(attention(rope=longrope), attention(rope=longrope)),
    "dynamic": model_spec(attention(rope=RopeSpec(10000.0, 8, 24, "dynamic", (("factor", 2.0),)))),
}  # fmt: skip
SPECS |= {name: read_spec(config) for name, config in TINY.items()}


def whole(module: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return module(torch.tensor(tokens), PackedContext.of_lengths([len(tokens)]))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_pieces_equal_the_whole(spec: ModelSpec) -> None:
    """Three sequences of different length, fed in uneven pieces that share steps, in slots out of order."""
    module = build(spec, seed=3)
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(spec.vocabulary, (length,), generator=generator).tolist() for length in (40, 23, 31)]
    runner = Runner(module, KeyValueCache(spec, 4, 64, torch.float32))
    slots, done = [2, 0, 3], [0, 0, 0]
    ropes = length_dependent_ropes(spec)
    pieces = [[13, 1, 1, 1, 9, 1, 1, 13], [1, 1, 20, 1], [30, 1]]
    while any(pieces):
        chunks, which = [], []
        for index, left in enumerate(pieces):
            if left:
                past, upto = done[index], done[index] + left.pop(0)
                if rope_regime(ropes, past) != rope_regime(ropes, upto):
                    past = 0
                chunks.append(Chunk(slots[index], past, sequences[index][past:upto]))
                done[index] = upto
                which.append(index)
        logits = runner.step(chunks)
        for row, index in enumerate(which):
            expected = whole(module, sequences[index][: done[index]])[-1]
            # fp32 sums in another order; the logits' spread is about 1.
            torch.testing.assert_close(logits[row], expected, atol=1e-5, rtol=1e-5)
    assert done == [40, 23, 31]


def test_a_slot_of_a_longer_past_shows_nothing_of_it() -> None:
    spec = model_spec()
    module = build(spec)
    runner = Runner(module, KeyValueCache(spec, 1, 64, torch.float32))
    runner.step([Chunk(0, 0, list(range(60)))])
    tokens = [7, 8, 9]
    runner.step([Chunk(0, 0, tokens[:2])])
    got = runner.step([Chunk(0, 2, tokens[2:])])
    torch.testing.assert_close(got[0], whole(module, tokens)[-1], atol=1e-5, rtol=1e-5)


def test_in_bf16_pieces_cost_no_precision() -> None:
    spec = model_spec()
    exact, module = build(spec), build(spec).to(torch.bfloat16)
    runner = Runner(module, KeyValueCache(spec, 1, 64, torch.bfloat16))
    at_once, in_pieces = 0.0, 0.0
    for first in range(12):
        tokens = list(range(first, first + 20))
        runner.step([Chunk(0, 0, tokens[:10])])
        expected = whole(exact, tokens)[-1]
        at_once += float((whole(module, tokens)[-1] - expected).abs().mean())
        in_pieces += float((runner.step([Chunk(0, 10, tokens[10:])])[0] - expected).abs().mean())
    assert in_pieces < 1.3 * at_once, "other sums round otherwise, but not worse"


def test_memory_is_claimed_only_when_it_is_written() -> None:
    import psutil

    spec = model_spec(*[attention(head_size=64, kv_heads=4)] * 4, max_positions=1 << 13)
    before = psutil.Process().memory_info().rss
    cache = KeyValueCache(spec, 16, 1 << 13, torch.float32)
    size = 16 * (1 << 13) * bytes_per_token(spec, torch.float32)
    assert sum(tensor.nbytes for tensor in (*cache.keys, *cache.values)) == size == 1 << 30
    assert psutil.Process().memory_info().rss - before < 32 << 20
    assert not cache.values[3][15, -1].any()


@given(data=st.data())
def test_slots_are_given_once_and_hold_what_they_say(data: st.DataObject) -> None:
    slots, taken, content = Slots(4, reuse=True), {}, {slot: [] for slot in range(4)}
    for _ in range(data.draw(st.integers(1, 30))):
        if taken and (slots.free == 0 or data.draw(st.booleans())):
            slot = data.draw(st.sampled_from(sorted(taken)))
            content[slot] = taken.pop(slot)
            slots.give_back(slot, content[slot])
            continue
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=6))
        slot, held = slots.take(tokens)
        assert slot not in taken
        assert content[slot][:held] == tokens[:held] and held < len(tokens)

        def common(other: list[int], tokens: list[int] = tokens) -> int:
            return next((i for i, (a, b) in enumerate(zip(other, tokens, strict=False)) if a != b),
                        min(len(other), len(tokens)))  # fmt: skip

        best = max(common(content[free]) for free in range(4) if free not in taken)
        assert held == min(best, len(tokens) - 1), "the longest common prefix is found"
        taken[slot] = tokens
        assert slots.free == 4 - len(taken)


def test_without_reuse_nothing_is_trusted() -> None:
    slots = Slots(2)
    slot, _ = slots.take([1, 2, 3])
    slots.give_back(slot, [1, 2, 3])
    assert slots.take([1, 2, 3, 4]) == (slot, 0), "the slot whose memory is claimed already"


def test_capacity_keeps_what_was_asked_and_fits_the_rest() -> None:
    spec = model_spec(max_positions=1000)
    each = bytes_per_token(spec, torch.float32)
    assert each == 2 * 2 * 2 * 8 * 4

    def fit(tokens: int, seqs: int | None = None, length: int | None = None) -> tuple[int, int, int]:
        found = fit_capacity(spec, torch.float32, int(tokens * each / 0.8) + 1, seqs, length)
        assert found.seqs * found.length <= tokens + 1
        return found.seqs, found.length, len(found.notes)

    assert fit(16000) == (16, 1000, 0)
    assert fit(6500) == (6, 1000, 1)
    assert fit(1200) == (4, 300, 2)
    assert fit(1200, seqs=2) == (2, 600, 1)
    assert fit(1200, length=100) == (12, 100, 1)
    assert fit(1200, seqs=3, length=400) == (3, 400, 0)


@pytest.mark.parametrize(
    ("available", "seqs", "length", "words"),
    [
        (1 << 20, 64, 1000, ["64 sequences of 1000 tokens", "15.6 MiB", "max_model_len"]),
        (10, None, None, ["8 B"]),
        (1 << 30, 1, 1001, ["context of 1000 tokens", "1001"]),
        (1 << 30, 0, None, ["at least 1"]),
    ],
)
def test_what_does_not_fit_is_refused_with_its_numbers(
    available: int, seqs: int | None, length: int | None, words: list[str]
) -> None:
    with pytest.raises(UserError) as refused:
        fit_capacity(model_spec(max_positions=1000), torch.float32, available, seqs, length)
    assert all(word in str(refused.value) for word in words), refused.value
