"""Causal attention over packed sequences (training, and the first pass over a prompt).

Query heads are grouped: head h reads key-value head h // (H / K). A window of w lets a token see itself and the w - 1
before it. A soft cap c turns a score s into c * tanh(s / c) (Gemma 2). A sink is one more logit a head that takes
probability and gives nothing (gpt-oss). The references work on blocks of query rows, so no T x T matrix is ever held.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

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


# PyTorch's blockwise CPU attention. It knows grouped heads and takes a batch of sequences of one length. It compiles
# its matrix products for each length that it meets (oneDNN keeps about a thousand of them, a megabyte each), and texts
# have all lengths: so sequences are padded to few lengths and those of one length go as one batch. Padding is behind
# a sequence's last row, where no row of it looks.

PADDED_TO = 64


class _Batch(NamedTuple):
    """Sequences of one padded length: the row of each of their places, and the places that are no padding."""

    rows: Int[Tensor, "count length"]
    real_places: Int[Tensor, " real"]
    real_rows: Int[Tensor, " real"]

    def gather(self, x: Float[Tensor, "T H *E"]) -> Float[Tensor, "count H length *E"]:
        return x[self.rows].transpose(1, 2)

    def scatter(self, part: Float[Tensor, "count H length *E"], out: Float[Tensor, "T H *E"]) -> None:
        out[self.real_rows] = part.transpose(1, 2).flatten(0, 1)[self.real_places]


def _batches(starts: Tensor, rows: int) -> list[_Batch]:
    return _make_batches(tuple((sequence.start, sequence.stop) for sequence in _sequences(starts, rows)))


# Every layer's forward and backward pass asks for the same few.
@functools.lru_cache(maxsize=64)
def _make_batches(sequences: tuple[tuple[int, int], ...]) -> list[_Batch]:
    by_length: dict[int, list[tuple[int, int]]] = {}
    for begin, end in sequences:
        length = end - begin
        padded = -(-length // PADDED_TO) * PADDED_TO if length > PADDED_TO else 1 << (length - 1).bit_length()
        by_length.setdefault(padded, []).append((begin, end))
    batches = []
    for length, members in sorted(by_length.items()):
        begins, ends = torch.tensor(members).unbind(1)
        unpadded = begins[:, None] + torch.arange(length)
        real = (unpadded < ends[:, None]).flatten().nonzero()[:, 0]
        # A padding place repeats the sequence's last row, so that what is computed there is finite where that row is.
        batches.append(_Batch(torch.minimum(unpadded, ends[:, None] - 1), real, unpadded.flatten()[real]))
    return batches


def _one_length(starts: Tensor) -> int:
    """Return how many sequences there are where all are of one length, else 0: those need no copy."""
    lengths = set(torch.diff(starts).tolist())
    return len(starts) - 1 if len(lengths) == 1 and lengths != {0} else 0


def fits_flash(
    q: Tensor, k: Tensor, v: Tensor, max_length: int, window: int = 0, softcap: float = 0.0, sinks: Tensor | None = None
) -> bool:
    return (
        q.device.type == "cpu"
        and q.dtype in (torch.float32, torch.bfloat16)
        and q.dtype == k.dtype == v.dtype
        # PyTorch's kernel does not look at shapes itself; what does not fit goes to the reference, which refuses it.
        and k.shape == v.shape
        and q.shape[-1] == k.shape[-1]
        and q.shape[-2] % k.shape[-2] == 0
        and softcap == 0.0
        and sinks is None
        and (window == 0 or window >= max_length)
    )


def _batched(x: Tensor, count: int) -> Tensor:
    """Return [T, H, ...] as [count, H, length, ...], a view."""
    return x.view(count, -1, *x.shape[1:]).transpose(1, 2)


def _flattened(x: Tensor) -> Tensor:
    """Return [count, H, length, ...] as [T, H, ...]."""
    return x.transpose(1, 2).flatten(0, 1).contiguous()


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
    batches = _batches(starts, q.shape[0])
    if count := _one_length(starts):
        batch = (_batched(x.contiguous(), count) for x in (q, k, v))
        out, normalizer = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*batch, 0.0, True, scale=scale)
        return _flattened(out), _flattened(normalizer)
    out, normalizer = like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    for batch in batches:
        inputs = (batch.gather(x) for x in (q, k, v))
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*inputs, 0.0, True, scale=scale)
        batch.scatter(parts[0], out)
        batch.scatter(parts[1], normalizer)
    return out, normalizer


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
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    batches = _batches(starts, q.shape[0])
    if count := _one_length(starts):
        inputs = (_batched(x.contiguous(), count) for x in (grad, q, k, v, out, normalizer))
        return *map(_flattened, backward(*inputs, 0.0, True, scale=scale)), q.new_empty(0)
    grads = like(q), like(k), like(v)
    for batch in batches:
        # A padding row of the queries sees real keys; its gradient must be zero.
        grad_out = grad.new_zeros(*batch.rows.shape, *grad.shape[1:])
        grad_out.flatten(0, 1)[batch.real_places] = grad[batch.real_rows]
        inputs = (batch.gather(x) for x in (q, k, v, out, normalizer))
        parts = backward(grad_out.transpose(1, 2), *inputs, 0.0, True, scale=scale)
        for part, whole in zip(parts, grads, strict=True):
            batch.scatter(part, whole)
    return *grads, q.new_empty(0)


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
    Raises ValueError where `starts` does not rise from 0 to T, or q, k and v have different numbers of rows.
    """
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(f"q, k and v must have the same rows, not {q.shape[0]}, {k.shape[0]} and {v.shape[0]}")
    return PACKED_ATTENTION.call(q, k, v, starts, max_length, scale, window, softcap, sinks)[0]
