"""Every element of every parameter lies on one rank, or on as many as are meant; what cannot be cut is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serve.tiny import attention, model_spec
from treadle.config import UserError
from treadle.model.layout import Layout, local_spec
from treadle.model.lora import LoraSpec, attach_lora
from treadle.model.spec import LayerSpec, MlpSpec, ModelSpec
from treadle.model.transformer import Transformer
from treadle.parallel.pipeline import split_layers
from treadle.parallel.plan import Plan
from treadle.parallel.tensor import cut


@st.composite
def laid_out(draw: st.DrawFn) -> tuple[ModelSpec, Plan]:
    tp = draw(st.sampled_from([1, 2, 3, 4, 6]))
    kv_heads = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6, 8) if n % tp == 0 or tp % n == 0]))
    heads = kv_heads * tp * draw(st.integers(1, 2)) if kv_heads % tp else kv_heads * draw(st.integers(1, 3))
    switches = {name: draw(st.booleans()) for name in ("sinks", "qk_norm", "qkv_bias", "output_bias")}
    mixer = attention(heads=heads, kv_heads=kv_heads, **switches)
    layer = LayerSpec(mixer, MlpSpec(tp * draw(st.integers(1, 5)), "silu", draw(st.booleans())), draw(st.booleans()))
    layers = draw(st.integers(1, 5))
    spec = model_spec(vocabulary=draw(st.integers(6, 40)), tied=draw(st.booleans()))
    return replace(spec, layers=(layer,) * layers), Plan(pp=draw(st.integers(1, layers)), tp=tp, dp_shard=1)


@settings(deadline=None)
@given(laid_out())
def test_every_element_has_its_rank(case: tuple[ModelSpec, Plan]) -> None:
    spec, plan = case
    model = Transformer(spec)
    attach_lora(model, LoraSpec(rank=2))
    layouts = [Layout(spec, plan, rank) for rank in range(plan.ranks())]
    for name, parameter in model.requires_grad_(False).named_parameters():
        parameter.fill_(1.0)  # fresh memory may hold what is not even equal to itself
        times = torch.zeros(parameter.shape)
        copies = owned = 0
        for layout in layouts:
            if not layout.holds(name):
                continue
            shard = layout.shard(name)
            own = parameter.shape if shard is None else torch.Size(shard.shape(parameter.shape))
            owned += layout.owned(name, own)
            if shard is None:
                times += 1
                copies = plan.tp
            else:
                times.narrow(shard.dim, shard.start, shard.stop - shard.start).add_(1)
                copies = shard.copies
                assert shard.of(parameter).shape == shard.shape(parameter.shape)
                assert torch.equal(shard.unpadded(shard.of(parameter)), parameter[_where(shard)])
                assert not shard.of(parameter).narrow(shard.dim, shard.stop - shard.start, shard.padding).any()
        twice = name == "embedding.weight" and spec.tied and plan.pp > 1
        assert bool((times == copies * (1 + twice)).all()), name
        assert owned == parameter.numel(), name
        parameter.copy_(torch.arange(parameter.numel(), dtype=torch.float32).view(parameter.shape))
        stacked = layouts[0].stacked(name, parameter)
        assert torch.equal(layouts[0].unstacked(name, stacked), parameter)
        for layout in layouts[: plan.tp]:
            shard = layout.shard(name)
            if shard is not None:
                part = stacked.chunk(plan.tp, shard.dim)[layout.coordinates["tp"]]
                assert torch.equal(part, shard.of(parameter))


def _where(shard) -> tuple[slice, ...]:
    return (slice(None),) * shard.dim + (slice(shard.start, shard.stop),)


@settings(deadline=None)
@given(laid_out())
def test_the_local_spec_is_that_of_the_shards(case: tuple[ModelSpec, Plan]) -> None:
    spec, plan = case
    shapes = {name: p.shape for name, p in Transformer(spec, device="meta").named_parameters()}
    seen = []
    for rank in range(plan.ranks()):
        layout = Layout(spec, plan, rank)
        local = Transformer(local_spec(spec, plan, rank), device="meta")
        for index, layer in zip(layout.layers, local.layers, strict=True):
            for name, parameter in layer.named_parameters():
                whole = f"layers.{index}.{name}"
                shard = layout.shard(whole)
                assert tuple(parameter.shape) == (shapes[whole] if shard is None else shard.shape(shapes[whole]))
        seen += layout.layers if layout.coordinates["tp"] == 0 else []
    assert seen == list(range(len(spec.layers)))


@settings(deadline=None)
@given(
    costs=st.lists(st.integers(1, 9), min_size=1, max_size=7),
    stages=st.integers(1, 7),
    ends=st.tuples(st.integers(0, 20), st.integers(0, 20)),
)
def test_the_costliest_stage_is_as_cheap_as_can_be(costs: list[int], stages: int, ends: tuple[int, int]) -> None:
    if stages > len(costs):
        with pytest.raises(ValueError, match="stages"):
            split_layers(costs, stages)
        return

    def worst(cuts: tuple[int, ...]) -> int:
        bounds = [0, *cuts, len(costs)]
        sums = [sum(costs[begin:end]) for begin, end in pairwise(bounds)]
        sums[0] += ends[0]
        sums[-1] += ends[1]
        return max(sums)

    found = split_layers(costs, stages, *ends)
    assert [layer for stage in found for layer in stage] == list(range(len(costs))) and all(found)
    best = min(worst(cuts) for cuts in combinations(range(1, len(costs)), stages - 1))
    assert worst(tuple(stage.stop for stage in found[:-1])) == best


@pytest.mark.parametrize(
    ("spec", "plan", "says"),
    [
        (model_spec(), Plan(pp=3), r"pp=3.*more stages than the model has layers, 2"),
        (model_spec(), Plan(tp=3), r"tp=3.*4 query heads cannot be shared evenly; set it to 1 or 2 or 4"),
        (
            model_spec(attention(heads=12, kv_heads=6)),
            Plan(tp=4),
            r"6 key-value heads.*set it to 1 or 2 or 3 or 6 or 12",
        ),
        (
            replace(model_spec(), layers=(LayerSpec(attention(), MlpSpec(45, "silu")),)),
            Plan(tp=2),
            r"feed-forward width of 45 cannot be shared evenly; set it to 1$",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(spec: ModelSpec, plan: Plan, says: str) -> None:
    with pytest.raises(UserError, match=says):
        Layout(spec, plan.resolve(plan.pp * plan.tp), 0)


def test_ranks_of_a_plan_and_back() -> None:
    plan = Plan(pp=2, dp_replicate=2, dp_shard=3, tp=4)
    assert [plan.rank(**plan.coordinates(rank)) for rank in range(48)] == list(range(48))
    assert plan.coordinates(1) == {"pp": 0, "dp_replicate": 0, "dp_shard": 0, "tp": 1}, "tp ranks are neighbours"
    assert plan.coordinates(47) == {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "tp": 3}


def test_repeated_units_and_padding() -> None:
    shards = [cut(2, 4, index, unit=8, repeat=True) for index in range(4)]
    assert [(shard.start, shard.stop) for shard in shards] == [(0, 8), (0, 8), (8, 16), (8, 16)]
    assert [(shard.copy, shard.copies) for shard in shards] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    padded = [cut(5, 4, index) for index in range(4)]
    assert [(shard.start, shard.stop, shard.padding) for shard in padded] == [
        (0, 2, 0),
        (2, 4, 0),
        (4, 5, 1),
        (5, 5, 2),
    ]
