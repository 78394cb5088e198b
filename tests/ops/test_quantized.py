"""Products with quantized weights against float64: how far quantized activations may be off, and what is computed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.config.errors import UserError
from treadle.ops import native, quantized_linear, quantized_pack, quantized_rows
from treadle.ops.quantized_layout import FORMATS, file_fields

from .compare import ROUNDOFF, assert_close
from .gguf_weights import SHAPES, dequantized, gguf_bytes

QUANTIZED = [name for name in FORMATS if name != "BF16"]
FLOAT32 = ROUNDOFF[torch.float32]
TOKENS = [1, 2, 3, 4, 5, 6, 14, 41]
needs_native = pytest.mark.skipif(bool(native.missing()), reason="there is no native library here")


def weights(format: str, rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return packed weights and their values in float64."""
    file = gguf_bytes(format, rows, columns, seed)
    return quantized_pack(file, format, rows, columns), dequantized(file, format, rows, columns).double()


def by_group(x: Tensor) -> Tensor:
    return F.pad(x, (0, -x.shape[-1] % 32)).unflatten(-1, (-1, 32))


def steps(x: Tensor) -> Tensor:
    """Return the distance between neighbours of each activation's int8 grid."""
    grouped = by_group(x).double().abs()
    return (grouped.amax(-1, keepdim=True) / 127).expand_as(grouped).flatten(-2)[..., : x.shape[-1]]


def same(implementation: str, a: Tensor, b: Tensor) -> bool:
    """Whether the results agree: to the last bit, but for the reference, whose order of summation is PyTorch's."""
    return torch.allclose(a, b, 1e-5, 1e-5) if implementation == "reference" else torch.equal(a, b)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("rows", "columns", "dtype"), [*((*shape, torch.float32) for shape in SHAPES), (21, 256, torch.bfloat16)]
)
def test_error_stays_within_half_a_step(
    implementation: str, format: str, rows: int, columns: int, dtype: torch.dtype
) -> None:
    packed, weight = weights(format, rows, columns)
    for tokens in TOKENS:
        x = torch.randn(tokens, columns).to(dtype)
        out = quantized_linear(x, packed, format, rows)
        exact, size = x.double() @ weight.T, x.double().abs() @ weight.abs().T
        moved = x.double().abs() * 2**-8 if format == "BF16" else steps(x) / 2
        # Beside the activations' rounding: a rounding for each term's factor and sum, and the output's own.
        allowed = moved @ weight.abs().T * 1.0001 + (columns / 16 + 4) * FLOAT32 * size + ROUNDOFF[dtype] * exact.abs()
        assert ((out.double() - exact).abs() <= allowed).all()
        assert out.dtype == dtype


def product_of_integers(x: Tensor, file: Tensor, format: str, rows: int) -> tuple[Tensor, Tensor]:
    """Return what the kernels compute, in exact integers and float64, and the sum of the sizes of its terms.

    Written from the definitions: activations to int8 by their group's largest size, an integer dot product for every
    part of a group with a scale of its own, times both scales, plus the minimum times the sum of the activations.
    """
    known = FORMATS[format]
    fields = file_fields(known, file.view(rows, -1, known.file_bytes))
    grouped = by_group(x)
    largest = grouped.abs().amax(-1, keepdim=True)
    q = torch.where(largest > 0, (grouped * (127 / largest)).round(), 0.0).long()  # ties to even
    scale = (largest * torch.tensor(1 / 127)).double()[..., 0]
    parts = 2 if format == "Q6_K" else 1
    repeat = known.columns // 32
    weight_scale = fields.scale.double().repeat_interleave(repeat, 1)[..., None].expand(-1, -1, parts)
    if fields.group_scale is not None:
        weight_scale = weight_scale * fields.group_scale.double().view(rows, -1, parts)
    values = fields.values.long() - known.zero
    dots = torch.einsum("tgpk,rgpk->trgp", *(v.unflatten(-1, (parts, -1)).double() for v in (q, values)))
    terms = dots * weight_scale * scale[:, None, :, None]
    terms = terms.flatten(2)
    if fields.minimum is not None:
        minimum = fields.minimum.double().repeat_interleave(repeat, 1)
        if fields.group_minimum is not None:
            minimum = -minimum * fields.group_minimum
        terms = torch.cat([terms, minimum * (scale * q.sum(-1))[:, None]], -1)
    return terms.sum(-1), terms.abs().sum(-1)


@needs_native
@pytest.mark.parametrize("variant", native.runnable())
@pytest.mark.parametrize("format", QUANTIZED)
@pytest.mark.parametrize("size", [1.0, 1e30, 1e-30])
def test_integers_are_exact(variant: str, format: str, size: float) -> None:
    rows, columns = 19, 512
    file = gguf_bytes(format, rows, columns)
    packed = quantized_pack(file, format, rows, columns)
    before = native.variant()
    native.select(variant)
    try:
        x = torch.randn(7, columns) * torch.logspace(-3, 3, columns // 32).repeat_interleave(32) * size
        out = quantized_linear(x, packed, format, rows)
    finally:
        native.select(before)
    exact, total = product_of_integers(x, file, format, rows)
    # One rounding for a term's factor and one for each sum: far below a step of the activations.
    assert ((out.double() - exact).abs() <= (2 * columns / 16 + 4) * FLOAT32 * total).all()


@needs_native
@pytest.mark.parametrize("format", QUANTIZED)
def test_every_variant_gives_the_same_bits(format: str) -> None:
    packed, _ = weights(format, 49, 768)
    x, bias = torch.randn(23, 768), torch.randn(49)
    before = native.variant()
    outs = []
    try:
        for variant in native.runnable():
            native.select(variant)
            outs.append(quantized_linear(x, packed, format, 49, bias))
    finally:
        native.select(before)
    assert all(torch.equal(outs[0], out) for out in outs)


@needs_native
@pytest.mark.parametrize("format", FORMATS)
def test_a_token_does_not_depend_on_the_others(format: str, threads: None) -> None:
    """The same bits alone, in any batch, with any number of threads."""
    packed, _ = weights(format, 83, 512)
    x = torch.randn(200, 512)
    torch.set_num_threads(1)
    alone = torch.cat([quantized_linear(token[None], packed, format, 83) for token in x])
    for count in (*range(1, 9), 2, 1):
        torch.set_num_threads(count)
        for tokens in (2, 3, 5, 8, 17, 64, 200):
            assert torch.equal(quantized_linear(x[:tokens], packed, format, 83), alone[:tokens])


@pytest.mark.parametrize("format", FORMATS)
def test_values_that_are_not_finite_stay_in_their_token(implementation: str, format: str) -> None:
    packed, _ = weights(format, 20, 256)
    x = torch.randn(9, 256)
    clean = quantized_linear(x, packed, format, 20)
    for bad in (float("nan"), float("inf"), float("-inf")):
        spoilt = x.clone()
        spoilt[4, 37] = bad
        out = quantized_linear(spoilt, packed, format, 20)
        others = [0, 1, 2, 3, 5, 6, 7, 8]
        assert same(implementation, out[others], clean[others])
        assert not out[4].isfinite().any()
        if implementation != "reference" and format != "BF16":
            assert out[4].isnan().all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("fill", [0.0, -0.0, 1e-45, 3e-39, -3e-37, 1e33])
def test_equal_activations_of_any_size(implementation: str, format: str, fill: float) -> None:
    packed, weight = weights(format, 5, 256)
    x = torch.full((3, 256), fill)
    out = quantized_linear(x, packed, format, 5)
    size = (x.double().abs() @ weight.abs().T).max().item()
    exact = x.double() @ weight.T
    # Each is its group's largest, so none is rounded; groups below 4e-37 may count as zeros, bfloat16 rounds once.
    allowed = size * (2**-8 if format == "BF16" else 40 * FLOAT32) + 4e-37 * weight.abs().sum(1).max().item()
    assert (out.double() - exact).abs().max() <= allowed


@pytest.mark.parametrize("format", FORMATS)
def test_one_column_group_and_outliers(implementation: str, format: str) -> None:
    columns = FORMATS[format].columns
    packed, weight = weights(format, 3, columns)
    x = torch.randn(6, columns)
    x[:, 5] = torch.tensor([1e4, -1e4, 1e-4, 0, 300, -7])
    out = quantized_linear(x, packed, format, 3)
    moved = x.double().abs() * 2**-8 if format == "BF16" else steps(x) / 2
    allowed = moved @ weight.abs().T * 1.0001 + 40 * FLOAT32 * (x.double().abs() @ weight.abs().T)
    assert ((out.double() - x.double() @ weight.T).abs() <= allowed).all()


@pytest.mark.parametrize("format", FORMATS)
def test_memory_that_is_not_aligned(implementation: str, format: str) -> None:
    packed, _ = weights(format, 21, 256)
    x, bias = torch.randn(4, 256), torch.randn(21)
    straight = quantized_linear(x, packed, format, 21, bias)
    for offset in (1, 3, 7):
        shifted = torch.empty(packed.numel() + 8, dtype=torch.uint8)[offset : offset + packed.numel()].copy_(packed)
        wide = torch.zeros(4, 300)
        wide[:, offset : offset + 256] = x
        off_bias = torch.empty(40)[offset : offset + 21].copy_(bias)
        out = quantized_linear(wide[:, offset : offset + 256], shifted, format, 21, off_bias)
        assert same(implementation, out, straight)


@pytest.mark.parametrize("columns", [1, 33, 77])
def test_bfloat16_with_any_number_of_columns(implementation: str, columns: int) -> None:
    file = gguf_bytes("BF16", 18, columns)
    packed, weight = quantized_pack(file, "BF16", 18, columns), file.view(torch.bfloat16).view(18, columns).double()
    x = torch.randn(7, columns).bfloat16()
    size = (x.double().abs() @ weight.abs().T).max().item()
    assert_close(quantized_linear(x.float(), packed, "BF16", 18), x.double() @ weight.T, columns + 2, size)


def test_shapes_and_strides(implementation: str) -> None:
    packed, _ = weights("Q4_1", 37, 64)
    x = torch.randn(2, 3, 64)
    out = quantized_linear(x, packed, "Q4_1", 37)
    assert out.shape == (2, 3, 37)
    assert same(implementation, quantized_linear(x.transpose(0, 1), packed, "Q4_1", 37), out.transpose(0, 1))
    turned = x[0].T.contiguous().T
    assert same(implementation, quantized_linear(turned, packed, "Q4_1", 37), out[0])
    assert quantized_linear(x[:, :0], packed, "Q4_1", 37).shape == (2, 0, 37)


@pytest.mark.parametrize("format", ["Q4_0", "Q6_K"])
def test_gradients_are_those_of_the_dequantized_weights(implementation: str, format: str) -> None:
    packed, weight = weights(format, 21, 256)
    x, bias = torch.randn(4, 256, requires_grad=True), torch.randn(21, requires_grad=True)
    grad = torch.randn(4, 21)
    quantized_linear(x, packed, format, 21, bias).backward(grad)
    assert x.grad is not None and bias.grad is not None
    assert_close(x.grad, grad.double() @ weight, 40)
    assert_close(bias.grad, grad.double().sum(0), 8)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rows": 40}, "not a tensor of torch.uint8"),
        ({"format": "Q4_1"}, "pack them with quantized_pack"),
        ({"x": torch.zeros(2, 48)}, "blocks have 32 columns"),
        ({"bias": torch.zeros(3)}, "does not fit weights of 20 rows"),
    ],
)
def test_what_is_refused(change: dict, says: str) -> None:
    arguments = {"x": torch.zeros(2, 64), "packed": weights("Q4_0", 20, 64)[0], "format": "Q4_0", "rows": 20}
    with pytest.raises(UserError, match=says):
        quantized_linear(**{**arguments, **change})


def test_rows_are_the_embedding_of_the_same_memory(implementation: str) -> None:
    """One packed matrix serves as the embedding table and as the output head."""
    packed, weight = weights("Q8_0", 50, 64)
    tokens = torch.tensor([3, 49, 0, 3])
    assert torch.equal(quantized_rows(packed, tokens, "Q8_0", 50, 64).double(), weight[tokens])
