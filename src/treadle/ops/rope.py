"""Rotary position embedding (Su et al. 2021, section 3.4.2). The model makes the angles, whatever their scaling."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from treadle.ops import native
from treadle.ops.native import abi
from treadle.ops.registry import Operator
from treadle.ops.tensors import accumulator, like


def rope_reference(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, inverse: bool = False) -> Tensor:
    rotated = 2 * cos.shape[-1]
    wide = x[..., :rotated].to(accumulator(x.dtype))
    cos, sin = cos.to(wide.dtype)[:, None], sin.to(wide.dtype)[:, None]
    if inverse:
        sin = -sin
    if interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = wide.chunk(2, -1)
    pair = first * cos - second * sin, second * cos + first * sin
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((turned.to(x.dtype), x[..., rotated:]), -1)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, cos, sin, ctx.interleaved, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, grad: Tensor) -> Any:
    cos, sin = ctx.saved_tensors
    # A rotation's transpose is its inverse: the gradient turns back by the same angles.
    return ROPE.call(grad, cos, sin, ctx.interleaved, not ctx.inverse), None, None, None, None


ROPE = Operator(
    "rope",
    "(Tensor x, Tensor cos, Tensor sin, bool interleaved=False, bool inverse=False) -> Tensor",
    rope_reference,
    fake=lambda x, cos, sin, interleaved=False, inverse=False: like(x),
    backward=_backward,
    setup_context=_setup,
)


def _fits(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, inverse: bool = False) -> bool:
    return (
        abi.on_cpu(x)
        and x.dim() == 3
        and cos.is_cpu
        and cos.dtype == sin.dtype == torch.float32
        and cos.shape == sin.shape == (x.shape[0], cos.shape[-1])
        and 2 * cos.shape[-1] <= x.shape[-1]
    )


_rope = abi.function("rope")


@ROPE.kernel("native", native.missing, accepts=_fits, takes="float32 or bfloat16 on CPU, float32 angles")
def _native(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, inverse: bool = False) -> Tensor:
    x, cos, sin = abi.by_rows(x), cos.contiguous(), sin.contiguous()
    out = like(x)
    tokens, heads, size = x.shape
    arguments = abi.Rope(
        abi.DTYPES[x.dtype],
        interleaved,
        inverse,
        heads,
        size,
        cos.shape[-1],
        abi.rows_of(x),
        abi.dense_rows(out),
        cos.data_ptr(),
        sin.data_ptr(),
    )
    _rope(arguments, tokens * heads, torch.get_num_threads())
    return out


def rope(
    x: Float[Tensor, "T H E"], cos: Float[Tensor, "T R"], sin: Float[Tensor, "T R"], interleaved: bool = False
) -> Float[Tensor, "T H E"]:
    """Return x with its first 2R channels rotated, pair r of token t by the angle whose cosine and sine are given.

    Pair r is channels (r, r + R), or (2r, 2r + 1) when `interleaved`. No gradient flows to cos and sin.
    """
    return ROPE.call(x, cos, sin, interleaved)
