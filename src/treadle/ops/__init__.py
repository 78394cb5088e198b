"""Operators: each a schema, a readable PyTorch reference and any number of kernels; see `registry` for adding one."""

from treadle.ops.activation import gated_activation
from treadle.ops.attention import packed_attention
from treadle.ops.invariance import row_invariant
from treadle.ops.linear import embedding, linear
from treadle.ops.loss import linear_cross_entropy
from treadle.ops.norm import add_rms_norm, rms_norm
from treadle.ops.paged_attention import paged_attention
from treadle.ops.paged_cache import paged_write
from treadle.ops.quantized import quantized_linear, quantized_pack, quantized_rows
from treadle.ops.registry import OPERATORS, Kernel, Operator
from treadle.ops.rope import rope
from treadle.ops.sampling import sample

__all__ = [
    "OPERATORS",
    "Kernel",
    "Operator",
    "add_rms_norm",
    "embedding",
    "gated_activation",
    "linear",
    "linear_cross_entropy",
    "packed_attention",
    "paged_attention",
    "paged_write",
    "quantized_linear",
    "quantized_pack",
    "quantized_rows",
    "rms_norm",
    "rope",
    "row_invariant",
    "sample",
]
