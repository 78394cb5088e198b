"""A model to disk as a Hugging Face directory that Transformers, vLLM and Treadle load as it is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from treadle.config import UserError
from treadle.config.files import json_bytes
from treadle.model.families import family_of
from treadle.model.spec import ModelSpec
from treadle.model.tokenizer import Tokenizer
from treadle.weights.checkpoint import INDEX, SINGLE
from treadle.weights.ledger import parameter_shapes
from treadle.weights.safetensors_file import SafetensorsWriter

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROLES = ("bos_token_id", "eos_token_id", "pad_token_id")


def save_model(
    folder: str | Path,
    spec: ModelSpec,
    state: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    tokenizer: Tokenizer | None = None,
    shard_bytes: int = 5 << 30,
    dtype: torch.dtype | None = None,
    generation: Mapping[str, Any] | None = None,
) -> None:
    """Write config.json, generation_config.json, the weights and the tokenizer's files into `folder`.

    `state` holds every parameter under our name, whole, in any order; given as an iterable only one needs to be in
    memory. All are written in `dtype` (default: the first one's). Files of weights hold at most `shard_bytes`, or one
    tensor. `generation` holds further entries of generation_config.json. A tied head is not written.
    The folder must exist; writing it atomically is the caller's business (config.files.atomic_folder).
    Raises UserError for a dtype that checkpoints do not have, ValueError where `state` is not that of the spec.
    """
    folder = Path(folder)
    pairs = iter(cast(Iterable[tuple[str, Tensor]], state.items() if isinstance(state, Mapping) else state))
    first = next(pairs, None)
    if first is None:
        raise ValueError("there are no parameters to save")
    dtype = dtype or first[1].dtype
    if dtype not in DTYPES:
        raise UserError(f"models are saved in float32, bfloat16 or float16, not {str(dtype).removeprefix('torch.')}")
    config = saved_config(spec, dtype, tokenizer)
    _write_weights(folder, spec, chain([first], pairs), dtype, shard_bytes)
    (folder / "config.json").write_bytes(json_bytes(config))
    known = {role: config[role] for role in ROLES if config.get(role) is not None}
    (folder / "generation_config.json").write_bytes(json_bytes({**(generation or {}), **known}))
    if tokenizer is not None:
        tokenizer.save(folder)


def saved_config(spec: ModelSpec, dtype: torch.dtype, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
    """Return the config.json to write: the one that the spec was read from, with the dtype and the architecture of the
    weights, and the special tokens of `tokenizer` where one is given."""
    config = dict(spec.config)
    for stale in ("torch_dtype", "auto_map", "transformers_version", "_name_or_path"):
        config.pop(stale, None)
    config["architectures"] = [family_of(config).architecture]
    config["dtype"] = str(dtype).removeprefix("torch.")
    if tokenizer is not None:
        ends = list(tokenizer.eos_ids)
        config["bos_token_id"], config["pad_token_id"] = tokenizer.bos_id, tokenizer.pad_id
        config["eos_token_id"] = ends[0] if len(ends) == 1 else ends or None
    for role in ROLES:
        # A family's default that this vocabulary does not have; Transformers would refuse such a padding token.
        ids = config.get(role)
        if not all(_is_token(index, spec.vocabulary) for index in (ids if isinstance(ids, list) else [ids])):
            config[role] = None
    return config


def _is_token(index: Any, vocabulary: int) -> bool:
    return isinstance(index, int) and 0 <= index < vocabulary


def _write_weights(
    folder: Path, spec: ModelSpec, pairs: Iterable[tuple[str, Tensor]], dtype: torch.dtype, shard_bytes: int
) -> None:
    names = family_of(spec.config).names(spec)
    shards = plan_shards(parameter_shapes(spec), dtype.itemsize, shard_bytes)
    files = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    files = [SINGLE] if len(shards) == 1 else files
    placed: dict[str, SafetensorsWriter] = {}
    with ExitStack() as stack:
        for file, shard in zip(files, shards, strict=True):
            shapes = {names[ours]: shape for ours, shape in shard.items()}
            writer = stack.enter_context(SafetensorsWriter(folder / file, dtype, shapes))
            placed |= dict.fromkeys(shard, writer)
        for ours, tensor in pairs:
            if ours not in placed:
                raise ValueError(f"the state holds '{ours}', which is no parameter of this {spec.family} model")
            placed[ours].write(names[ours], tensor)
    if len(shards) > 1:
        total = sum(math.prod(shape) for shard in shards for shape in shard.values())
        metadata = {"total_parameters": total, "total_size": total * dtype.itemsize}
        places = {names[ours]: file for file, shard in zip(files, shards, strict=True) for ours in shard}
        (folder / INDEX).write_bytes(json_bytes({"metadata": metadata, "weight_map": places}))


def plan_shards(
    shapes: Mapping[str, tuple[int, ...]], itemsize: int, shard_bytes: int
) -> list[dict[str, tuple[int, ...]]]:
    """Return the tensors of each file, in their order: as many as fit in `shard_bytes`, at least one."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    room = shard_bytes
    for name, shape in shapes.items():
        size = math.prod(shape) * itemsize
        if shards[-1] and size > room:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = shape
        room -= size
    return shards
