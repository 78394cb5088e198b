"""GET /state: what the page at / shows of the server, as JSON. Counters grow from the start."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from treadle.serve.api.service import Service
from treadle.serve.api.streams import JsonAnswer
from treadle.serve.interface import EngineInterface
from treadle.serve.stats import EngineStats

Json = dict[str, Any]
# Of what an engine counts, that which is no plain number or has no meaning outside of its process.
_LEFT_OUT = frozenset(["steps_by_seqs", "steps_by_tokens", "steps_by_seconds", "stepped", "blocks", "blocks_held"])


def server_state(service: Service) -> Json:
    """Return everything that the page shows."""
    engine = service.engine
    capacity, spec, chats = engine.capacity, engine.spec, service.chats
    status, reason = _status(engine)
    return {
        "status": status,
        "reason": reason,
        "model": service.names[0],
        "names": service.names,
        "family": spec.family,
        "weight_version": engine.weight_version,
        "chats": chats is not None and chats.tokenizer.chat_template is not None,
        "takes_text": engine.tokenizer is not None,
        "takes_system": chats is not None and chats.takes_system,
        "max_model_len": engine.max_model_len,
        "kv_cache": {
            "tokens": capacity.tokens,
            "bytes": capacity.bytes,
            "block_size": capacity.block_size,
            "sequences": capacity.seqs,
        },
        "uptime_seconds": time.time() - service.started,
        # As it was printed, such as {"dtype": "float32 on cpu (2 threads)"}; several of a name are apart by line.
        "summary": _summary(engine.summary),
        "engines": [_engine(stats) for stats in engine.engine_stats],
    }


def _status(engine: EngineInterface) -> tuple[str, str]:
    if engine.unhealthy:
        return "failed", engine.unhealthy
    if any(stats.asleep for stats in engine.engine_stats):
        return "asleep", "it has given its memory back and answers once it is woken"
    return "ok", ""


def _engine(stats: EngineStats) -> Json:
    numbers = {name: value for name, value in asdict(stats).items() if name not in _LEFT_OUT}
    quiet = max(0.0, time.monotonic() - stats.stepped) if stats.steps else None
    usage = stats.blocks_held / stats.blocks if stats.blocks else 0.0
    return numbers | {
        "stepped_tokens": stats.steps_by_tokens.total,  # of all steps together
        "stepped_sequences": stats.steps_by_seqs.total,
        "kv_usage": usage,
        "seconds_since_step": quiet,
    }


def _summary(lines: list[str]) -> dict[str, str]:
    rows: dict[str, str] = {}
    for line in lines:
        name, text = line[:9].strip(), line[9:].strip()
        rows[name] = f"{rows[name]}\n{text}" if name in rows else text
    return rows


def add_state(app: FastAPI, service: Service) -> None:
    @app.get("/state")
    async def state(request: Request) -> Response:
        return JsonAnswer(server_state(service), headers={"Cache-Control": "no-store"})
