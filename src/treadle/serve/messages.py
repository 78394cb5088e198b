"""What the server's process and an engine's process tell each other. Each message is a frame of msgpack."""

from __future__ import annotations

from typing import Any

import msgspec

from treadle.serve.capacity import Capacity
from treadle.serve.request import Delta
from treadle.serve.stats import EngineStats


class Start(msgspec.Struct, tag=True):
    """Load this model and serve it. The first message."""

    model: str
    dtype: str
    device: str | None
    settings: dict[str, Any]
    threads: int  # to compute with; 0: as many as there are cores


class Submit(msgspec.Struct, tag=True):
    """Queue a prompt that was checked."""

    number: int
    tokens: list[int]
    settings: dict[str, Any]
    max_tokens: int
    stop_ids: list[int]
    embeds: bool


class Cancel(msgspec.Struct, tag=True):
    """End what still runs of a prompt."""

    number: int


class Command(msgspec.Struct, tag=True):
    """Carry out a command (see commands.py)."""

    number: int
    name: str
    arguments: dict[str, Any]


class Ping(msgspec.Struct, tag=True):
    """Say that you are there."""


class Close(msgspec.Struct, tag=True):
    """Let running requests finish for so many seconds, then end."""

    timeout: float


class Ready(msgspec.Struct, tag=True):
    """The model is loaded."""

    capacity: Capacity
    summary: list[str]
    weight_version: str
    adapters: list[str]


class Deltas(msgspec.Struct, tag=True):
    """What a step brought, by the number of the prompt."""

    deltas: list[tuple[int, Delta]]
    stats: EngineStats | None


class Result(msgspec.Struct, tag=True):
    """What came of a command, or why a prompt could not be queued."""

    number: int
    value: Any = None
    error: str = ""
    users_mistake: bool = False


class Pong(msgspec.Struct, tag=True):
    """I am there."""

    stats: EngineStats
    unhealthy: str


class Failed(msgspec.Struct, tag=True):
    """The engine has ended and will answer nothing more."""

    why: str
    users_mistake: bool


ToEngine = Start | Submit | Cancel | Command | Ping | Close
FromEngine = Ready | Deltas | Result | Pong | Failed

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
