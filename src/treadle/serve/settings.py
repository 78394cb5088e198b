"""What a server is started with: every flag of `treadle serve`, every key of its --config file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from treadle.config import UserError, parse_settings
from treadle.config.settings import read_yaml
from treadle.serve.engine import EngineSettings


class ServeSettings(EngineSettings):
    """The engine's settings and those of the server around it; the names are vLLM's where it has one."""

    model: str = Field(min_length=1)
    served_model_name: tuple[str, ...] = ()  # that clients ask for; empty: the file's or folder's name
    dtype: str = "auto"
    device: str | None = None
    data_parallel_size: int = Field(1, ge=1, le=256)  # engines, each with the whole model
    trust_remote_code: bool = False
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str = ""
    admin_key: str = ""  # for what changes the server; empty: nobody may
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    allowed_origins: tuple[str, ...] = ()  # pages of other origins that may call it (CORS)
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    shutdown_timeout: float = Field(30.0, ge=0)  # seconds that running requests get to finish at the end

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if any(not name.strip() for name in self.served_model_name):
            raise ValueError("served_model_name is empty; give the name that clients ask for, or leave it out")
        if self.nnodes > 1 and self.data_parallel_size > 1:
            raise ValueError("nodes share one engine, so nnodes needs data_parallel_size 1; start a server a replica")
        self.nodes.ranks_each(self.plan.ranks())
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ValueError("ssl_keyfile without ssl_certfile; TLS needs the certificate")
        return self

    def engine_settings(self) -> dict[str, Any]:
        """Return those of them that each engine takes, as plain data."""
        names = EngineSettings.model_fields.keys() & self.model_fields_set
        return self.model_dump(mode="json", include=set(names))


def read_settings(config: str | Path | None, given: dict[str, Any]) -> ServeSettings:
    """Return the settings of a YAML file (keys with hyphens or underscores) under those that were given.

    Raises UserError naming what is wrong.
    """
    tree: dict[str, Any] = {}
    if config is not None:
        content = read_yaml(config)
        if not isinstance(content, dict):
            raise UserError(f"{config} must hold keys and values, such as 'port: 8000'")
        tree = {str(key).replace("-", "_"): value for key, value in content.items()}
    tree |= {name: value for name, value in given.items() if value not in (None, [], ())}
    if "model" not in tree:
        raise UserError("no model was named; give its folder or file, or set 'model' in the --config file")
    if isinstance(tree.get("lora_modules"), list):
        named = [_named(one) for one in tree["lora_modules"]]
        tree["lora_modules"] = dict(named)
        if len(tree["lora_modules"]) < len(named):
            raise UserError("lora_modules names an adapter twice; give each one a name of its own")
    for name in ("served_model_name", "allowed_origins"):
        if isinstance(tree.get(name), str):
            tree[name] = [tree[name]]
    return parse_settings(ServeSettings, tree, source=str(config or "the command line"))


def _named(text: Any) -> tuple[str, str]:
    """Return (name, folder) of an adapter. Raises UserError."""
    name, equals, folder = str(text).partition("=")
    if not name or not equals or not folder:
        raise UserError(f"lora_modules: '{text}' must be NAME=FOLDER, such as 'poet=adapters/poet'")
    return name, folder
