"""Packed weights against the gguf package's dequantization, bit for bit."""

from __future__ import annotations

import pytest
import torch

from treadle.config.errors import UserError
from treadle.ops import quantized_pack, quantized_rows
from treadle.ops.quantized_layout import FORMATS, pack_file

from .gguf_weights import SHAPES, dequantized, gguf_bytes


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_every_weight_keeps_its_bits(implementation: str, format: str, rows: int, columns: int) -> None:
    file = gguf_bytes(format, rows, columns)
    packed = quantized_pack(file, format, rows, columns)
    assert torch.equal(packed, pack_file(FORMATS[format], file, rows, columns))
    exact = dequantized(file, format, rows, columns)
    assert torch.equal(quantized_rows(packed, torch.arange(rows), format, rows, columns), exact)
    some = torch.randint(rows, (2, 3))
    assert torch.equal(quantized_rows(packed, some, format, rows, columns), exact[some])


@pytest.mark.parametrize("columns", [1, 31, 32, 77])
def test_bfloat16_takes_any_number_of_columns(implementation: str, columns: int) -> None:
    file = gguf_bytes("BF16", 19, columns)
    packed = quantized_pack(file, "BF16", 19, columns)
    exact = file.view(torch.bfloat16).view(19, columns).float()
    assert torch.equal(quantized_rows(packed, torch.arange(19), "BF16", 19, columns), exact)


@pytest.mark.parametrize("format", [name for name in FORMATS if name != "BF16"])
def test_scales_of_every_kind(implementation: str, format: str) -> None:
    """Subnormal, largest, infinite and negative zero scales; a scale that is not a number stays one."""
    known, rows = FORMATS[format], 16
    blocks = gguf_bytes(format, rows, 256).view(-1, known.file_bytes)
    scales = torch.tensor([1e-7, 65504.0, float("inf"), -0.0, float("nan"), -6e-8], dtype=torch.float16)
    at = 208 if format == "Q6_K" else 0
    chosen = scales[torch.arange(len(blocks)) % len(scales)]
    blocks[:, at : at + 2] = chosen[:, None].view(torch.uint8)
    packed = quantized_pack(blocks, format, rows, 256)
    found = quantized_rows(packed, torch.arange(rows), format, rows, 256)
    exact = dequantized(blocks.flatten(), format, rows, 256)
    assert torch.equal(found.isnan(), exact.isnan())
    assert torch.equal(found.nan_to_num(7), exact.nan_to_num(7))


def test_no_rows() -> None:
    packed = quantized_pack(torch.empty(0, dtype=torch.uint8), "Q4_0", 0, 64)
    assert packed.numel() == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("Q4_2", 2, 64), "did you mean"),
        (("IQ4_XS", 2, 64), "no matrix kernel"),
        (("Q4_0", 2, 48), "blocks have 32 columns"),
        (("Q4_K", 2, 576), "blocks have 256 columns"),
        (("Q4_0", 3, 64), "take 108 bytes, not 72"),
    ],
)
def test_what_is_refused(arguments: tuple, says: str) -> None:
    with pytest.raises(UserError, match=says):
        quantized_pack(gguf_bytes("Q4_0", 2, 64), *arguments)


def test_rows_that_are_not_there() -> None:
    packed = quantized_pack(gguf_bytes("Q4_0", 20, 64), "Q4_0", 20, 64)
    for index in (-1, 20):
        with pytest.raises(IndexError, match="of a matrix of 20 rows"):
            quantized_rows(packed, torch.tensor([0, index]), "Q4_0", 20, 64)
