"""Puts an engine's core together from a model and settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.config import UserError
from treadle.serve.adapters import adapter_bytes
from treadle.serve.batch import layer_groups
from treadle.serve.batching import BatchPolicy, make_policy
from treadle.serve.block_tables import BlockTables
from treadle.serve.capacity import Capacity, Wanted, available_memory, fit_capacity
from treadle.serve.core import Core
from treadle.serve.cost_store import cost_identity, cost_path
from treadle.serve.kv_cache import KVCache, KVFormat
from treadle.serve.measure import step_bytes_of
from treadle.serve.model import Model
from treadle.serve.runner import LocalRunner, Runner
from treadle.serve.scheduler import Limits

if TYPE_CHECKING:
    from treadle.serve.engine import EngineSettings


def assemble(model: Model, settings: EngineSettings) -> tuple[Core, Capacity]:
    """Return the core of an engine, and what its cache holds. Raises UserError where it does not fit."""
    capacity, kv_format = _fit(model, settings)
    groups = layer_groups(model.spec)
    counts = [count + 1 for count in capacity.blocks]  # with the one that nobody has
    runner: Runner
    if model.ranks is None:
        cache = KVCache(model.spec, groups, counts, capacity.block_size, kv_format, model.device)
        runner = LocalRunner(model.module, cache, settings.deterministic)
    else:
        from treadle.serve.parallel_runner import ParallelRunner

        runner = ParallelRunner.start(
            model.ranks, counts, capacity.block_size, settings.kv_cache_dtype, settings.deterministic
        )
    limits = Limits(
        capacity.seqs, settings.max_num_batched_tokens, capacity.block_size, settings.enable_chunked_prefill
    )
    core = Core(
        model,
        runner,
        BlockTables(groups, capacity.blocks, capacity.block_size),
        limits,
        reuse_prefixes=settings.enable_prefix_caching,
        drafts=settings.num_speculative_tokens,
        policy=_policy(model, settings),
        check=settings.check_blocks,
        version=settings.weight_version,
    )
    return core, capacity


def _policy(model: Model, settings: EngineSettings) -> BatchPolicy:
    """Return the batch policy; a dynamic one remembers what it learned at this model on this machine."""
    if settings.batch is None:
        return make_policy(None)
    cache = {"kv_cache_dtype": settings.kv_cache_dtype, "deterministic": settings.deterministic}
    identity = cost_identity(model, **cache)
    return make_policy(settings.batch, settings.enable_chunked_prefill, cost_path(identity), identity)


def _fit(model: Model, settings: EngineSettings) -> tuple[Capacity, KVFormat]:
    """Return what fits the memory, and the format of keys and values."""
    wanted = Wanted(
        settings.max_num_seqs,
        settings.max_model_len,
        settings.kv_cache_memory,
        settings.block_size,
        settings.max_num_batched_tokens,
        settings.enable_prefix_caching,
    )
    kv_format = KVFormat.of(settings.kv_cache_dtype, model.dtype, model.device)
    reserved = 0
    if settings.enable_lora or settings.lora_modules:
        reserved = settings.max_loras * adapter_bytes(model.spec, settings.max_lora_rank, model.dtype.itemsize)
    if model.ranks is None:
        step_bytes = step_bytes_of(model.module, settings.max_num_batched_tokens)
        available = max(0, available_memory(model.device) - reserved)
        capacity = fit_capacity(model.spec, kv_format, wanted, available, step_bytes)
    else:
        from treadle.serve.parallel_runner import fit_on_ranks

        capacity = fit_on_ranks(model.ranks, model.spec, model.dtype, kv_format, wanted, reserved)
    if not settings.enable_chunked_prefill and settings.max_num_batched_tokens < capacity.length:
        raise UserError(
            f"without chunked prefill a step must hold the longest prompt: max_num_batched_tokens="
            f"{settings.max_num_batched_tokens} is less than the {capacity.length} tokens of max_model_len; raise it"
        )
    return capacity, kv_format
