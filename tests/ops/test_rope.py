"""Rotary embedding against Transformers' functions and complex multiplication."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from treadle.ops import rope
from treadle.ops.rope import ROPE

from .compare import assert_close, double


def angles(tokens: int, pairs: int) -> tuple[Tensor, Tensor]:
    angle = torch.randn(tokens, pairs, dtype=torch.float64) * 3
    return angle.cos().float(), angle.sin().float()


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Turn pairs of channels as complex numbers."""
    pairs = cos.shape[1]
    out = x.clone()
    channel = torch.arange(pairs)
    first, second = (2 * channel, 2 * channel + 1) if interleaved else (channel, channel + pairs)
    product = torch.complex(x[..., first], x[..., second]) * torch.complex(cos.double(), sin.double())[:, None]
    out[..., first], out[..., second] = product.real, product.imag
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "shape", [(1, 1, 2, 1), (5, 3, 16, 8), (7, 2, 20, 3), (300, 4, 66, 33), (0, 2, 8, 4), (3, 2, 5, 0)]
)
def test_forward_and_backward_in_float64(
    implementation: str, shape: tuple, interleaved: bool, dtype: torch.dtype
) -> None:
    tokens, heads, size, pairs = shape
    x = torch.randn(tokens, heads, size).to(dtype).requires_grad_()
    cos, sin = angles(tokens, pairs)
    (exact_x,) = double(x)
    out = rope(x, cos, sin, interleaved)
    exact = turned(exact_x, cos, sin, interleaved)
    roundings = 3 if dtype == torch.float32 else 1.1
    assert_close(out, exact, roundings)
    grad = torch.randn(tokens, heads, size).to(dtype)
    out.backward(grad)
    exact.backward(grad.double())
    assert x.grad is not None and exact_x.grad is not None
    assert_close(x.grad, exact_x.grad, roundings)


def test_the_same_as_transformers(implementation: str) -> None:
    q, k = torch.randn(9, 4, 32), torch.randn(9, 2, 32)
    cos, sin = angles(9, 16)
    whole = [torch.cat((part, part), -1)[None] for part in (cos, sin)]
    theirs = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], *whole)
    for x, expected in zip((q, k), theirs, strict=True):
        assert torch.allclose(rope(x, cos, sin), expected[0].transpose(0, 1), rtol=0, atol=1e-6)


def test_the_rest_of_a_head_is_left_as_it_is(implementation: str) -> None:
    x = torch.randn(4, 2, 21)
    x[1, 1, 20] = torch.nan
    out = rope(x, *angles(4, 5))
    assert torch.equal(out[..., 10:].nan_to_num(7), x[..., 10:].nan_to_num(7))


def test_heads_within_one_fused_product(implementation: str) -> None:
    fused = torch.randn(11, 100)
    cos, sin = angles(11, 8)
    for x in (fused[:, 20:84].view(11, 4, 16), fused[:, :64].view(11, 4, 16).transpose(0, 1)[:, :11].transpose(0, 1)):
        assert_close(rope(x, cos, sin), turned(x.double(), cos, sin, False), 3)
    x = torch.randn(4, 16, 11).permute(2, 0, 1)
    assert_close(rope(x, cos[:, ::2], sin[:, ::2]), turned(x.double(), cos[:, ::2], sin[:, ::2], False), 3)


def test_gradcheck_both_orders() -> None:
    x = torch.randn(3, 2, 6, dtype=torch.float64, requires_grad=True)
    cos, sin = (part.double() for part in angles(3, 2))
    for interleaved in (False, True):
        assert torch.autograd.gradcheck(lambda t: rope(t, cos, sin, interleaved), (x,))  # noqa: B023
        assert torch.autograd.gradgradcheck(lambda t: rope(t, cos, sin, interleaved), (x,))  # noqa: B023


def test_other_types_take_the_reference() -> None:
    cos, sin = angles(2, 4)
    assert ROPE.kernel_for(torch.randn(2, 1, 8).half(), cos, sin).name == "reference"
    assert ROPE.kernel_for(torch.randn(2, 1, 8), cos.double(), sin.double()).name == "reference"
    assert rope(torch.randn(2, 1, 8).half(), cos, sin).dtype == torch.float16


def test_angles_of_another_length_are_refused(implementation: str) -> None:
    with pytest.raises(RuntimeError):
        rope(torch.randn(3, 2, 8), *angles(2, 4))
