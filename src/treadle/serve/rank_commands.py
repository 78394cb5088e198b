"""What rank 0 asks of every rank of a parallel model, and what they answer: plain data, sent as MessagePack."""

from __future__ import annotations

from typing import Any

import msgspec

from treadle.serve.batch import StepBatch
from treadle.serve.room import NO_RESERVE, Reserve

# More than a batch of thousands of sequences with full block tables takes; what is larger is no command of ours.
MAX_MESSAGE_BYTES = 1 << 30


class Start(msgspec.Struct, tag=True):
    """The first message: who the rank is, and where it meets the others."""

    rank: int
    plan: dict[str, int]
    store: tuple[str, int]  # host and port
    device: str
    threads: int
    node_ranks: int  # how many ranks share its machine
    timeout: float  # seconds that it waits for another rank within a step
    model: str  # the path of the model, where the node was not given one of its own


class LoadWeights(msgspec.Struct, tag=True):
    """Read this rank's part of a model and keep it under a number; `path` "" is the model of the start.

    With a cache at hand, `reserve` is what must stay free beside it.
    """

    number: int
    path: str
    dtype: str
    reserve: Reserve = NO_RESERVE


class DropWeights(msgspec.Struct, tag=True):
    """Forget the weights of a number."""

    number: int


class LoadAdapter(msgspec.Struct, tag=True):
    """Read this rank's part of a LoRA adapter and keep it under a slot."""

    slot: int
    path: str
    reserve: Reserve


class DropAdapter(msgspec.Struct, tag=True):
    """Forget the adapter of a slot."""

    slot: int


class Measure(msgspec.Struct, tag=True):
    """Tell the bytes of memory that are available, and what a step takes of them. Every rank computes, in step."""


class MakeCache(msgspec.Struct, tag=True):
    """Make the key-value cache: so many blocks for each layer group of the whole model."""

    blocks: list[int]
    block_size: int
    format: str
    deterministic: bool = False


class FreeCache(msgspec.Struct, tag=True):
    """Give the cache's memory back; what it held is gone."""


class Step(msgspec.Struct, tag=True):
    """Compute a step with the weights of a number. There is no answer but what the ranks send each other."""

    weights: int
    batch: StepBatch


class Leave(msgspec.Struct, tag=True):
    """End well."""


Command = LoadWeights | DropWeights | LoadAdapter | DropAdapter | Measure | MakeCache | FreeCache | Step | Leave


class Call(msgspec.Struct, array_like=True):
    """A command and the number that its answer carries."""

    number: int
    command: Command


class Hello(msgspec.Struct, tag=True):
    """A rank is there. `versions` must be the same everywhere."""

    rank: int
    pid: int
    host: str
    versions: dict[str, str]
    key: str = ""  # of a rank on another node: what the store gave it


class Done(msgspec.Struct, tag=True):
    """The answer to a call that succeeded."""

    number: int
    value: Any = None


class Failed(msgspec.Struct, tag=True):
    """The answer to a call that failed. `fatal` ends the rank; `waiting`: it only lost its connection to another."""

    number: int
    message: str
    user: bool = False
    fatal: bool = False
    waiting: bool = False


Answer = Hello | Done | Failed


def describe(command: Command) -> str:
    """Return what a command is, for people."""
    if isinstance(command, Step):
        sequences, tokens = len(command.batch.counts), len(command.batch.tokens)
        return f"a step of {sequences} sequence{'s' * (sequences != 1)} ({tokens} token{'s' * (tokens != 1)})"
    return _NAMES[type(command)]


_NAMES: dict[type, str] = {
    LoadWeights: "loading weights",
    DropWeights: "dropping weights",
    LoadAdapter: "loading an adapter",
    DropAdapter: "dropping an adapter",
    Measure: "measuring memory",
    MakeCache: "making the cache",
    FreeCache: "freeing the cache",
    Leave: "ending",
}
