"""The C structures and functions of quantized.h."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from treadle.ops import native
from treadle.ops.native import abi

_I32, _I64, _POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


class PackWeights(ctypes.Structure):
    _fields_ = [
        ("format", _I32),
        ("rows", _I64),
        ("columns", _I64),
        ("file_stride", _I64),
        ("file", _POINTER),
        ("packed", _POINTER),
    ]


class UnpackRows(ctypes.Structure):
    _fields_ = [
        ("format", _I32),
        ("columns", _I64),
        ("packed", _POINTER),
        ("indices", _POINTER),
        ("out", _POINTER),
    ]


class PrepareActivations(ctypes.Structure):
    _fields_ = [
        ("format", _I32),
        ("type", _I32),
        ("tokens", _I64),
        ("columns", _I64),
        ("stride", _I64),
        ("x", _POINTER),
        ("out", _POINTER),
    ]


class QuantizedLinear(ctypes.Structure):
    _fields_ = [
        ("format", _I32),
        ("type", _I32),
        ("rows", _I64),
        ("columns", _I64),
        ("tokens", _I64),
        ("weights", _POINTER),
        ("activations", _POINTER),
        ("bias", _POINTER),
        ("add", _POINTER),
        ("out", _POINTER),
        ("add_stride", _I64),
        ("out_stride", _I64),
    ]


@functools.cache
def _function(name: str) -> Any:
    found = getattr(native.library(), f"treadle_quantized_{name}")
    found.argtypes, found.restype = _SIGNATURES[name], _I64 if name == "token_bytes" else _I32
    return found


_SIGNATURES = {
    "pack": [_POINTER, _I32],
    "unpack": [_POINTER, _I64, _I32],
    "prepare": [_POINTER, _I32],
    "linear": [_POINTER, _I32],
    "token_bytes": [_I32, _I64],
}


def pack(file: Tensor, format: int, rows: int, columns: int, file_stride: int, packed: Tensor) -> None:
    """Write the tiles of a GGUF tensor, its rows `file_stride` bytes apart, to `packed`."""
    arguments = PackWeights(format, rows, columns, file_stride, file.data_ptr(), packed.data_ptr())
    _function("pack")(ctypes.byref(arguments), torch.get_num_threads())


def unpack(packed: Tensor, format: int, columns: int, indices: Tensor, out: Tensor) -> None:
    """Write the float32 values of the rows that `indices` (int64, in range) names to `out`."""
    arguments = UnpackRows(format, columns, packed.data_ptr(), indices.data_ptr(), out.data_ptr())
    _function("unpack")(ctypes.byref(arguments), indices.numel(), torch.get_num_threads())


def prepare(x: Tensor, format: int) -> Tensor:
    """Return the activations x [T, K] (rows dense in K) as the kernels for weights of `format` take them."""
    tokens, columns = x.shape
    out = torch.empty(tokens * _function("token_bytes")(format, columns), dtype=torch.uint8)
    arguments = PrepareActivations(
        format, abi.DTYPES[x.dtype], tokens, columns, x.stride(0), x.data_ptr(), out.data_ptr()
    )
    _function("prepare")(ctypes.byref(arguments), torch.get_num_threads())
    return out


def linear(
    activations: Tensor, packed: Tensor, format: int, columns: int, bias: Tensor | None, add: Tensor | None, out: Tensor
) -> None:
    """Write the product of prepared activations and packed weights, plus `bias` and `add`, to `out` [T, rows].

    `bias` is float32 [rows]; `add` has out's type and shape and may be out itself.
    """
    tokens, rows = out.shape
    arguments = QuantizedLinear(
        format,
        abi.DTYPES[out.dtype],
        rows,
        columns,
        tokens,
        packed.data_ptr(),
        activations.data_ptr(),
        None if bias is None else bias.data_ptr(),
        None if add is None else add.data_ptr(),
        out.data_ptr(),
        0 if add is None else add.stride(0),
        out.stride(0),
    )
    _function("linear")(ctypes.byref(arguments), torch.get_num_threads())
