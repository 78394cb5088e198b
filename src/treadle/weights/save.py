"""A model to disk as a Hugging Face directory that Transformers, vLLM and Treadle load as it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from treadle.model.families import family_of
from treadle.model.spec import ModelSpec


def save_model(folder: str | Path, spec: ModelSpec, state: Mapping[str, Tensor], shard_bytes: int = 5 << 30) -> None:
    """Write config.json and the safetensors of `state` (our parameter names, whole CPU tensors) into `folder`.

    The folder must exist; writing it atomically is the caller's business (config.files.atomic_folder).
    """
    folder = Path(folder)
    family = family_of(spec.config)
    names = family.names(spec)
    dtype = next(iter(state.values())).dtype
    config = {**spec.config, "architectures": [family.architecture], "dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(
        {names[ours]: tensor.contiguous() for ours, tensor in state.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
