"""How many blocks of KV cache an engine gets: measured, so that the worst batch that its settings admit fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from treadle.config import UserError
from treadle.config.progress import amount_text
from treadle.device import memory
from treadle.model.spec import ModelSpec
from treadle.serve.batch import LayerGroup, layer_groups
from treadle.serve.kv_cache import KVFormat, group_bytes_per_token

DEFAULT_SEQS, MIN_DEFAULT_SEQS = 16, 4
MEMORY_SHARE = 0.8  # of what is available once the weights are loaded; the rest is the operating system's and others'


@dataclass(frozen=True)
class Capacity:
    """What fits: sequences at once, tokens of the longest, blocks by layer group, bytes when all are written."""

    seqs: int
    length: int
    blocks: tuple[int, ...]
    block_size: int
    bytes: int
    step_bytes: int  # that one step takes besides: activations and logits
    notes: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens that the cache holds: of the layers that see everything, where there are any."""
        return max(self.blocks) * self.block_size


@dataclass(frozen=True)
class Wanted:
    """What the user named; None is left open."""

    max_seqs: int | None = None
    max_length: int | None = None
    cache_bytes: int | None = None
    block_size: int = 16
    step_tokens: int = 2048
    prefixes: bool = True  # blocks are kept for later prompts


def available_memory(device: torch.device) -> int:
    """Return the bytes that may still be taken on `device`."""
    if device.type in ("cpu", "mps"):  # MPS shares the machine's memory
        return memory().available
    return torch.accelerator.get_memory_info(device)[0]


def fit_capacity(
    spec: ModelSpec,
    kv_format: KVFormat,
    wanted: Wanted,
    available: int,
    step_bytes: Callable[[int, int], int],
) -> Capacity:
    """Return how much cache to have in `available` bytes of memory.

    `step_bytes(sequences, length)` tells what the largest step takes besides. What the user named is kept or refused
    with a UserError that gives the numbers; what was left open is reduced until it fits, which the notes say.
    """
    _check(spec, wanted)
    groups = layer_groups(spec)
    seqs, length = wanted.max_seqs or DEFAULT_SEQS, wanted.max_length or spec.max_positions
    room = int(available * MEMORY_SHARE)
    notes = []

    def fits(seqs: int, length: int) -> bool:
        blocks = _blocks(groups, wanted, seqs, length)
        cache = _bytes(spec, kv_format, groups, blocks, wanted.block_size)
        return cache <= min(room - step_bytes(seqs, length), wanted.cache_bytes or room)

    def whole(seqs: int, length: int) -> int:
        return seqs * -(-length // wanted.block_size)

    if wanted.max_seqs is None and not fits(whole(seqs, length), length):
        lower = [n for n in range(MIN_DEFAULT_SEQS, seqs) if fits(whole(n, length), length)]
        seqs = max(lower, default=MIN_DEFAULT_SEQS)
        notes.append(f"{seqs} sequences at once instead of {DEFAULT_SEQS}, to fit the available memory")
    # Sequences need not all be as long as the longest may be: where blocks run out, some wait.
    full = whole(seqs, length)
    blocks = full if fits(full, length) else _largest(lambda count: fits(count, length), full)
    least = -(-length // wanted.block_size)
    if blocks < least and wanted.max_length is None and blocks > 0:
        length, least = blocks * wanted.block_size, blocks
        notes.append(f"sequences of up to {length} tokens instead of {spec.max_positions}, to fit the available memory")
    if blocks < least:
        raise UserError(_refusal(spec, kv_format, groups, wanted, seqs, length, room, step_bytes(seqs, length)))
    if blocks < full:
        notes.append(
            f"{blocks * wanted.block_size} tokens of cache instead of {seqs} x {length}: where sequences need more, "
            "the latest wait"
        )
    by_group = _blocks(groups, wanted, blocks, length)
    size = _bytes(spec, kv_format, groups, by_group, wanted.block_size)
    return Capacity(seqs, length, by_group, wanted.block_size, size, step_bytes(seqs, length), tuple(notes))


def _check(spec: ModelSpec, wanted: Wanted) -> None:
    if wanted.max_length is not None and not 1 <= wanted.max_length <= spec.max_positions:
        raise UserError(
            f"max_model_len must lie between 1 and the model's context of {spec.max_positions} tokens, "
            f"it is {wanted.max_length}"
        )
    if wanted.max_seqs is not None and wanted.step_tokens < wanted.max_seqs:
        raise UserError(
            f"max_num_batched_tokens={wanted.step_tokens} is less than max_num_seqs={wanted.max_seqs}, so a step could "
            "not give every sequence its token; raise the one or lower the other"
        )


def _blocks(groups: Sequence[LayerGroup], wanted: Wanted, blocks: int, length: int) -> tuple[int, ...]:
    """Return the blocks by group that go with `blocks` in a group that sees everything."""
    counts = []
    sequences = -(-blocks // -(-length // wanted.block_size))  # so many of the longest can run
    for group in groups:
        count = blocks
        if group.window:
            seen = -(-group.window // wanted.block_size) + 1
            # Besides what it sees, a sequence has the blocks that this step fills; prefixes keep as much again.
            live = (wanted.max_seqs or DEFAULT_SEQS) * (seen + 1) + -(-wanted.step_tokens // wanted.block_size)
            count = min(blocks, max(live * (2 if wanted.prefixes else 1), sequences * seen))
        counts.append(count)
    return tuple(counts)


def _bytes(
    spec: ModelSpec,
    kv_format: KVFormat,
    groups: Sequence[LayerGroup],
    blocks: Sequence[int],
    block_size: int,
) -> int:
    return sum(
        (count + 1) * block_size * group_bytes_per_token(spec, group, kv_format)
        for group, count in zip(groups, blocks, strict=True)
    )


def _largest(fits: Callable[[int], bool], below: int) -> int:
    """Return the largest count below `below` that fits, 0 where none does."""
    low, high = 0, below
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _refusal(
    spec: ModelSpec,
    kv_format: KVFormat,
    groups: Sequence[LayerGroup],
    wanted: Wanted,
    seqs: int,
    length: int,
    room: int,
    step: int,
) -> str:
    least = _blocks(groups, wanted, -(-length // wanted.block_size), length)
    cache = amount_text(_bytes(spec, kv_format, groups, least, wanted.block_size), "B")
    if wanted.cache_bytes is not None and wanted.cache_bytes <= room - step:
        limit = f"kv_cache_memory gives it {amount_text(wanted.cache_bytes, 'B')}; raise it"
    else:
        limit = (
            f"of the {amount_text(room, 'B')} of memory that can be used a step of {wanted.step_tokens} tokens takes "
            f"{amount_text(step, 'B')}, which leaves {amount_text(max(0, room - step), 'B')}; "
            "lower max_num_batched_tokens"
        )
    return (
        f"the key-value cache of a single sequence of {length} tokens takes {cache}, but {limit}, or set a smaller "
        f"max_model_len (at {seqs} sequences)"
    )
