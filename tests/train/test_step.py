"""The step: one loss over the whole global batch, whatever the ranks and the microbatches."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from tests.train.runs import TINY
from treadle.data.loader import PackedBatch, collate
from treadle.data.packing import Sample
from treadle.model.families import family_of, read_spec
from treadle.model.transformer import Transformer
from treadle.parallel.mesh import join
from treadle.parallel.plan import Plan
from treadle.train.build import initialize, lay_out
from treadle.train.optimizers import OptimizerSettings, build_optimizer
from treadle.train.precision import first_scaler
from treadle.train.state import ScalerState, TrainState
from treadle.train.step import StepResult, train_step

CONFIG = {**TINY, "vocab_size": 96, "max_position_embeddings": 32}
CPU = torch.device("cpu")
SAMPLES, LENGTH = 12, 24


def sample(index: int) -> Sample:
    """Return a sample of two sequences whose tokens have uneven weights, some of them 0."""
    random = np.random.default_rng(index)
    tokens = random.integers(0, 96, LENGTH + 1)
    first = int(random.integers(5, LENGTH - 5))
    positions = np.concatenate([np.arange(first), np.arange(LENGTH - first)]).astype(np.int32)
    # Samples differ widely in how many tokens count, as chats do: a mean of means would show.
    weights = (random.random(LENGTH) < (index + 1) / SAMPLES).astype(np.float32) * random.choice([0.5, 1.0, 2.0])
    return Sample(tokens[:-1], tokens[1:], positions, np.array([0, first, LENGTH], np.int32), weights, 0)


def microbatches(per_microbatch: int, rank: int = 0, ranks: int = 1) -> list[PackedBatch]:
    own = range(rank * SAMPLES // ranks, (rank + 1) * SAMPLES // ranks)
    return [collate([sample(i) for i in own[at : at + per_microbatch]]) for at in range(0, len(own), per_microbatch)]


def steps(
    per_microbatch: int,
    count: int = 1,
    precision: str = "fp32",
    plan: Plan | None = None,
    reshard: bool = False,
    recompute: str = "none",
    optimizer: str = "adamw",
    scale: float | None = None,
) -> tuple[list[StepResult], dict[str, torch.Tensor]]:
    """Take steps on this rank; return what they measured and the whole parameters afterwards."""
    with join(plan or Plan(), CPU) as mesh:
        model = Transformer(read_spec(CONFIG), device="meta")
        lay_out(model, mesh, precision, recompute, reshard)
        initialize(model, seed=1)
        settings = OptimizerSettings(name=optimizer, lr=0.01)
        state = TrainState(model, build_optimizer(settings, list(model.named_parameters())))
        state.scaler = first_scaler(precision) if scale is None else ScalerState(scale)
        batch = microbatches(per_microbatch, mesh.rank, mesh.size)
        results = [train_step(state, batch, CPU, clip=1.0) for _ in range(count)]
        return results, {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}


@functools.cache
def reference() -> tuple[float, float]:
    """Return loss and gradient norm of the global batch by Transformers in float64, one sequence at a time."""
    spec = read_spec(CONFIG)
    names = family_of(CONFIG).names(spec)
    ours = Transformer(spec)
    ours.initialize(seed=1)
    theirs = LlamaForCausalLM(LlamaConfig(**CONFIG)).double()
    theirs.load_state_dict({names[n]: p.detach().double() for n, p in ours.named_parameters()}, strict=False)
    total, weight = torch.zeros((), dtype=torch.float64), 0.0
    for index in range(SAMPLES):
        one = sample(index)
        for start, end in zip(one.starts[:-1], one.starts[1:], strict=True):
            logits = theirs(input_ids=torch.from_numpy(one.tokens[start:end])[None]).logits[0]
            losses = F.cross_entropy(logits, torch.from_numpy(one.targets[start:end]), reduction="none")
            weights = torch.from_numpy(one.token_weights[start:end]).double()
            total, weight = total + (losses * weights).sum(), weight + float(weights.sum())
    loss = total / weight
    loss.backward()
    norm = sum(float(p.grad.square().sum()) for p in theirs.parameters() if p.grad is not None) ** 0.5
    return loss.item(), norm


LAYOUTS = [(1, 12), (1, 4), (1, 1), (2, 6), (2, 2), (3, 4), (3, 1)]


@pytest.mark.parametrize(("size", "per_microbatch"), LAYOUTS)
def test_loss_and_gradient_norm_are_the_same_on_every_layout(ranks, size: int, per_microbatch: int) -> None:
    loss, norm = reference()
    results = ranks(size).run(steps, per_microbatch)
    for (result,), _ in results:
        # fp32 sums of a few hundred terms; the requirement is 1e-5 and 1e-4.
        assert result.loss == pytest.approx(loss, rel=1e-6)
        assert result.gradient_norm == pytest.approx(norm, rel=1e-5)
        assert (result.loss, result.gradient_norm) == (results[0][0][0].loss, results[0][0][0].gradient_norm)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_parameters_after_steps_do_not_depend_on_the_layout(ranks, optimizer: str) -> None:
    _, expected = ranks(1).run(steps, 12, 3, "fp32", None, False, "none", optimizer)[0]
    for size, per_microbatch in ((1, 2), (2, 3), (3, 2)):
        _, found = ranks(size).run(steps, per_microbatch, 3, "fp32", None, False, "none", optimizer)[0]
        for name, value in expected.items():
            # AdamW's first updates are sign-like: a gradient near 0 can turn the rounding of a sum into a whole step
            # of 0.01, and Muon iterates in bf16; so the mean of the differences is asked for.
            assert (found[name] - value).abs().mean() < (2e-4 if optimizer == "muon" else 1e-5), name


def test_replicated_shards_and_resharding_give_the_same_step(ranks) -> None:
    loss, norm = reference()
    for options in ((Plan(dp_replicate=2), False), (Plan(dp_shard=2), True)):
        ((result,), _), _ = ranks(2).run(steps, 2, 1, "fp32", *options)
        assert result.loss == pytest.approx(loss, rel=1e-6)
        assert result.gradient_norm == pytest.approx(norm, rel=1e-5)


def test_recompute_changes_no_bit() -> None:
    (plain,), before = steps(4)
    (again,), after = steps(4, recompute="full")
    assert plain == again
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_same_step_twice_gives_the_same_bits() -> None:
    one, first = steps(4, count=3)
    two, second = steps(4, count=3)
    assert one == two
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_bf16_computes_in_bf16_and_updates_fp32_masters() -> None:
    loss, norm = reference()
    (result, *_), after = steps(4, count=3, precision="bf16")
    # bf16 keeps 8 bits: a loss near ln(96) may move in the third digit.
    assert result.loss == pytest.approx(loss, rel=5e-3)
    assert result.loss != pytest.approx(loss, rel=1e-7)
    assert result.gradient_norm == pytest.approx(norm, rel=0.05)
    weight = after["layers.0.mlp.up.weight"]
    assert weight.dtype == torch.float32
    assert not torch.equal(weight, weight.bfloat16().float())


def test_fp16_takes_its_loss_scale_out_again(ranks) -> None:
    loss, norm = reference()
    ((result,), _), _ = ranks(2).run(steps, 3, 1, "fp16")
    assert not result.skipped
    assert result.loss == pytest.approx(loss, rel=2e-3)
    assert result.gradient_norm == pytest.approx(norm, rel=0.02)


def _overflow_on(rank: int) -> tuple[StepResult, bool]:
    """Let the gradients of one rank alone overflow; return the result and whether any parameter moved."""
    with join(Plan(), CPU) as mesh:
        model = Transformer(read_spec(CONFIG), device="meta")
        lay_out(model, mesh, "fp16", "none", False)
        initialize(model, seed=1)
        state = TrainState(model, build_optimizer(OptimizerSettings(lr=0.01), list(model.named_parameters())))
        state.scaler = ScalerState(2.0**22)
        before = [p.to_local().clone() for p in model.parameters()]
        batch = microbatches(3, mesh.rank, mesh.size)
        if dist.get_rank() == rank:
            # Its tokens weigh nearly everything, so that those of the other rank hardly have a gradient.
            batch[0].token_weights.mul_(1e4)
        result = train_step(state, batch, CPU, clip=1.0)
        after = [p.to_local() for p in model.parameters()]
        return result, any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("rank", [0, 1])
def test_an_overflow_on_one_rank_makes_all_skip(ranks, rank: int) -> None:
    for result, moved in ranks(2).run(_overflow_on, rank):
        assert result.overflowed
        assert "overflowed fp16 at the loss scale 4,194,304" in result.skipped
        assert not moved


def _clipped(clip: float) -> tuple[float, float]:
    with join(Plan(), CPU) as mesh:
        model = Transformer(read_spec(CONFIG), device="meta")
        lay_out(model, mesh, "fp32", "none", False)
        initialize(model, seed=1)
        # Plain SGD with rate 1: the update is the clipped gradient itself.
        state = TrainState(model, torch.optim.SGD(model.parameters(), lr=1.0))
        before = [p.full_tensor().clone() for p in model.parameters()]
        result = train_step(state, microbatches(3, mesh.rank, mesh.size), CPU, clip)
        after = [p.full_tensor() for p in model.parameters()]
        moved = sum(float((a - b).square().sum()) for a, b in zip(before, after, strict=True)) ** 0.5
        return result.gradient_norm, moved


def test_clipping_bounds_the_whole_update_and_reports_the_norm_before(ranks) -> None:
    norm, moved = ranks(2).run(_clipped, 0.1)[0]
    assert norm == pytest.approx(reference()[1], rel=1e-5)
    assert moved == pytest.approx(0.1, rel=1e-4)
    assert ranks(2).run(_clipped, 0.0)[0][1] == pytest.approx(norm, rel=1e-4)


def test_a_batch_without_any_weight_is_skipped() -> None:
    with join(Plan(), CPU) as mesh:
        model = Transformer(read_spec(CONFIG), device="meta")
        lay_out(model, mesh, "fp32", "none", False)
        initialize(model, seed=1)
        state = TrainState(model, build_optimizer(OptimizerSettings(lr=0.01), list(model.named_parameters())))
        batch = microbatches(6)
        for one in batch:
            one.token_weights.zero_()
        result = train_step(state, batch, CPU, clip=1.0)
        assert result.skipped == "no token of the batch has a weight"
        assert not state.optimizer.state


def test_a_judge_can_keep_the_update_from_being_made() -> None:
    with join(Plan(), CPU) as mesh:
        model = Transformer(read_spec(CONFIG), device="meta")
        lay_out(model, mesh, "fp32", "none", False)
        initialize(model, seed=1)
        state = TrainState(model, build_optimizer(OptimizerSettings(lr=0.01), list(model.named_parameters())))
        seen = []
        result = train_step(state, microbatches(6), CPU, 1.0, lambda r: seen.append(r.loss) or "no")
        assert result.skipped == "no" and seen == [result.loss]
        assert not state.optimizer.state
