"""The C structures of kernels.h, and how tensors are described to them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from treadle.config.errors import TreadleError
from treadle.ops import native

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4}

_I32, _I64, _F32, _BOOL, _POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_bool, ctypes.c_void_p


def _structure(name: str, *fields: tuple[str, Any]) -> Any:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields)})


def _named(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


Rows = _structure("Rows", ("data", _POINTER), *_named(_I64, "group outer inner"))
_NORM = (*_named(_I32, "x_type weight_type"), ("width", _I64), *_named(_F32, "eps offset"))
RmsNorm = _structure("RmsNorm", *_NORM, *_named(Rows, "x residual out total"), ("weight", _POINTER))
RmsNormBackward = _structure("RmsNormBackward", *_NORM, *_named(Rows, "grad x extra grad_x"), ("weight", _POINTER))
GatedActivation = _structure(
    "GatedActivation",
    *_named(_I32, "type kind"),
    ("width", _I64),
    *_named(Rows, "gate up out grad grad_gate grad_up"),
)
Rope = _structure(
    "Rope",
    ("type", _I32),
    *_named(_BOOL, "interleaved inverse"),
    *_named(_I64, "heads width pairs"),
    *_named(Rows, "x out"),
    *_named(_POINTER, "cos sin"),
)
CrossEntropy = _structure(
    "CrossEntropy",
    ("type", _I32),
    ("vocabulary", _I64),
    ("softcap", _F32),
    ("with_gradients", _BOOL),
    *_named(_POINTER, "logits targets weights losses"),
)

Sample = _structure(
    "Sample",
    ("type", _I32),
    ("vocabulary", _I64),
    *_named(_POINTER, "logits odds temperature top_k top_p min_p uniform tokens"),
)
PagedCache = _structure(
    "PagedCache",
    ("type", _I32),
    *_named(_I64, "blocks kv_heads block_size size"),
    *_named(_POINTER, "keys values"),
)
PagedWrite = _structure(
    "PagedWrite", ("type", _I32), ("cache", PagedCache), *_named(Rows, "key value"), ("rows", _POINTER)
)
PagedAttention = _structure(
    "PagedAttention",
    ("type", _I32),
    ("cache", PagedCache),
    ("heads", _I64),
    *_named(_F32, "scale softcap"),
    ("window", _I64),
    *_named(Rows, "q out"),
    ("sinks", _POINTER),
    *_named(_I64, "sequences width"),
    *_named(_POINTER, "tables starts lengths"),
    ("tokens", _I64),
)

# In the order in which the library's `treadle_size` counts them.
STRUCTURES = (
    Rows,
    RmsNorm,
    RmsNormBackward,
    GatedActivation,
    Rope,
    CrossEntropy,
    Sample,
    PagedCache,
    PagedWrite,
    PagedAttention,
)

NO_ROWS = (None, 1, 0, 0)


def by_rows(x: Tensor) -> Tensor:
    """Return x, or a contiguous copy where its rows (last dim) cannot be described by two strides."""
    if x.is_contiguous() or (x.dim() in (2, 3) and x.stride(-1) == 1):
        return x
    return x.contiguous()


def rows_of(x: Tensor) -> tuple[int, int, int, int]:
    """Describe a tensor that `by_rows` returned."""
    if x.dim() == 3:
        return x.data_ptr(), x.shape[1], x.stride(0), x.stride(1)
    return x.data_ptr(), 1, x.stride(0) if x.dim() == 2 else x.shape[-1], 0


def dense_rows(x: Tensor) -> tuple[int, int, int, int]:
    """Describe a contiguous tensor of any number of dims."""
    return x.data_ptr(), 1, x.shape[-1] if x.dim() else 1, 0


def on_cpu(*tensors: Tensor) -> bool:
    """Return whether all tensors are of a type that the kernels take and lie in main memory."""
    return all(x.dtype in DTYPES and x.is_cpu for x in tensors)


def function(name: str, *pointers: Any) -> Callable[..., bool]:
    """Return the library's function `treadle_<name>`.

    It takes the argument structure, the further `pointers`, the number of rows and the number of threads, and returns
    whether all rows that the arguments name exist (where the function looks). It raises TreadleError where memory is
    short. The library is loaded on the first call.
    """
    found: Any = None

    def call(arguments: Any, *rest: int) -> bool:
        nonlocal found
        if found is None:
            found = getattr(native.library(), f"treadle_{name}")
            found.argtypes, found.restype = [_POINTER, *pointers, _I64, _I32], _I32
        code = found(ctypes.byref(arguments), *rest)
        if code == -1:
            raise TreadleError(f"out of memory in the native kernel {name}; use a smaller batch")
        return code == 0

    return call
