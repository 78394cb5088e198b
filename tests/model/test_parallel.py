"""A model laid out over ranks computes what it computes whole: logits, losses, gradients, adapters included."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.serve.tiny import attention, model_spec
from treadle.model.context import PackedContext
from treadle.model.layout import Layout
from treadle.model.lora import LoraSpec, attach_lora
from treadle.model.parallel import distribute, lay_out
from treadle.model.spec import LayerSpec, MlpSpec, ModelSpec
from treadle.model.stages import Microbatch, ParallelModel
from treadle.model.transformer import Transformer
from treadle.parallel.mesh import join
from treadle.parallel.plan import Plan

LENGTHS = [7, 1, 12]
# Sums over ranks are added in another order than within one matrix product: some roundings of fp32.
TOLERANCE = 2e-5


def biased(**changes: bool) -> LayerSpec:
    everything = attention(qk_norm=True, sinks=True, qkv_bias=True, output_bias=True, window=5, softcap=20.0)
    return LayerSpec(replace(everything, **changes), MlpSpec(48, "gelu_tanh", bias=True), post_norms=True)


SPECS: dict[str, ModelSpec] = {
    "grouped heads": model_spec(),
    "tied, odd vocabulary": model_spec(vocabulary=301, tied=True),
    "as many key heads": model_spec(attention(kv_heads=4), attention(kv_heads=4, window=3)),
    "one key head": model_spec(attention(kv_heads=1), attention(kv_heads=1, qk_norm=True), vocabulary=299),
    "everything": replace(
        model_spec(tied=True, vocabulary=297, norm_offset=1.0, embedding_scale=5.7, final_softcap=15.0),
        layers=(biased(), biased(sinks=False), biased(qkv_bias=False)),
    ),
}


def whole(spec: ModelSpec, lora: bool = False) -> Transformer:
    """Return the whole model, the same on every rank; no bias, norm or sink is at a value that hides it."""
    model = Transformer(spec)
    if lora:
        attach_lora(model, LoraSpec(rank=3, alpha=5.0))
        model.requires_grad_(True)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = torch.randn(parameter.shape, generator=generator) * 0.3
            parameter.copy_(value + (1.0 - spec.norm_offset) * name.endswith("norm.weight"))
    return model


def tokens_of(spec: ModelSpec) -> Tensor:
    return torch.randint(0, spec.vocabulary, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))


def _logits(names: list[str], plan: Plan) -> list[tuple[float, int]]:
    """Return for each model the largest difference of the logits, and how many rows came to this rank."""
    found = []
    with join(plan, torch.device("cpu")) as mesh:
        tensor, pipeline = mesh.tensor_group(), mesh.pipeline_group()
    for name in names:
        spec = SPECS[name]
        model, tokens, rows = whole(spec, lora=True).requires_grad_(False), tokens_of(spec), torch.tensor([2, 6, 7, 19])
        pooled, everything = torch.tensor([0, 19]), torch.arange(len(tokens))
        normed = model.norm(model.hidden(tokens, PackedContext.of_lengths(LENGTHS)))
        lay_out(model, Layout(spec, plan, dist.get_rank()), tensor)
        part = ParallelModel(model, pipeline)
        worst, count = 0.0, 0
        expected_logits = logits_of(spec, normed)
        for wanted, states in ((rows, pooled), (rows, None), (rows[:0], pooled), (rows[:0], None), (None, None)):
            logits, hidden = part(Microbatch(tokens, PackedContext.of_lengths(LENGTHS), wanted, states))
            assert logits.shape[1] == spec.vocabulary and hidden.shape[1] == spec.width
            count += len(logits) + len(hidden)
            for got, expected in (
                (logits, expected_logits[everything if wanted is None else wanted]),
                (hidden, normed[pooled[:0] if states is None else states]),
            ):
                if len(got):
                    worst = max(worst, float((got - expected).abs().max() / expected.std()))
        # The same tokens, a sequence at a time: what each wants, one behind the other.
        logits, hidden = part(*one_by_one(tokens))
        for got, expected in ((logits, expected_logits[torch.tensor([6, 0, 7, 19])]), (hidden, normed[[7, 8]])):
            count += len(got)
            if len(got):
                worst = max(worst, float((got - expected).abs().max() / expected.std()))
        found.append((worst, count))
    return found


def one_by_one(tokens: Tensor) -> list[Microbatch]:
    """Return a microbatch for each sequence."""
    parts, rows, pooled = tokens.split(LENGTHS), [[6, 0], [0], [11]], [None, [0], [0]]
    return [
        Microbatch(part, PackedContext.of_lengths([len(part)]), torch.tensor(r), None if p is None else torch.tensor(p))
        for part, r, p in zip(parts, rows, pooled, strict=True)
    ]


def logits_of(spec: ModelSpec, normed: Tensor) -> Tensor:
    """Return the logits of a whole model's last hidden states."""
    return whole(spec, lora=True).requires_grad_(False).logits(normed)


@pytest.mark.parametrize("plan", [Plan(tp=2), Plan(pp=2), Plan(pp=2, tp=2)], ids=["tp", "pp", "both"])
def test_logits_are_those_of_the_whole_model(ranks, plan: Plan) -> None:
    plan = plan.resolve(plan.pp * plan.tp)
    results = ranks(plan.ranks()).run(_logits, list(SPECS), plan)
    for name, (difference, rows) in zip(SPECS, results[0], strict=True):
        assert rows == 4 + 2 + 4 + 2 + sum(LENGTHS) + 4 + 2 and difference < TOLERANCE, (name, difference)
    assert all(rows == 0 for result in results[1:] for _, rows in result), "logits go to the first rank only"


def _gradients(names: list[str], plan: Plan) -> list[tuple[float, str, float]]:
    """Return for each model the difference of the loss sum, and of the parameter whose gradient differs the most."""
    with join(plan, torch.device("cpu")) as mesh:
        tensor = mesh.tensor_group()
    found = []
    for name in names:
        spec = SPECS[name]
        model, tokens = whole(spec, lora=True), tokens_of(spec)
        weights = torch.linspace(0.0, 2.0, len(tokens))  # the first token does not count
        targets = tokens.roll(-1)
        part = copy.deepcopy(model)
        loss, losses = model(tokens, PackedContext.of_lengths(LENGTHS), targets, weights)
        (loss * 0.5).backward()
        layout = Layout(spec, plan, dist.get_rank())
        lay_out(part, layout, tensor)
        own, own_losses = part(tokens, PackedContext.of_lengths(LENGTHS), targets, weights)
        (own * 0.5).backward()
        torch.testing.assert_close(own_losses, losses, rtol=1e-4, atol=1e-5)
        worst = ("", 0.0)
        for key, parameter in part.named_parameters():
            expected, shard = model.get_parameter(key).grad, layout.shard(key)
            assert expected is not None and parameter.grad is not None, key
            scale = expected.abs().max()
            expected = expected if shard is None else shard.of(expected)
            worst = max(worst, (key, float((parameter.grad - expected).abs().max() / scale)), key=lambda one: one[1])
        found.append((abs(float((own / loss).detach()) - 1), *worst))
    return found


def test_losses_and_gradients_are_those_of_the_whole_model(ranks) -> None:
    results = ranks(2).run(_gradients, list(SPECS), Plan(tp=2).resolve(2))
    for result in results:
        for name, (loss, worst, difference) in zip(SPECS, result, strict=True):
            assert loss < 1e-6, name
            assert difference < 10 * TOLERANCE, f"{name}: {worst}"
    assert [loss for loss, *_ in results[0]] == [loss for loss, *_ in results[1]], "each rank has the same loss"


def _sharded_twice(name: str, plan: Plan) -> tuple[float, str, float]:
    """Return as `_gradients` does, for parameters sharded over two axes, of their whole gradients."""
    from treadle.parallel.shard import local_gradients, shard

    spec = SPECS[name]
    with join(plan, torch.device("cpu")) as mesh:
        layout = Layout(spec, plan, mesh.rank)
        model, tokens = whole(spec, lora=True), tokens_of(spec)
        weights, targets = torch.linspace(0.0, 2.0, len(tokens)), tokens.roll(-1)
        part = copy.deepcopy(model)
        loss, _ = model(tokens, PackedContext.of_lengths(LENGTHS), targets, weights)
        loss.backward()
        lay_out(part, layout, mesh.tensor_group())
        distribute(part, mesh.device_mesh["tp"])
        shard(part, part.layers, mesh, None, reshard_in_forward=True)
        # Each of the two data ranks has the batch with half the weight, so that the sum is the whole.
        own, _ = part(tokens, PackedContext.of_lengths(LENGTHS), targets, weights / 2)
        own.backward()
        assert local_gradients(part.parameters())
        worst = ("", 0.0)
        for key, parameter in part.named_parameters():
            expected, got = model.get_parameter(key).grad, parameter.grad
            assert expected is not None and isinstance(got, DTensor)
            difference = (layout.unstacked(key, got.full_tensor()) - expected).abs().max() / expected.abs().max()
            worst = max(worst, (key, float(difference)), key=lambda one: one[1])
        return abs(float((2 * own / loss).detach()) - 1), *worst


def test_shards_are_sharded_again_over_data_ranks(ranks) -> None:
    for loss, worst, difference in ranks(4).run(_sharded_twice, "everything", Plan(tp=2, dp_shard=2)):
        assert loss < 1e-6
        assert difference < 10 * TOLERANCE, worst
