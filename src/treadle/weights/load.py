"""A model from disk: a Hugging Face directory (every checkpoint is one) or a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open

from treadle.config import UserError
from treadle.model.families import family_of, read_spec
from treadle.model.transformer import Transformer


def load_model(path: str | Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Transformer:
    """Return the model at `path` with its weights, in `dtype` (default: the checkpoint's own). Raises UserError."""
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds no config.json; give a Hugging Face directory, a GGUF file or a checkpoint")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    spec = read_spec(config)
    names = family_of(config).names(spec)
    model = Transformer(spec, device="meta", dtype=dtype or torch.float32)
    state = {}
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, "pt") as file:
            held = set(file.keys())
            for ours, theirs in names.items():
                if theirs in held:
                    state[ours] = file.get_tensor(theirs).to(device, dtype or torch.float32)
    model.load_state_dict(state, assign=True, strict=True)
    return model.requires_grad_(False).eval()
