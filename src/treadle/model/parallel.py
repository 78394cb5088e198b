"""Lays the one Transformer out over the ranks of a plan: applied from outside, the blocks know nothing of it.

    model = Transformer(spec, device="meta")
    lay_out(model, Layout(spec, plan, rank), tensor_group)      # afterwards it has this rank's shards only
    model.to_empty(device="cpu")                                # then fill in the values, shard by shard

Column- and row-parallel layers take the place of the plain ones under the same parameter names, so that adapters
attach to them, and checkpoints name them, as ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from treadle import ops
from treadle.model.blocks import Attention, Embedding, GatedMlp, Layer, Linear, Readout, RmsNorm
from treadle.model.context import Context
from treadle.model.layout import COLUMN, ROW, Layout
from treadle.model.transformer import Transformer
from treadle.parallel.tensor import TensorGroup, TensorShard, copy_in, gather_out, local, shared, sum_out
from treadle.parallel.vocabulary import vocabulary_cross_entropy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ColumnLinear(Linear):
    """Gives a part of the outputs for the whole input. `copies` neighbouring ranks hold the same weights."""

    group: TensorGroup
    copies: int = 1

    def forward(self, x: Float[Tensor, "T I"]) -> Float[Tensor, "T O"]:
        weight = shared(local(self.weight), self.group, self.copies)
        bias = None if self.bias is None else shared(local(self.bias), self.group, self.copies)
        y = ops.linear(x, weight, bias)
        if self.adapter is not None:
            y = y + _adapter_term(self.adapter, x, self.group, a=self.group.size, b=self.copies)
        return y


class RowLinear(Linear):
    """Takes a part of the inputs; the sum over ranks is the whole output, to which the bias is added once."""

    group: TensorGroup

    def forward(self, x: Float[Tensor, "T I"]) -> Float[Tensor, "T O"]:
        y = ops.linear(x, local(self.weight))
        if self.adapter is not None:
            y = y + _adapter_term(self.adapter, x, self.group, a=1, b=self.group.size)
        y = sum_out(y, self.group)
        return y if self.bias is None else y + local(self.bias)


def _adapter_term(adapter: nn.Module, x: Tensor, group: TensorGroup, **copies: int) -> Tensor:
    """Return what the adapter adds; `copies` says how many ranks hold the same of each of its parameters."""
    if not torch.is_grad_enabled() and not any(hasattr(value, "to_local") for value in adapter.parameters()):
        return adapter(x)
    parameters = {name: shared(local(value), group, copies[name]) for name, value in adapter.named_parameters()}
    return torch.func.functional_call(adapter, parameters, (x,))


class HeadNorm(RmsNorm):
    """The norm of each head: its weight is that of all heads, so its gradient is the sum over the ranks' heads."""

    group: TensorGroup

    def forward(self, x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
        weight = shared(local(self.weight), self.group, self.group.size)
        return ops.rms_norm(x, weight, self.eps, self.offset)


class SharedAttention(Attention):
    """Attention of a part of the heads. Its input is copied in once for q, k and v: backward there is one sum."""

    group: TensorGroup

    def forward(self, x: Float[Tensor, "T D"], context: Context) -> Float[Tensor, "T D"]:
        return super().forward(copy_in(x, self.group), context)

    def head_sinks(self) -> Float[Tensor, "H"] | None:
        return None if self.sinks is None else local(self.sinks)


class SharedMlp(GatedMlp):
    """A part of the feed-forward width."""

    group: TensorGroup

    def forward(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        return super().forward(copy_in(x, self.group))


class VocabularyEmbedding(Embedding):
    """Holds the rows of a part of the vocabulary; every rank returns the rows of all tokens."""

    group: TensorGroup
    shard: TensorShard

    def forward(self, tokens: Int[Tensor, "T"]) -> Float[Tensor, "T D"]:
        here = (tokens >= self.shard.start) & (tokens < self.shard.stop)
        rows = ops.embedding(torch.where(here, tokens - self.shard.start, 0), local(self.weight))
        # Each row comes from one rank, the others add zeros: the sum is exact.
        return sum_out(rows * here[:, None].to(rows.dtype), self.group, exact=True)


class VocabularyReadout(Readout):
    """Computes the logits of a part of the vocabulary and puts them together, without the padding.

    With `to_first` logits arrive at the first rank of the group only; elsewhere there are none ([0, V]).
    """

    def __init__(self, softcap: float, vocabulary: int, shard: TensorShard, group: TensorGroup) -> None:
        super().__init__(softcap)
        self.vocabulary, self.shard, self.group = vocabulary, shard, group
        self.to_first = False

    def logits(self, x: Float[Tensor, "R D"], weight: Float[Tensor, "V D"]) -> Float[Tensor, "R V"]:
        """Return the logits of each row."""
        part = super().logits(copy_in(x, self.group), local(weight))
        if not self.to_first:
            return gather_out(part, self.group)[:, : self.vocabulary]
        parts = self.group.gather(part, to_first=True)
        return torch.cat(parts, -1)[:, : self.vocabulary] if parts else part.new_empty(0, self.vocabulary)

    def loss(
        self,
        x: Float[Tensor, "T D"],
        weight: Float[Tensor, "V D"],
        targets: Int[Tensor, "T"],
        token_weights: Float[Tensor, "T"],
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "T"]]:
        """Return (sum over tokens of weight x loss, token losses), the same on every rank."""
        return vocabulary_cross_entropy(
            copy_in(x, self.group),
            local(weight),
            targets,
            token_weights,
            self.softcap,
            self.vocabulary,
            self.shard,
            self.group,
        )


def lay_out(model: Transformer, layout: Layout, group: TensorGroup | None) -> None:
    """Leave of a whole model what `layout` says this rank holds; `group` is that of the tp axis, where it has one.

    Parameters (adapters' included) become the shards of what they were, on the same device, "meta" or not.
    """
    assert model.layout is None, "the model is laid out already"
    assert (group.size if group is not None else 1) == layout.plan.tp
    model.layout = layout
    _keep_stage(model, layout)
    if group is None:
        return
    for name, parameter in list(model.named_parameters()):
        if (shard := layout.shard(name)) is not None:
            owner, _, part = name.rpartition(".")
            value = shard.of(parameter.detach()).contiguous()
            setattr(model.get_submodule(owner), part, nn.Parameter(value, requires_grad=parameter.requires_grad))
    for layer in model.layers:
        assert isinstance(layer, Layer)
        _share_layer(layer, layout, group)
    if shard := layout.shard("embedding.weight"):
        if layout.holds("embedding.weight"):
            _become(model.embedding, VocabularyEmbedding, group=group, shard=shard)
        model.readout = VocabularyReadout(model.spec.final_softcap, model.spec.vocabulary, shard, group)


def distribute(model: Transformer, mesh: DeviceMesh) -> None:
    """Make the shards of a laid-out model DTensors over the tp axis' `mesh`, as training wants them.

    Sharding over further axes, saving and resharding then come from PyTorch; the modules compute on the local tensors.
    What every rank holds whole stays as it is. See `Layout.stacked` for what a DTensor is of.
    """
    from torch.distributed.tensor import DTensor, Shard

    assert model.layout is not None
    for name, parameter in list(model.named_parameters()):
        shard = model.layout.shard(name)
        if shard is None:
            continue
        shape = list(parameter.shape)
        shape[shard.dim] *= model.layout.plan.tp
        whole = torch.empty(shape, device="meta")
        value = DTensor.from_local(
            parameter.detach(), mesh, [Shard(shard.dim)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
        owner, _, part = name.rpartition(".")
        setattr(model.get_submodule(owner), part, nn.Parameter(value, requires_grad=parameter.requires_grad))


def _keep_stage(model: Transformer, layout: Layout) -> None:
    """Take away what other pipeline stages hold. Layers keep their names; towards the context they count from 0."""
    kept = nn.ModuleList()
    for place, index in enumerate(layout.layers):
        layer = model.layers[index]
        assert isinstance(layer, Layer)
        layer.attention.layer = place
        kept.add_module(str(index), layer)
    model.layers = kept
    for part in ("embedding", "norm", "head"):
        if not layout.holds(f"{part}.weight"):
            delattr(model, part)


def _share_layer(layer: Layer, layout: Layout, group: TensorGroup) -> None:
    attention, mlp = layer.attention, layer.mlp
    spec = layout.local.layers[attention.layer].attention
    attention.spec = spec
    copies = max(1, layout.plan.tp // layout.spec.layers[layout.layers[attention.layer]].attention.kv_heads)
    for module in (attention, mlp):
        for part, linear in module.named_children():
            if part in COLUMN:
                _become(linear, ColumnLinear, group=group, copies=copies if part in "kv" else 1)
            elif part in ROW:
                _become(linear, RowLinear, group=group)
            elif isinstance(linear, RmsNorm):
                _become(linear, HeadNorm, group=group)
    _become(attention, SharedAttention, group=group)
    _become(mlp, SharedMlp, group=group)


def _become(module: nn.Module, kind: type[nn.Module], **more: Any) -> None:
    """Make a plain module one of a parallel kind, in place: parameters, adapter and settings stay."""
    module.__class__ = kind
    for name, value in more.items():
        setattr(module, name, value)
