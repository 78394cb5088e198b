"""Causal attention over packed sequences (training, and the first pass over a prompt).

Query heads are grouped: head h reads key-value head h // (H / K). A window of w lets a token see itself and the w - 1
before it. A soft cap c turns a score s into c * tanh(s / c) (Gemma 2). A sink is one more logit a head that takes
probability and gives nothing (gpt-oss). The references work on blocks of query rows, so no T x T matrix is ever held.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from treadle.ops.registry import Operator
from treadle.ops.tensors import accumulator, like

BLOCK_ROWS = 256


class _Block:
    """A block of query rows and the keys they may see: capped scores [K, G, rows, keys] and the hidden ones."""

    def __init__(self, q: Tensor, k: Tensor, begin: int, scale: float, window: int, softcap: float) -> None:
        rows, keys = q.shape[0], k.shape[0]
        end = min(begin + BLOCK_ROWS, rows)
        past = keys - rows  # keys that lie before the first query row
        self.rows = slice(begin, end)
        self.keys = slice(max(0, past + begin - window + 1) if window else 0, past + end)
        self.q = _grouped(q[self.rows], k.shape[1])
        self.k = k[self.keys].to(self.q.dtype).transpose(0, 1)[:, None]
        self.scores = (self.q * scale) @ self.k.transpose(-1, -2)
        if softcap:
            self.scores = torch.tanh(self.scores / softcap) * softcap
        row = torch.arange(past + begin, past + end, device=q.device)[:, None]
        column = torch.arange(self.keys.start, self.keys.stop, device=q.device)
        self.hidden = column > row
        if window:
            self.hidden |= column <= row - window


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """Return [rows, H, E] as [K, G, rows, E] in the accumulator's dtype."""
    rows, heads, size = x.shape
    return x.to(accumulator(x.dtype)).view(rows, kv_heads, heads // kv_heads, size).permute(1, 2, 0, 3)


def _flat(x: Tensor) -> Tensor:
    """Return [K, G, rows, E] as [rows, H, E]."""
    return x.permute(2, 0, 1, 3).flatten(1, 2)


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attend within one sequence, whose last rows q holds: returns the output [n, H, E] and log-sum-exp [n, H]."""
    kv_heads = k.shape[1]
    out = like(q)
    normalizer = q.new_empty(q.shape[:2], dtype=accumulator(q.dtype))
    for begin in range(0, q.shape[0], BLOCK_ROWS):
        block = _Block(q, k, begin, scale, window, softcap)
        scores = block.scores.masked_fill(block.hidden, -torch.inf)
        total = scores.logsumexp(-1, keepdim=True)
        if sinks is not None:
            total = torch.logaddexp(total, sinks.to(total.dtype).view(kv_heads, -1, 1, 1))
        values = v[block.keys].to(total.dtype).transpose(0, 1)[:, None]
        out[block.rows] = _flat(torch.exp(scores - total) @ values).to(out.dtype)
        normalizer[block.rows] = _flat(total)[..., 0]
    return out, normalizer


def _sequences(starts: Tensor, rows: int) -> Iterator[slice]:
    """Yield the rows of each sequence that is not empty; raises ValueError where `starts` does not cover all rows."""
    bounds = starts.tolist()
    if bounds[0] != 0 or bounds[-1] != rows or any(a > b for a, b in itertools.pairwise(bounds)):
        raise ValueError(f"starts must rise from 0 to the number of rows ({rows}), got {bounds}")
    for begin, end in itertools.pairwise(bounds):
        if end > begin:
            yield slice(begin, end)


def packed_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    max_length: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    out = like(q)
    normalizer = q.new_empty(q.shape[:2], dtype=accumulator(q.dtype))
    for rows in _sequences(starts, q.shape[0]):
        out[rows], normalizer[rows] = attend(q[rows], k[rows], v[rows], scale, window, softcap, sinks)
    return out, normalizer


def packed_attention_backward_reference(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    normalizer: Tensor,
    starts: Tensor,
    max_length: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Recompute the probabilities of each block from the saved log-sum-exp (Dao et al. 2022, appendix B)."""
    wide = accumulator(q.dtype)
    grad_q, grad_k, grad_v = (torch.zeros_like(x, dtype=wide, memory_format=torch.contiguous_format) for x in (q, k, v))
    delta = (grad.to(wide) * out.to(wide)).sum(-1)
    for rows in _sequences(starts, q.shape[0]):
        for begin in range(0, rows.stop - rows.start, BLOCK_ROWS):
            block = _Block(q[rows], k[rows], begin, scale, window, softcap)
            here = slice(rows.start + block.rows.start, rows.start + block.rows.stop)
            keys = slice(rows.start + block.keys.start, rows.start + block.keys.stop)
            total, mean = (_grouped(x[here][..., None], k.shape[1]) for x in (normalizer, delta))
            chances = torch.exp(block.scores - total).masked_fill(block.hidden, 0.0)
            grad_out = _grouped(grad[here], k.shape[1])
            values = v[keys].to(wide).transpose(0, 1)[:, None]
            grad_scores = chances * (grad_out @ values.transpose(-1, -2) - mean)
            if softcap:
                grad_scores = grad_scores * (1 - (block.scores / softcap).square())
            grad_scores = grad_scores * scale
            grad_q[here] = _flat(grad_scores @ block.k)
            # A key-value head collects from every query head of its group (dim 1).
            grad_k[keys] += (grad_scores.transpose(-1, -2) @ block.q).sum(1).transpose(0, 1)
            grad_v[keys] += (chances.transpose(-1, -2) @ grad_out).sum(1).transpose(0, 1)
    if sinks is None:
        grad_sinks = q.new_empty(0)
    else:
        grad_sinks = -(torch.exp(sinks.to(wide) - normalizer) * delta).sum(0).to(sinks.dtype)
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), grad_sinks


_OPTIONS = "Tensor starts, SymInt max_length, float scale, int window=0, float softcap=0.0, Tensor? sinks=None"


def _fake(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return like(q), q.new_empty(q.shape[:2], dtype=accumulator(q.dtype))


def _fake_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sinks = rest[-1] if len(rest) == 8 else None
    return like(q), like(k), like(v), q.new_empty(0) if sinks is None else like(sinks)


PACKED_ATTENTION_BACKWARD = Operator(
    "packed_attention_backward",
    f"(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor normalizer, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    packed_attention_backward_reference,
    fake=_fake_backward,
)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, starts, ctx.max_length, ctx.scale, ctx.window, ctx.softcap, sinks = inputs
    ctx.save_for_backward(q, k, v, *output, starts, sinks)


def _backward(ctx: Any, grad: Tensor, grad_normalizer: Tensor | None) -> Any:
    q, k, v, out, normalizer, starts, sinks = ctx.saved_tensors
    grad_q, grad_k, grad_v, grad_sinks = PACKED_ATTENTION_BACKWARD.call(
        grad, q, k, v, out, normalizer, starts, ctx.max_length, ctx.scale, ctx.window, ctx.softcap, sinks
    )
    return grad_q, grad_k, grad_v, None, None, None, None, None, None if sinks is None else grad_sinks


PACKED_ATTENTION = Operator(
    "packed_attention",
    f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)",
    packed_attention_reference,
    fake=_fake,
    backward=_backward,
    setup_context=_setup,
)


# PyTorch's blockwise CPU attention. It knows grouped heads, and takes sequences of equal length as one batch.


def _runs(starts: Tensor, rows: int) -> Iterator[tuple[slice, int]]:
    """Yield runs of neighbouring sequences of equal length: their rows and how many sequences they are."""
    run: slice | None = None
    count = 0
    for sequence in _sequences(starts, rows):
        length = sequence.stop - sequence.start
        if run is not None and (run.stop - run.start) // count == length:
            run, count = slice(run.start, sequence.stop), count + 1
            continue
        if run is not None:
            yield run, count
        run, count = sequence, 1
    if run is not None:
        yield run, count


def fits_flash(
    q: Tensor, k: Tensor, v: Tensor, max_length: int, window: int = 0, softcap: float = 0.0, sinks: Tensor | None = None
) -> bool:
    return (
        q.device.type == "cpu"
        and q.dtype in (torch.float32, torch.bfloat16)
        and q.dtype == k.dtype == v.dtype
        and softcap == 0.0
        and sinks is None
        and (window == 0 or window >= max_length)
    )


def _batched(x: Tensor, rows: slice, count: int) -> Tensor:
    """Return rows of [T, H, E] as [count, H, length, E]."""
    return x[rows].view(count, -1, *x.shape[1:]).transpose(1, 2)


_FLASH_TAKES = "float32 or bfloat16 on CPU; no soft cap, no sinks, no window shorter than the longest sequence"


@PACKED_ATTENTION.kernel(
    "pytorch_flash",
    needs=lambda: "",
    accepts=lambda q, k, v, starts, max_length, scale, window=0, softcap=0.0, sinks=None: fits_flash(
        q, k, v, max_length, window, softcap, sinks
    ),
    takes=_FLASH_TAKES,
)
def _flash(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, max_length: int, scale: float, *_: Any) -> Any:
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    parts = []
    for rows, count in _runs(starts, q.shape[0]):
        batch = (_batched(x, rows, count) for x in (q, k, v))
        part = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*batch, 0.0, True, scale=scale)
        parts.append([x.transpose(1, 2).flatten(0, 1) for x in part])
    if not parts:
        return like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    out, normalizer = (_joined(group) for group in zip(*parts, strict=True))
    return out, normalizer


def _joined(parts: tuple[Tensor, ...]) -> Tensor:
    """Return the rows of all parts, without a copy where there is one part (its memory is in row order already)."""
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)


@PACKED_ATTENTION_BACKWARD.kernel(
    "pytorch_flash",
    needs=lambda: "",
    accepts=lambda grad, q, k, v, out, normalizer, starts, max_length, scale, window=0, softcap=0.0, sinks=None: (
        fits_flash(q, k, v, max_length, window, softcap, sinks)
    ),
    takes=_FLASH_TAKES,
)
def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    normalizer: Tensor,
    starts: Tensor,
    max_length: int,
    scale: float,
    *_: Any,
) -> Any:
    grad, q, k, v = grad.contiguous(), q.contiguous(), k.contiguous(), v.contiguous()
    parts = []
    for rows, count in _runs(starts, q.shape[0]):
        batch = (_batched(x, rows, count) for x in (grad, q, k, v, out))
        total = normalizer[rows].view(count, -1, q.shape[1]).transpose(1, 2)
        part = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *batch, total, 0.0, True, scale=scale
        )
        parts.append([x.transpose(1, 2).flatten(0, 1) for x in part])
    if not parts:
        return like(q), like(k), like(v), q.new_empty(0)
    return *(_joined(group) for group in zip(*parts, strict=True)), q.new_empty(0)


def packed_attention(
    q: Float[Tensor, "T H E"],
    k: Float[Tensor, "T K E"],
    v: Float[Tensor, "T K E"],
    starts: Int[Tensor, " S1"],
    max_length: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Float[Tensor, " H"] | None = None,
) -> Float[Tensor, "T H E"]:
    """Return causal attention within each sequence; sequence s is the rows starts[s] to starts[s + 1].

    `max_length` is the longest sequence's length; scores are q . k * scale; window 0 and softcap 0 mean none.
    Raises ValueError where `starts` does not rise from 0 to T.
    """
    return PACKED_ATTENTION.call(q, k, v, starts, max_length, scale, window, softcap, sinks)[0]
