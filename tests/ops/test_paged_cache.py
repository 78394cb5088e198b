"""Quantized records against a decoder written out from their description, in float64."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor

from treadle.ops import paged_write
from treadle.ops.paged_cache import PAGED_WRITE, Record, gather

SIZES = [(8, size) for size in (1, 7, 16, 64, 65, 96)] + [(4, size) for size in (2, 14, 64, 70, 80, 128)]
BLOCK = 5


@functools.cache
def hadamard(size: int) -> Tensor:
    """Entry (i, j) is the parity of the bits that i and j share; blocks of the largest power of two, in float64."""
    span = math.gcd(size, 1 << 20)
    matrix = torch.zeros(size, size, dtype=torch.float64)
    for i in range(size):
        for j in range(size):
            if i // span == j // span:
                matrix[i, j] = (-1) ** (i % span & j % span).bit_count() / math.sqrt(span)
    return matrix


def group_sizes(size: int, bits: int) -> list[int]:
    if bits == 8:
        return [size]
    group = math.ceil(size / max(1, size // 32))
    group += group % 2
    return [min(group, size - begin) for begin in range(0, size, group)]


def decoded(record: list[int], size: int, bits: int) -> tuple[list[float], list[float]]:
    """Return the head that a record's bytes stand for, and the scale of each turned element."""
    groups = group_sizes(size, bits)
    codes = record[:size]
    if bits == 4:
        packed = record[: size // 2]
        codes = [byte & 15 for byte in packed] + [byte >> 4 for byte in packed]
    scales, zeros = record[-2 * len(groups) : -len(groups)], record[-len(groups) :]
    turned, element_scales = [], []
    for count, scale, zero in zip(groups, scales, zeros, strict=True):
        step = math.nan if scale == 255 else (1 + scale % 8 / 8) * 2.0 ** (scale // 8 - 20)
        for _ in range(count):
            turned.append(step * (codes[len(turned)] - zero / (1 if bits == 8 else 16)))
            element_scales.append(step)
    return turned, element_scales


class Written:
    """Heads of one kind written to a small cache, a few of them at block boundaries."""

    def __init__(self, keys: Tensor, values: Tensor, bits: int) -> None:
        self.tokens, self.heads, self.size = keys.shape
        self.bits, elements = bits, Record(keys.shape[-1], bits).bytes
        blocks = -(-self.tokens // BLOCK) + 2
        self.keys = torch.zeros(blocks, self.heads, elements, BLOCK, dtype=torch.uint8)
        self.values = torch.zeros(blocks, self.heads, BLOCK, elements, dtype=torch.uint8)
        self.order = torch.randperm(blocks - 1)[: blocks - 2] + 1
        rows = (self.order[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[: self.tokens]
        paged_write(keys, values, self.keys, self.values, rows)

    def record(self, token: int, head: int) -> tuple[list[int], list[int]]:
        block, entry = int(self.order[token // BLOCK]), token % BLOCK
        return self.keys[block, head, :, entry].tolist(), self.values[block, head, entry].tolist()

    def check(self, keys: Tensor, values: Tensor, most: float) -> None:
        """An element is off by `most` steps at most, before it is turned back."""
        turn = hadamard(self.size)
        for token in range(self.tokens):
            for head in range(self.heads):
                for record, exact in zip(self.record(token, head), (keys, values), strict=True):
                    got, steps = (torch.tensor(x, dtype=torch.float64) for x in decoded(record, self.size, self.bits))
                    off = (got - exact[token, head].double() @ turn).abs()
                    # What is added to a step's share is float32's own rounding of large heads.
                    assert (off <= most * steps + 1e-6 * exact[token, head].abs().max()).all()


@pytest.mark.parametrize(("bits", "size"), SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_element_is_near(implementation: str, bits: int, size: int, dtype: torch.dtype) -> None:
    keys, values = (torch.randn(12, 2, size).to(dtype) * 3, torch.randn(12, 2, size).to(dtype))
    written = Written(keys, values, bits)
    # Whole-code zero points cost half a step at the ends. 4 bits cut the ends for a smaller error of all the others:
    # by the two steps of an eighth of 15 codes, at one end or shared by both.
    written.check(keys, values, 1.0 if bits == 8 else 4.5)


@pytest.mark.parametrize(("bits", "error"), [(8, 0.008), (4, 0.085)])
def test_the_error_of_normal_heads(implementation: str, bits: int, error: float) -> None:
    """Relative root mean square; a uniform grid over the range of 64 (32) normal values has about these."""
    keys, values = torch.randn(2, 400, 2, 64).unbind()
    written = Written(keys, values, bits)
    found = gather(written.keys, written.values, written.order, 400, 64)
    for got, exact in zip(found, (keys, values), strict=True):
        off = (got - exact).square().mean().sqrt()
        assert off < error, float(off)


@pytest.mark.parametrize("bits", [8, 4])
def test_heads_that_are_not_normal(implementation: str, bits: int) -> None:
    ones = torch.ones(1, 1, 64)
    spike = torch.randn(1, 1, 64)
    spike[..., 5] = 300.0
    for heads in (ones, -ones, 5 + torch.rand(1, 1, 64), 1e-3 * torch.randn(1, 1, 64), spike, 1e3 * ones):
        Written(heads, -heads, bits).check(heads, -heads, 1.0 if bits == 8 else 4.5)
    zero = torch.zeros(1, 1, 64)
    written = Written(zero, zero, bits)
    assert all(not x.any() for x in gather(written.keys, written.values, written.order, 1, 64))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
def test_what_has_no_record_is_not_a_number(implementation: str, bits: int, value: float) -> None:
    keys = torch.randn(3, 1, 16)
    values = keys.clone()
    keys[1, 0, 3] = value
    written = Written(keys, values, bits)
    found = gather(written.keys, written.values, written.order, 3, 16)
    assert found[0][1].isnan().all()
    assert not found[0][::2].isnan().any() and not found[1].isnan().any()


@pytest.mark.parametrize(("bits", "size"), SIZES, ids=str)
def test_reading_whole_entries_back(implementation: str, bits: int, size: int) -> None:
    keys, values = torch.randn(2, 13, 2, size).unbind()
    written = Written(keys, values, bits)
    found = gather(written.keys, written.values, written.order, 13, size)
    turn = hadamard(size)
    for token in range(13):
        for head in range(2):
            for got, record in zip(found, written.record(token, head), strict=True):
                exact = torch.tensor(decoded(record, size, bits)[0], dtype=torch.float64) @ turn
                torch.testing.assert_close(got[token, head].double(), exact, atol=1e-5, rtol=1e-5)


def test_float_caches_keep_what_they_are_given(implementation: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        keys, values = (2 * torch.randn(2, 6, 3, 9)).unbind()
        caches = torch.zeros(4, 3, 9, 4).to(dtype), torch.zeros(4, 3, 4, 9).to(dtype)
        keys[0, 0, 0] = 300.0
        paged_write(keys, values, *caches, torch.tensor([15, 4, 5, 8, 9, 10]))
        found = gather(*caches, torch.tensor([3, 1, 2]), 12, 9)
        for got, exact in zip(found, (keys, values), strict=True):
            rows = got[[3, 4, 5, 8, 9, 10]]
            assert torch.equal(rows.float(), exact.to(dtype).float())
    caches = torch.zeros(1, 1, 2, 1).to(torch.float8_e4m3fn), torch.zeros(1, 1, 1, 2).to(torch.float8_e4m3fn)
    beyond = torch.tensor([[[1e4, -1e4]]])
    paged_write(beyond, beyond, *caches, torch.tensor([0]))
    assert caches[0].float().flatten().tolist() == [448.0, -448.0], "8-bit floats end there"


@pytest.mark.parametrize("row", [-1, 20, 1 << 40])
def test_rows_outside_are_refused(implementation: str, row: int) -> None:
    caches = torch.zeros(4, 1, 8, 5), torch.zeros(4, 1, 5, 8)
    with pytest.raises(ValueError, match="outside the cache, which has 4 blocks of 5"):
        paged_write(torch.ones(2, 1, 8), torch.ones(2, 1, 8), *caches, torch.tensor([0, row]))
    assert not caches[0].any() and not caches[1].any()


def test_records_that_do_not_exist_are_refused(implementation: str) -> None:
    for size, elements in ((7, 4), (8, 9), (64, 38)):
        caches = (torch.zeros(2, 1, *shape, dtype=torch.uint8) for shape in ((elements, 4), (4, elements)))
        with pytest.raises(ValueError, match="has no quantized record"):
            paged_write(torch.ones(1, 1, size), torch.ones(1, 1, size), *caches, torch.tensor([0]))


def test_sizes_and_capacity() -> None:
    for size in (64, 80, 96, 112, 128, 192, 256):
        assert 2 * size / Record(size, 8).bytes >= 1.9 and 2 * size / Record(size, 4).bytes >= 3.5
    assert (Record(64, 8).bytes, Record(64, 4).bytes) == (66, 36)


def test_views_of_a_larger_projection(implementation: str) -> None:
    fused = torch.randn(3, 40)
    key, value = fused[:, 4:20].view(3, 2, 8), fused[:, 20:36].view(3, 2, 8)
    caches = [(torch.zeros(3, 2, 8, 4), torch.zeros(3, 2, 4, 8)) for _ in range(2)]
    rows = torch.tensor([4, 11, 6])
    paged_write(key, value, *caches[0], rows)
    paged_write(key.contiguous(), value.contiguous(), *caches[1], rows)
    assert all(torch.equal(*pair) for pair in zip(*caches, strict=True))
    assert implementation == "reference" or PAGED_WRITE.kernel_for(key, value, *caches[0], rows).name == "native"
