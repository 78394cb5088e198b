"""How quantized weights lie in memory: GGUF's blocks, and the tiles that the matrix kernels read.

A tile is 16 rows with their columns in blocks; `native/quantized.h` describes it, and this module is the readable and
slow twin of `native/quantized_pack.cpp`. Packing rounds nothing: values, scales and minimums are the file's own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from treadle.config.errors import UserError, nearest

TILE_ROWS, GROUP = 16, 32


@dataclass(frozen=True)
class Format:
    """One of GGUF's tensor types: how many columns a block has, and its bytes for one row (file) and for 16 (tile)."""

    name: str
    number: int  # GGUF's own
    columns: int
    file_bytes: int
    tile_bytes: int
    bits: int
    zero: int = 0  # a value q stands for scale * (q - zero) ...
    minimum: bool = False  # ... or for scale * q + minimum

    def tiles(self, rows: int) -> int:
        return -(-rows // TILE_ROWS)

    def blocks(self, columns: int) -> int:
        return -(-columns // self.columns)

    def packed_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes that `rows` x `columns` weights take as tiles."""
        return self.tiles(rows) * self.blocks(columns) * self.tile_bytes


FORMATS = {
    format.name: format
    for format in (
        Format("Q4_0", 2, 32, 18, 288, 4, zero=8),
        Format("Q4_1", 3, 32, 20, 320, 4, minimum=True),
        Format("Q5_0", 6, 32, 22, 352, 5, zero=16),
        Format("Q5_1", 7, 32, 24, 384, 5, minimum=True),
        Format("Q8_0", 8, 32, 34, 544, 8, zero=128),
        Format("Q4_K", 12, 256, 144, 2304, 4, minimum=True),
        Format("Q5_K", 13, 256, 176, 2816, 5, minimum=True),
        Format("Q6_K", 14, 256, 210, 3360, 6, zero=32),
        Format("BF16", 30, 32, 64, 1024, 16),
    )
}


def format_of(name: str, columns: int) -> Format:
    """Return the format `name`. Raises UserError where there is none, or where its blocks do not divide `columns`."""
    format = FORMATS.get(name)
    if format is None:
        hint = nearest(name, list(FORMATS)) or "; the kernels know " + ", ".join(FORMATS)
        raise UserError(f"there is no matrix kernel for weights of type '{name}'{hint}")
    if columns % format.columns and name != "BF16":
        raise UserError(
            f"weights with {columns} columns cannot be of type {name}, whose blocks have {format.columns} columns"
        )
    return format


@dataclass(frozen=True)
class Fields:
    """What a matrix of R rows and G groups of 32 columns holds; B blocks."""

    values: UInt8[Tensor, "R G 32"]
    scale: Tensor  # [R, B] float16
    minimum: Tensor | None = None  # [R, B] float16; of the K formats it is subtracted
    group_scale: Tensor | None = None  # [R, G] uint8 or, of Q6_K, [R, G, 2] int8
    group_minimum: Tensor | None = None  # [R, G] uint8


def dequantize(format: Format, fields: Fields) -> Float[Tensor, "R K"]:
    """Return the weights in float32, by the formulas and roundings of GGUF's definition."""
    values, scale = fields.values.float(), fields.scale.float()
    rows, groups = values.shape[:2]
    repeats = groups // max(scale.shape[1], 1)
    scale = scale.repeat_interleave(repeats, 1)[..., None]
    if fields.group_scale is not None and fields.group_minimum is not None and fields.minimum is not None:
        scale = scale * fields.group_scale.float()[..., None]
        below = fields.minimum.float().repeat_interleave(repeats, 1) * fields.group_minimum.float()
        return (scale * values - below[..., None]).flatten(1)
    if fields.minimum is not None:
        return (scale * values + fields.minimum.float()[..., None]).flatten(1)
    if fields.group_scale is not None:  # one for each half of a group
        scale = (scale * fields.group_scale.float()).repeat_interleave(GROUP // 2, 2)
    return (scale * (values - format.zero)).reshape(rows, -1)


def file_fields(format: Format, file: UInt8[Tensor, "R B bytes"]) -> Fields:
    """Take a GGUF file's blocks apart (all formats but BF16)."""

    def half(at: int) -> Tensor:
        return file[..., at : at + 2].contiguous().view(torch.float16)[..., 0]

    def nibbles(at: int) -> Tensor:  # the first 16 columns in the low nibbles of 16 bytes
        packed = file[..., at : at + 16]
        return torch.cat([packed & 15, packed >> 4], -1)

    if format.name in ("Q4_0", "Q4_1"):
        at = 4 if format.minimum else 2
        return Fields(nibbles(at), half(0), half(2) if format.minimum else None)
    if format.name in ("Q5_0", "Q5_1"):
        at = 4 if format.minimum else 2
        high = (file[..., at : at + 4, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)
        return Fields(nibbles(at + 4) | high << 4, half(0), half(2) if format.minimum else None)
    if format.name == "Q8_0":
        return Fields(file[..., 2:] ^ 128, half(0))
    if format.name == "Q6_K":
        return _q6_k(file, half(208))
    low_bits, high_bits, mixed = file[..., 4:8], file[..., 8:12], file[..., 12:16]
    scale = torch.cat([low_bits & 63, mixed & 15 | low_bits >> 6 << 4], -1).flatten(1)
    minimum = torch.cat([high_bits & 63, mixed >> 4 | high_bits >> 6 << 4], -1).flatten(1)
    packed = file[..., -128:].unflatten(-1, (4, 1, 32))
    values = torch.cat([packed & 15, packed >> 4], -2).flatten(-3, -2)
    if format.name == "Q5_K":
        values = values | (file[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1) << 4
    return Fields(values.flatten(1, 2), half(0), half(2), scale, minimum)


def _q6_k(file: Tensor, scale: Tensor) -> Fields:
    low = file[..., :128].unflatten(-1, (2, 1, 2, 32))
    low = torch.cat([low & 15, low >> 4], -3).flatten(-4, -2)
    high = file[..., 128:192].unflatten(-1, (2, 1, 32)) >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3
    values = (low | high.flatten(-3, -2) << 4).flatten(1, 2)
    scales = file[..., 192:208].contiguous().view(torch.int8).unflatten(-1, (8, 2))
    return Fields(values, scale, group_scale=scales.flatten(1, 2))


def pack_fields(format: Format, fields: Fields) -> UInt8[Tensor, " bytes"]:
    """Return the tiles that hold `fields` (all formats but BF16)."""
    fields = _whole_tiles(fields)
    values = fields.values.unflatten(0, (-1, TILE_ROWS))  # [tiles, 16, G, 32]
    tiles = values.shape[0]

    def by_rows(field: Tensor) -> Tensor:
        """[R, N] or [R, N, parts] -> [tiles, N, parts x 16 x itemsize] bytes."""
        if field.dim() == 2:
            field = field[..., None]
        side_by_side = field.unflatten(0, (-1, TILE_ROWS)).permute(0, 2, 3, 1).contiguous()
        return side_by_side.view(torch.uint8).flatten(2)

    per_group = []
    if fields.group_scale is not None and fields.group_minimum is not None:
        per_group.append(by_rows(fields.group_scale & 15 | (fields.group_minimum & 15) << 4))
    elif fields.group_scale is not None:
        per_group.append(by_rows(fields.group_scale))
    if format.bits == 8:
        per_group.append(values.unflatten(-1, (8, 4)).permute(0, 2, 3, 1, 4).flatten(2))
    else:
        per_group += _planes(format.bits - 4, values)
        low, high = (values & 15).unflatten(-1, (2, 4, 4)).unbind(3)
        per_group.append((low | high << 4).permute(0, 2, 3, 1, 4).flatten(2))
    blocks = fields.scale.shape[1]
    per_block = [by_rows(fields.scale)]
    if fields.minimum is not None:
        per_block.append(by_rows(fields.minimum))
    if fields.group_scale is not None and fields.group_minimum is not None:
        per_block.append(_high_bits(fields.group_scale, fields.group_minimum))
    grouped = torch.cat(per_group, 2).reshape(tiles, blocks, -1)
    return torch.cat([*per_block, grouped], 2).flatten()


def _whole_tiles(fields: Fields) -> Fields:
    """Return `fields` with rows of zeros up to a multiple of 16."""
    missing = -fields.values.shape[0] % TILE_ROWS
    return replace(
        fields,
        **{
            name: torch.cat([field, field.new_zeros(missing, *field.shape[1:])])
            for name, field in vars(fields).items()
            if field is not None
        },
    )


def _planes(width: int, values: Tensor) -> list[Tensor]:
    """Return the bits above the nibble, `width` of them a value, as bytes that hold 8 / width columns 4 apart."""
    if width == 0:
        return []
    apart = (values >> 4).unflatten(-1, (width, 8 // width, 4))
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)[:, None]
    return [(apart << shifts).sum(4, dtype=torch.uint8).permute(0, 2, 3, 1, 4).flatten(2)]


def _high_bits(scale: Tensor, minimum: Tensor) -> Tensor:
    """Return a 32-bit word for each row and block: 2 bits of each of 8 scales and of each minimum."""
    bits = (scale >> 4 | minimum >> 4 << 2).to(torch.int64).unflatten(1, (-1, 8))
    words = (bits << torch.arange(0, 32, 4)).sum(-1)  # [R, B], 32 bits
    as_bytes = (words[..., None] >> torch.arange(0, 32, 8) & 255).to(torch.uint8)
    return as_bytes.unflatten(0, (-1, TILE_ROWS)).permute(0, 2, 1, 3).flatten(2)


def tile_fields(format: Format, packed: UInt8[Tensor, " bytes"], columns: int) -> Fields:
    """Take tiles apart (all formats but BF16); rows of zeros at the end included."""
    blocks, per_block = format.blocks(columns), format.columns // GROUP
    block = packed.view(-1, blocks, format.tile_bytes)

    def halves(at: int) -> Tensor:
        return block[..., at : at + 32].contiguous().view(torch.float16).transpose(1, 2).flatten(0, 1)

    def by_rows(field: Tensor) -> Tensor:
        """[tiles, G, 16] -> [R, G]."""
        return field.transpose(1, 2).flatten(0, 1)

    scale, minimum = halves(0), halves(32) if format.minimum else None
    header = 32 + 32 * format.minimum + 64 * (format.minimum and per_block == 8)
    group = block[..., header:].reshape(block.shape[0], columns // GROUP, -1)
    group_scale = group_minimum = None
    if per_block == 8 and format.minimum:
        words = block[..., 64:128].unflatten(-1, (TILE_ROWS, 4)).to(torch.int64) << torch.arange(0, 32, 8)
        high = words.sum(-1)[..., None] >> torch.arange(0, 32, 4)  # [tiles, B, 16, 8]
        high = high.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)
        low = by_rows(group[..., :16])
        group_scale = (low & 15 | (high & 3).to(torch.uint8) << 4).to(torch.uint8)
        group_minimum = (low >> 4 | (high >> 2 & 3).to(torch.uint8) << 4).to(torch.uint8)
        group = group[..., 16:]
    elif per_block == 8:
        pair = group[..., :32].contiguous().view(torch.int8).unflatten(-1, (2, TILE_ROWS))
        group_scale = pair.permute(0, 3, 1, 2).flatten(0, 1)
        group = group[..., 32:]
    return Fields(_tile_values(format, group), scale, minimum, group_scale, group_minimum)


def _tile_values(format: Format, group: Tensor) -> UInt8[Tensor, "R G 32"]:
    if format.bits == 8:
        return group.unflatten(-1, (8, TILE_ROWS, 4)).permute(0, 3, 1, 2, 4).flatten(3).flatten(0, 1)
    packed = group[..., -256:].unflatten(-1, (1, 4, TILE_ROWS, 4))
    values = torch.cat([packed & 15, packed >> 4], 2).permute(0, 4, 1, 2, 3, 5).flatten(3)
    if width := format.bits - 4:
        plane = group[..., : 64 * width].unflatten(-1, (width, TILE_ROWS, 1, 4))
        shifts = torch.arange(0, 8, width, dtype=torch.uint8)[:, None]
        high = plane >> shifts & ((1 << width) - 1)  # [tiles, G, width, 16, 8 / width, 4]
        values = values | high.permute(0, 3, 1, 2, 4, 5).flatten(3) << 4
    return values.flatten(0, 1)


def pack_file(format: Format, file: UInt8[Tensor, " bytes"], rows: int, columns: int) -> UInt8[Tensor, " bytes"]:
    """Return the tiles of a GGUF tensor's bytes."""
    if format.name == "BF16":
        padded = torch.zeros(format.tiles(rows) * TILE_ROWS, format.blocks(columns) * GROUP, dtype=torch.int16)
        padded[:rows, :columns] = file.clone().view(torch.int16).view(rows, columns)
        pairs = padded.view(-1, TILE_ROWS, padded.shape[1] // 2, 2).transpose(1, 2).contiguous()
        return pairs.view(torch.uint8).flatten()
    return pack_fields(format, file_fields(format, file.view(rows, columns // format.columns, format.file_bytes)))


def unpack_tiles(format: Format, packed: UInt8[Tensor, " bytes"], rows: int, columns: int) -> Float[Tensor, "R K"]:
    """Return the float32 weights that tiles hold."""
    if format.name == "BF16":
        pairs = packed.clone().view(torch.bfloat16).view(-1, format.blocks(columns) * GROUP // 2, TILE_ROWS, 2)
        return pairs.transpose(1, 2).flatten(2).flatten(0, 1)[:rows, :columns].float()
    return dequantize(format, tile_fields(format, packed, columns))[:rows]
