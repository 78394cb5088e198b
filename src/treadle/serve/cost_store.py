"""What was learned about the cost of steps, kept on disk for the next start of the same model on the same machine."""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from treadle.config import UserError
from treadle.config.files import cache_home, read_json, write_atomically
from treadle.device.host import accelerators, cores, processor
from treadle.serve.cost_model import KEEP, LONGEST, SHORTEST, CostModel, StepWork
from treadle.serve.lengths import CLASSES, LengthHistogram

if TYPE_CHECKING:
    from treadle.serve.model import Model

FORMAT = "treadle-step-costs-1"
MAX_BYTES = 4 << 20
MAX_SAMPLES = 64 * KEEP
MAX_COUNT = 1 << 48  # tokens or pairs of one step: anything larger is no measurement


def cost_identity(model: Model, **more: object) -> dict[str, str]:
    """Return what the cost of steps depends on: the model's shape and bytes, the machine, and `more` (settings)."""
    device = model.device
    machine = processor() if device.type == "cpu" else _accelerator(device)
    return {
        "model": hashlib.sha256(repr(model.spec).encode()).hexdigest()[:16],
        "dtype": str(model.dtype).removeprefix("torch."),
        "bytes": str(sum(tensor.nbytes for tensor in model.module.state_dict().values())),
        "machine": machine,
        "system": platform.machine(),
        "cores": str(cores()),
        "threads": str(torch.get_num_threads()),
        "plan": "" if model.ranks is None else str(model.ranks.plan),
        **{name: str(value) for name, value in more.items()},
    }


def cost_path(identity: Mapping[str, str]) -> Path:
    """Return the file in Treadle's cache folder for what has this identity."""
    digest = hashlib.sha256(json.dumps(dict(identity), sort_keys=True).encode()).hexdigest()
    return cache_home() / "step-costs" / f"{digest[:24]}.json"


def save_costs(path: Path, identity: Mapping[str, str], costs: CostModel, lengths: LengthHistogram) -> None:
    """Write what was learned, whole or not at all. Raises UserError or TreadleError where that is impossible."""
    samples = [
        [work.tokens, work.rows, work.context, work.pairs, float(f"{seconds:.6g}")] for work, seconds in costs.samples()
    ]
    content = {
        "format": FORMAT,
        "identity": dict(identity),
        "lengths": [round(count, 3) for count in lengths.counts],
        "samples": samples,
    }
    write_atomically(path, json.dumps(content, separators=(",", ":")).encode())


def load_costs(path: Path, identity: Mapping[str, str]) -> tuple[CostModel | None, LengthHistogram | None, str]:
    """Return what `save_costs` wrote to `path`; where that cannot be used, nothing, and a line that says why."""
    try:
        content = read_json(path, MAX_BYTES)
        if content is None:
            return None, None, ""
        if content.get("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        found = content.get("identity")
        if found != dict(identity):
            found = found if isinstance(found, dict) else {}
            differing = sorted(key for key in {*found, *identity} if found.get(key) != identity.get(key))
            raise ValueError(f"it is of another {', '.join(differing)}")
        lengths = LengthHistogram(_lengths(content.get("lengths")))
        return CostModel.remembering(_samples(content.get("samples"))), lengths, ""
    except (UserError, ValueError) as error:
        return None, None, f"the costs learned earlier ({path}) are left out: {error}; they are learned again"


def _lengths(counts: Any) -> list[float]:
    if not isinstance(counts, list) or len(counts) != CLASSES or not all(_within(one, MAX_COUNT) for one in counts):
        raise ValueError("its lengths are damaged")
    return counts


def _samples(rows: Any) -> list[tuple[StepWork, float]]:
    if not isinstance(rows, list) or len(rows) > MAX_SAMPLES:
        raise ValueError("its measurements are damaged")
    samples = []
    for row in rows:
        if not isinstance(row, list) or len(row) != 5 or not all(_within(value, MAX_COUNT) for value in row):
            raise ValueError("a measurement is damaged")
        tokens, counts, seconds = row[0], row[:4], row[4]
        if not all(isinstance(count, int) for count in counts) or tokens < 1 or not SHORTEST <= seconds <= LONGEST:
            raise ValueError("a measurement is damaged")
        samples.append((StepWork(*counts), float(seconds)))
    return samples


def _within(value: Any, most: float) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and 0 <= value <= most


def _accelerator(device: torch.device) -> str:
    for one in accelerators():
        if one.device == str(device) or one.device == f"{device.type}:{device.index or 0}":
            return one.name
    return device.type
