"""Linear layers whose weights stay quantized, as GGUF has them: packing, products, and single rows (an embedding).

`quantized_pack` brings a GGUF tensor's bytes into tiles, once; `quantized_linear` multiplies with them;
`quantized_rows` reads rows back in float32. The reference multiplies dequantized float32 weights with float32
activations. The native kernels quantize the activations to int8 too, with one scale for each token and 32 columns (to
bfloat16 for BF16 weights): each activation moves by half a step at most, its group's largest size / 254, so an output
moves by at most the sum over the columns of |weight| times that. Integer dot products are exact, so a token's outputs
do not depend on the other tokens in the call. A token with a value that is not finite gets NaN everywhere.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from treadle.config.errors import UserError
from treadle.ops import native
from treadle.ops.native import abi
from treadle.ops.native import quantized as kernels
from treadle.ops.quantized_layout import FORMATS, Format, format_of, pack_file, unpack_tiles
from treadle.ops.registry import Operator


def _pack_reference(file: Tensor, format: str, rows: int, columns: int) -> Tensor:
    return pack_file(FORMATS[format], file, rows, columns)


def _rows_reference(packed: Tensor, indices: Tensor, format: str, rows: int, columns: int) -> Tensor:
    return unpack_tiles(FORMATS[format], packed, rows, columns)[indices]


def _linear_reference(x: Tensor, packed: Tensor, format: str, rows: int, bias: Tensor | None = None) -> Tensor:
    weight = unpack_tiles(FORMATS[format], packed, rows, x.shape[-1])
    out = F.linear(x.float(), weight, None if bias is None else bias.float())
    return out.to(x.dtype)


def _linear_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, packed, ctx.format, ctx.rows, bias = inputs
    ctx.columns, ctx.has_bias = x.shape[-1], bias is not None
    ctx.save_for_backward(packed)


def _linear_backward(ctx: Any, grad: Tensor) -> Any:
    (packed,) = ctx.saved_tensors
    everything = torch.arange(ctx.rows, device=packed.device)
    weight = ROWS.call(packed, everything, ctx.format, ctx.rows, ctx.columns)
    grad_bias = grad.flatten(0, -2).float().sum(0) if ctx.has_bias else None
    return (grad.float() @ weight).to(grad.dtype), None, None, None, grad_bias


PACK = Operator(
    "quantized_pack",
    "(Tensor file, str format, int rows, int columns) -> Tensor",
    _pack_reference,
    fake=lambda file, format, rows, columns: file.new_empty(FORMATS[format].packed_bytes(rows, columns)),
)
ROWS = Operator(
    "quantized_rows",
    "(Tensor packed, Tensor indices, str format, int rows, int columns) -> Tensor",
    _rows_reference,
    fake=lambda packed, indices, format, rows, columns: packed.new_empty(
        (*indices.shape, columns), dtype=torch.float32
    ),
)
LINEAR = Operator(
    "quantized_linear",
    "(Tensor x, Tensor packed, str format, int rows, Tensor? bias=None) -> Tensor",
    _linear_reference,
    fake=lambda x, packed, format, rows, bias=None: x.new_empty((*x.shape[:-1], rows)),
    backward=_linear_backward,
    setup_context=_linear_setup,
)


@PACK.kernel("native", native.missing, accepts=lambda file, *rest: file.is_cpu, takes="main memory")
def _pack_native(file: Tensor, format: str, rows: int, columns: int) -> Tensor:
    known, file = FORMATS[format], file.contiguous()
    packed = torch.empty(known.packed_bytes(rows, columns), dtype=torch.uint8)
    stride = 2 * columns if format == "BF16" else columns // known.columns * known.file_bytes
    kernels.pack(file, known.number, rows, columns, stride, packed)
    return packed


@ROWS.kernel("native", native.missing, accepts=lambda packed, *rest: packed.is_cpu, takes="main memory")
def _rows_native(packed: Tensor, indices: Tensor, format: str, rows: int, columns: int) -> Tensor:
    out = torch.empty((*indices.shape, columns), dtype=torch.float32)
    kernels.unpack(packed, FORMATS[format].number, columns, indices.to(torch.int64).contiguous(), out)
    return out


@LINEAR.kernel(
    "native",
    native.missing,
    accepts=lambda x, packed, format, rows, bias=None: abi.on_cpu(x) and packed.is_cpu,
    takes="float32 or bfloat16 on CPU; activations in int8 (bfloat16 for BF16 weights)",
)
def _linear_native(x: Tensor, packed: Tensor, format: str, rows: int, bias: Tensor | None = None) -> Tensor:
    columns = x.shape[-1]
    flat = x.reshape(-1, columns)
    if flat.stride(-1) != 1:
        flat = flat.contiguous()
    out = torch.empty((*x.shape[:-1], rows), dtype=x.dtype)
    bias = None if bias is None else bias.to(torch.float32).contiguous()
    number = FORMATS[format].number
    kernels.linear(kernels.prepare(flat, number), packed, number, columns, bias, None, out.view(-1, rows))
    return out


def _check_packed(packed: Tensor, format: Format, rows: int, columns: int) -> None:
    expected = format.packed_bytes(rows, columns)
    if packed.dtype != torch.uint8 or packed.dim() != 1 or packed.numel() != expected or not packed.is_contiguous():
        raise UserError(
            f"{rows} x {columns} weights of type {format.name} are {expected} packed bytes, "
            f"not a tensor of {packed.dtype} and shape {list(packed.shape)}; pack them with quantized_pack"
        )


def quantized_pack(file: UInt8[Tensor, "..."], format: str, rows: int, columns: int) -> UInt8[Tensor, " bytes"]:
    """Return the tiles of a GGUF tensor's bytes, `rows` x `columns` weights of the type that `format` names.

    Raises UserError for a type without kernels, for columns that its blocks do not divide, and for bytes that are
    too few or too many.
    """
    known = format_of(format, columns)
    expected = rows * (2 * columns if format == "BF16" else columns // known.columns * known.file_bytes)
    if file.dtype != torch.uint8 or file.numel() != expected:
        raise UserError(
            f"{rows} x {columns} weights of type {format} take {expected} bytes, "
            f"not {file.numel()} values of {file.dtype}"
        )
    return PACK.call(file.reshape(-1), format, rows, columns)


def quantized_rows(
    packed: UInt8[Tensor, " bytes"], indices: Int[Tensor, "*batch"], format: str, rows: int, columns: int
) -> Float[Tensor, "*batch K"]:
    """Return rows of packed weights in float32, exactly as GGUF defines them.

    Raises UserError as `quantized_linear` does, IndexError for an index outside [0, rows).
    """
    _check_packed(packed, format_of(format, columns), rows, columns)
    if indices.numel() and not (int(indices.min()) >= 0 and int(indices.max()) < rows):
        raise IndexError(f"rows {int(indices.min())} to {int(indices.max())} of a matrix of {rows} rows")
    return ROWS.call(packed, indices, format, rows, columns)


def quantized_linear(
    x: Float[Tensor, "*batch K"],
    packed: UInt8[Tensor, " bytes"],
    format: str,
    rows: int,
    bias: Float[Tensor, " rows"] | None = None,
) -> Float[Tensor, "*batch rows"]:
    """Return x @ W.T + bias in x's dtype, W being `rows` x K weights that `quantized_pack` packed.

    Differentiable in x and bias. Raises UserError where `packed` or `bias` does not fit.
    """
    _check_packed(packed, format_of(format, x.shape[-1]), rows, x.shape[-1])
    if bias is not None and bias.shape != (rows,):
        raise UserError(f"a bias of shape {list(bias.shape)} does not fit weights of {rows} rows")
    return LINEAR.call(x, packed, format, rows, bias)
