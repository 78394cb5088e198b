"""Within row_invariant a row's bits do not depend on its company; outside they may."""

from __future__ import annotations

import pytest
import torch

from treadle import ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(45, 37), (64, 64), (576, 1536), (1536, 576), (576, 9001)])
def test_a_rows_product_has_the_same_bits_in_any_company(dtype: torch.dtype, inputs: int, outputs: int) -> None:
    generator = torch.Generator().manual_seed(inputs)
    x = torch.randn(70, inputs, generator=generator).to(dtype)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype)
    with ops.row_invariant():
        whole = ops.linear(x, weight, bias)
        for start, stop in ((0, 1), (5, 6), (3, 20), (17, 49), (0, 16), (69, 70)):
            assert torch.equal(ops.linear(x[start:stop], weight, bias), whole[start:stop])
        order = torch.randperm(70, generator=generator)
        assert torch.equal(ops.linear(x[order], weight, bias), whole[order])
    torch.testing.assert_close(whole, ops.linear(x, weight, bias), atol=1e-3 * inputs**0.5, rtol=2e-2)


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_every_other_operator_is_row_invariant_too(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels == "reference":
        for operator in (ops.OPERATORS.get(name) for name in ("rms_norm", "add_rms_norm", "gated_activation", "rope")):
            monkeypatch.setattr(operator, "_usable", [])
    x, y, weight = torch.randn(41, 48), torch.randn(41, 48), torch.randn(48)
    heads, angles = torch.randn(41, 3, 10), torch.randn(41, 5)
    calls = {
        "rms_norm": lambda rows: ops.rms_norm(x[rows], weight, 1e-6, 0.0),
        "add_rms_norm": lambda rows: ops.add_rms_norm(x[rows], y[rows], weight, 1e-6, 0.0)[0],
        "silu": lambda rows: ops.gated_activation(x[rows], y[rows], "silu"),
        "gelu_tanh": lambda rows: ops.gated_activation(x[rows], y[rows], "gelu_tanh"),
        "rope": lambda rows: ops.rope(heads[rows], angles[rows].cos(), angles[rows].sin(), False),
    }
    with ops.row_invariant():
        for name, call in calls.items():
            whole = call(slice(0, 41))
            for start, stop in ((0, 1), (7, 8), (3, 21), (40, 41)):
                assert torch.equal(call(slice(start, stop)), whole[start:stop]), name


def test_it_ends_with_its_block() -> None:
    x, weight = torch.randn(3, 4), torch.randn(5, 4)
    with pytest.raises(ZeroDivisionError), ops.row_invariant():
        raise ZeroDivisionError
    assert torch.equal(ops.linear(x, weight), torch.nn.functional.linear(x, weight))
