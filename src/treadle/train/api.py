"""The Python face of training: `treadle.train(config)`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from treadle.config import UserError, load_settings, parse_settings
from treadle.config.settings import save_settings, set_dotted
from treadle.parallel.mesh import launched, world_from_environment
from treadle.train.build import check_run
from treadle.train.checkpoints import lock_run
from treadle.train.feed import open_feed
from treadle.train.launch import launch
from treadle.train.report import OUTCOME
from treadle.train.settings import RunSettings
from treadle.train.worker import run_rank


def train(config: str | Path | Mapping[str, Any] | RunSettings, overrides: Sequence[str] = ()) -> Path:
    """Train as `treadle train` does and return the folder of the last checkpoint.

    `config` is a YAML file, the same as nested mappings, or settings; `overrides` are `key.path=value`. One process
    trains in this one, several are started, and under a launcher such as torchrun this process is one rank.
    Raises UserError for what cannot be carried out as asked, before anything is started; TreadleError for what fails.
    """
    settings = read(config, overrides)
    rank, ranks, _ = world_from_environment()
    if not launched():
        ranks = settings.nproc
    elif settings.nproc not in (1, ranks):
        raise UserError(f"nproc={settings.nproc}, but the launcher started {ranks} ranks; leave nproc out")
    feed = open_feed(settings.data)
    check_run(settings, feed, ranks)
    with lock_run(settings.run) if rank == 0 else nullcontext():
        resolved = settings.run / "settings.yaml"
        if rank == 0:
            save_settings(settings, resolved)
            (settings.run / OUTCOME).unlink(missing_ok=True)
        if launched() or ranks == 1:
            run_rank(settings, feed)
        else:
            launch(resolved, ranks)
    return settings.run / "checkpoints" / "latest"


def read(config: str | Path | Mapping[str, Any] | RunSettings, overrides: Sequence[str] = ()) -> RunSettings:
    """Return the settings that `config` and `overrides` make. Raises UserError."""
    if isinstance(config, (str, Path)):
        return load_settings(RunSettings, config, overrides)
    if isinstance(config, RunSettings):
        config = config.model_dump(mode="json", by_alias=True)
    tree = copy.deepcopy(dict(config))
    for override in overrides:
        set_dotted(tree, override)
    return parse_settings(RunSettings, tree)
