"""A model over a paged cache: computing piece by piece, in blocks in any order, equals computing the whole."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor

from tests.serve.tiny import SPECS, attention, build, model_spec, whole
from treadle import ops
from treadle.config import UserError
from treadle.model.context import PackedContext
from treadle.model.rope import length_dependent_ropes, rope_regime
from treadle.model.spec import AttentionSpec, ModelSpec
from treadle.model.transformer import Transformer
from treadle.ops.paged_cache import gather
from treadle.serve.batch import NULL_BLOCK, StepBatch, layer_groups
from treadle.serve.kv_cache import KVCache, KVFormat, group_bytes_per_token
from treadle.serve.paged import PagedContext


class Sequences:
    """Sequences of tokens, fed in pieces; blocks are handed out in random order and freed behind a group's window.

    Freed blocks, and those never used, hold what is not a number.
    """

    def __init__(self, module: Transformer, tokens: list[list[int]], block_size: int = 4, format: str = "auto") -> None:
        self.module, self.tokens, self.size = module, tokens, block_size
        self.groups = layer_groups(module.spec)
        count = sum(-(-len(one) // block_size) for one in tokens) + 2
        kind = KVFormat.of(format, torch.float32)
        self.cache = KVCache(module.spec, self.groups, [count] * len(self.groups), block_size, kind)
        self.random = Random(0)
        self.free = [self.random.sample(range(1, count), count - 1) for _ in self.groups]
        width = max(-(-len(one) // block_size) for one in tokens)
        self.tables = np.full((len(self.groups), len(tokens), width), NULL_BLOCK, dtype=np.int32)
        self.done = [0] * len(tokens)
        for group in range(len(self.groups)):
            for block in range(count):
                self.spoil(group, block)

    def spoil(self, group: int, block: int) -> None:
        for layer in self.groups[group].layers:
            for tensor in self.cache.layer(layer):
                tensor[block] = 255 if tensor.dtype == torch.uint8 else torch.nan  # a scale of 255 is not a number

    def step(self, pieces: dict[int, int], deterministic: bool = False) -> dict[int, Tensor]:
        """Compute so many more tokens of these sequences and return the logits after the last of each."""
        ropes = length_dependent_ropes(self.module.spec)
        pasts, counts, lengths, new = [], [], [], []
        for index, count in pieces.items():
            past, end = self.done[index], self.done[index] + count
            if rope_regime(ropes, past) != rope_regime(ropes, end):
                past = 0
            pasts.append(past)
            counts.append(end - past)
            lengths.append(end)
            new += self.tokens[index][past:end]
            self.done[index] = end
            for group in range(len(self.groups)):
                for block in range(past // self.size, -(-end // self.size)):
                    if self.tables[group, index, block] == NULL_BLOCK:
                        self.tables[group, index, block] = self.free[group].pop()
        order = list(pieces)
        batch = StepBatch(
            new,
            counts,
            pasts,
            lengths,
            [int(end) - 1 for end in np.cumsum(counts)],
            [table[order].tobytes() for table in self.tables],
        )
        context = PagedContext(self.cache, batch, deterministic=deterministic)
        with torch.inference_mode():
            logits = self.module(torch.tensor(batch.tokens), context, rows=context.rows)
        self.free_behind_windows()
        return dict(zip(order, logits, strict=True))

    def free_behind_windows(self) -> None:
        for number, group in enumerate(self.groups):
            for index, done in enumerate(self.done):
                # The next token, at `done`, sees back to done - window + 1.
                for block in range(max(0, done - group.window + 1) // self.size if group.window else 0):
                    gone = int(self.tables[number, index, block])
                    if gone != NULL_BLOCK:
                        self.tables[number, index, block] = NULL_BLOCK
                        self.free[number].append(gone)
                        self.spoil(number, gone)


def random_tokens(spec: ModelSpec, *lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(spec.vocabulary, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_pieces_equal_the_whole(spec: ModelSpec) -> None:
    """Three sequences of different length, fed in uneven pieces that share steps."""
    module = build(spec, seed=3)
    tokens = random_tokens(spec, 40, 23, 31)
    # With lengths that change the rotation of tokens already seen, a window's freed blocks would have to come back.
    size = 4 if not length_dependent_ropes(spec) else 64
    sequences = Sequences(module, tokens, size)
    pieces = [[13, 1, 1, 1, 9, 1, 1, 13], [1, 1, 20, 1], [30, 1]]
    while any(pieces):
        now = {index: left.pop(0) for index, left in enumerate(pieces) if left}
        for index, logits in sequences.step(now).items():
            # fp32 sums in another order, through every layer; the logits' spread is about 1.
            expected = whole(module, tokens[index][: sequences.done[index]])[-1]
            torch.testing.assert_close(logits, expected, atol=3e-5, rtol=1e-5)
    assert sequences.done == [40, 23, 31]


def test_random_chunkings_equal_the_whole() -> None:
    spec = model_spec(attention(window=5), attention(window=9, sinks=True), attention(softcap=3.0))
    module = build(spec, seed=5)
    tokens = random_tokens(spec, 50, 37, 61, 8)
    expected = [whole(module, one) for one in tokens]
    random = Random(1)
    for block_size in (1, 3, 16):
        sequences = Sequences(module, tokens, block_size)
        while any(done < len(one) for done, one in zip(sequences.done, tokens, strict=True)):
            left = {i: len(one) - sequences.done[i] for i, one in enumerate(tokens) if len(one) > sequences.done[i]}
            chosen = random.sample(sorted(left), random.randint(1, len(left)))
            now = {i: min(left[i], random.choice((1, 1, 2, 5, 20))) for i in chosen}
            for index, logits in sequences.step(now).items():
                torch.testing.assert_close(logits, expected[index][sequences.done[index] - 1], atol=3e-5, rtol=1e-5)


class Rounding(PackedContext):
    """Whole sequences whose keys and values are what a cache of the format gives back of them."""

    def __init__(self, lengths: list[int], format: KVFormat) -> None:
        starts = torch.tensor([0, *lengths]).int().cumsum(0, dtype=torch.int32)
        super().__init__(starts, max(lengths))
        self.format = format

    def attend(self, layer: int, spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor, sinks: Any) -> Tensor:
        tokens, heads, size = key.shape
        elements = self.format.elements(size)
        caches = (
            torch.zeros(2, heads, elements, tokens, dtype=self.format.dtype),
            torch.zeros(2, heads, tokens, elements, dtype=self.format.dtype),
        )
        ops.paged_write(key, value, *caches, torch.arange(tokens, 2 * tokens))
        found = gather(*caches, torch.tensor([1]), tokens, size)
        key, value = (x.contiguous().float() for x in found)
        return super().attend(layer, spec, query, key, value, sinks)


@pytest.mark.parametrize("format", ["bf16", "int8", "int4"])
def test_quantized_caches_give_what_their_rounded_keys_and_values_give(format: str) -> None:
    heads = {"head_size": 16, "kv_heads": 1}
    spec = model_spec(
        attention(window=5, **heads), attention(window=9, sinks=True, **heads), attention(softcap=3.0, **heads)
    )
    module = build(spec, seed=5)
    tokens = random_tokens(spec, 50, 37)
    sequences, random = Sequences(module, tokens, 16, format), Random(2)
    with torch.inference_mode():
        expected = [module(torch.tensor(one), Rounding([len(one)], sequences.cache.format)) for one in tokens]
    while any(done < len(one) for done, one in zip(sequences.done, tokens, strict=True)):
        left = {i: len(one) - sequences.done[i] for i, one in enumerate(tokens) if len(one) > sequences.done[i]}
        now = {i: min(some, random.choice((1, 2, 5, 30))) for i, some in left.items()}
        for index, logits in sequences.step(now).items():
            # Sums in another order, and now and then a code that falls on the other side: a step of 1/15 in one
            # element of 4 bits, of 1/255 or 2^-8 otherwise.
            off = {"bf16": 5e-3, "int8": 5e-3, "int4": 5e-2}[format]
            torch.testing.assert_close(logits, expected[index][sequences.done[index] - 1], atol=off, rtol=0)


@pytest.mark.parametrize("format", ["auto", "int8", "int4"])
def test_deterministic_logits_are_the_same_bits_in_any_batch_and_any_chunks(format: str) -> None:
    spec = model_spec(attention(window=6, head_size=16), attention(head_size=16))
    module = build(spec, seed=1)
    tokens = random_tokens(spec, 45, 30, 70)
    seen: dict[tuple[int, int], Tensor] = {}
    random = Random(3)
    for chunks in ((1,), (70,), (3, 16), (1, 2, 40)):
        sequences = Sequences(module, tokens, 16, format)
        while any(done < len(one) for done, one in zip(sequences.done, tokens, strict=True)):
            left = {i: len(one) - sequences.done[i] for i, one in enumerate(tokens) if len(one) > sequences.done[i]}
            chosen = random.sample(sorted(left), random.randint(1, len(left)))
            with ops.row_invariant():
                found = sequences.step({i: min(left[i], random.choice(chunks)) for i in chosen}, deterministic=True)
            for index, logits in found.items():
                assert torch.equal(seen.setdefault((index, sequences.done[index]), logits), logits)


def test_formats() -> None:
    spec = model_spec(attention(head_size=64), attention(head_size=64, window=5))
    for name, dtype, size in (
        ("auto", torch.bfloat16, 128),
        ("float32", torch.float32, 256),
        ("int8", torch.uint8, 66),
    ):
        format = KVFormat.of(name, torch.bfloat16)
        assert (format.dtype, format.entry_bytes(64)) == (dtype, size)
        for group in layer_groups(spec):
            assert group_bytes_per_token(spec, group, format) == 2 * 2 * size, "keys and values of two heads"
    with pytest.raises(UserError, match=r"unknown kv_cache_dtype 'int5'.*did you mean"):
        KVFormat.of("int5", torch.float32)
    with pytest.raises(UserError, match=r"fp8 is not possible here: .* this is cpu; use int8"):
        KVFormat.of("fp8", torch.float32)
    with pytest.raises(UserError, match=r"int4 packs two elements.*heads have 9; use int8"):
        KVFormat.of("int4", torch.float32).entry_bytes(9)
    with pytest.raises(UserError, match="at most 512 elements"):
        KVFormat.of("int8", torch.float32).entry_bytes(600)


def test_memory_is_claimed_only_when_it_is_written() -> None:
    spec = model_spec(*[attention(head_size=64, kv_heads=4)] * 4)
    before = psutil.Process().memory_info().rss
    cache = KVCache(spec, layer_groups(spec), [1 << 13], 16, KVFormat.of("auto", torch.float32))
    assert cache.nbytes == 1 << 30
    assert psutil.Process().memory_info().rss - before < 32 << 20
    assert not cache.layer(3)[1][-1].any()


def test_a_batch_without_a_block_for_a_new_token_is_refused() -> None:
    spec = model_spec()
    cache = KVCache(spec, layer_groups(spec), [3], 4, KVFormat.of("auto", torch.float32))
    table = np.array([[1, NULL_BLOCK]], dtype=np.int32).tobytes()
    PagedContext(cache, StepBatch([5], [1], [3], [4], [0], [table]))
    with pytest.raises(ValueError, match="no block"):
        PagedContext(cache, StepBatch([5], [1], [4], [5], [0], [table]))
    with pytest.raises(ValueError, match="2 tokens"):
        PagedContext(cache, StepBatch([5, 6], [1], [3], [4], [0], [table]))


def test_released_memory_comes_back_empty() -> None:
    spec = model_spec()
    cache = KVCache(spec, layer_groups(spec), [3], 4, KVFormat.of("auto", torch.float32))
    cache.layer(0)[0][1] = 1.0
    cache.copy_block(0, 1, 2)
    assert cache.layer(0)[0][2].eq(1.0).all() and not cache.layer(0)[1].any()
    cache.release()
    assert not cache.allocated
    cache.allocate()
    assert not cache.layer(0)[0].any()
    assert cache.nbytes == sum(tensor.nbytes for layer in range(2) for tensor in cache.layer(layer))
