"""From settings to a sharded model with its values: from scratch, from one number, or from an existing model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from treadle.config import UserError
from treadle.device.choice import choose_device
from treadle.model.families import read_spec
from treadle.model.lora import attach_lora, initial_adapter_value, lora_state
from treadle.model.spec import ModelSpec
from treadle.model.transformer import Transformer
from treadle.parallel.mesh import Mesh, launched
from treadle.parallel.shard import fill, materialize, shard
from treadle.train.feed import Feed
from treadle.train.optimizers import build_optimizer, optimizers
from treadle.train.precision import DTYPES, Precision, first_scaler
from treadle.train.recompute import Recompute, recompute_layers
from treadle.train.schedules import check_schedule
from treadle.train.settings import HEAD_SIZE, ModelSettings, RunSettings, batching, total_steps
from treadle.train.sinks import check_sinks
from treadle.train.state import TrainState
from treadle.weights.load import load_tokenizer, stream_model


def check_run(settings: RunSettings, feed: Feed, ranks: int) -> None:
    """Raise UserError where a run cannot be carried out on `ranks` ranks, before anything is started or written."""
    plan = settings.plan.resolve(ranks)
    for axis in ("pp", "tp"):
        if plan.axes()[axis] > 1:
            raise UserError(f"plan.{axis}={plan.axes()[axis]}: training cannot cut a model this way yet; set it to 1")
    batching(settings, ranks)
    if not launched():
        choose_device(settings.train.device, ranks - 1)
    optimizers.get(settings.optimizer.name)
    check_sinks(settings.log)
    if settings.stop.patience is not None and not feed.validation:
        raise UserError(
            "stop.patience needs held-out data; set data.validation, or prepare the corpus with --validation"
        )
    if settings.stop.patience is not None and not settings.evaluation.every:
        raise UserError("stop.patience counts evaluations in the loop; set evaluation.every to some number of steps")
    spec = spec_of(settings, feed)
    check_tokenizer(settings, feed)
    if settings.model.lora is not None:
        attach_lora(Transformer(spec, device="meta"), settings.model.lora.spec())
    check_schedule(settings.schedule, total_steps(settings, spec.parameters_count()))


def spec_of(settings: RunSettings, feed: Feed) -> ModelSpec:
    """Return the spec of the run's model. Raises UserError where data and model do not fit each other."""
    vocabulary, length = feed.mixture.vocabulary_size, settings.data.sequence_length
    if settings.model.from_ is not None:
        spec = stream_model(settings.model.from_).spec
    else:
        spec = spec_from_scratch(settings.model, vocabulary, length)
    check_fits(spec, vocabulary, length)
    return spec


def check_tokenizer(settings: RunSettings, feed: Feed) -> None:
    """Raise UserError where a model that is fine-tuned has another tokenizer than the data was made with."""
    if settings.model.from_ is not None:
        tokenizer = load_tokenizer(settings.model.from_)
        if tokenizer is not None:
            feed.mixture.corpora[0].check_tokenizer(tokenizer, whose=f"the model {settings.model.from_}")


def build_state(settings: RunSettings, feed: Feed, mesh: Mesh) -> TrainState:
    """Return the state that a run begins with, laid out over the mesh. Raises UserError."""
    train, base = settings.train, settings.model.from_
    model = Transformer(spec_of(settings, feed), device="meta")
    lora = settings.model.lora.spec() if settings.model.lora is not None else None
    if lora is not None:
        attach_lora(model, lora)
    lay_out(model, mesh, train.precision, train.recompute, train.reshard == "forward")
    if base is not None:
        fill(model, itertools.chain(stream_model(base, torch.float32).parameters, first_adapters(model, train.seed)))
    else:
        initialize(model, train.seed)
    optimizer = build_optimizer(settings.optimizer, list(model.named_parameters()))
    state = TrainState(model, optimizer, scaler=first_scaler(train.precision), lora=lora, base=str(base or ""))
    state.counters.data = feed.mixture.fingerprint
    return state


def first_adapters(model: Transformer, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the first values of a model's adapters, whole."""
    for name, parameter in lora_state(model).items():
        yield name, initial_adapter_value(name, parameter.shape, seed)


def config_of_depth(depth: int, vocabulary: int, max_positions: int) -> dict[str, Any]:
    """Return the config.json of a Llama of `depth` layers: width 64 x depth, heads of 64, a third as many for keys."""
    width = HEAD_SIZE * depth
    kv_heads = max(heads for heads in range(1, depth + 1) if depth % heads == 0 and heads * 3 <= max(depth, 3))
    return {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": (8 * width // 3 + 63) // 64 * 64,
        "num_hidden_layers": depth,
        "num_attention_heads": depth,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_SIZE,
        "vocab_size": vocabulary,
        "max_position_embeddings": max_positions,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": depth < 24,
    }


def spec_from_scratch(settings: ModelSettings, vocabulary: int, sequence_length: int) -> ModelSpec:
    """Return the spec of a model that starts from random values. Raises UserError where the data does not fit it."""
    if settings.depth is not None:
        return read_spec(config_of_depth(settings.depth, vocabulary, sequence_length))
    assert settings.config is not None
    config = {"vocab_size": vocabulary, "max_position_embeddings": sequence_length, **settings.config}
    return read_spec(config)


def check_fits(spec: ModelSpec, vocabulary: int, sequence_length: int) -> None:
    """Raise UserError where the data has tokens or lengths that the model has not."""
    if spec.vocabulary < vocabulary:
        raise UserError(
            f"the data's tokenizer has {vocabulary} tokens, the model only {spec.vocabulary}; set vocab_size to at "
            f"least {vocabulary}, or prepare the data with the model's own tokenizer (--tokenizer)"
        )
    if spec.max_positions < sequence_length:
        raise UserError(
            f"data.sequence_length={sequence_length} is longer than the {spec.max_positions} positions of the model; "
            "lower it or raise max_position_embeddings"
        )


def lay_out(
    model: Transformer, mesh: Mesh, precision: Precision, recompute: Recompute, reshard_in_forward: bool
) -> None:
    """Apply recompute and sharding, in this order, to a model on "meta", and give it its memory."""
    recompute_layers(model, recompute)
    shard(model, model.layers, mesh, DTYPES[precision], reshard_in_forward)
    materialize(model, mesh.device)


def initialize(model: Transformer, seed: int) -> None:
    """Give a laid-out model its random first values; they do not depend on the layout."""
    fill(model, ((name, model.initial_value(name, p.shape, seed)) for name, p in model.named_parameters()))
