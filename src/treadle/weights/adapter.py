"""LoRA adapters on disk, in PEFT's format: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treadle.config import UserError
from treadle.config.files import read_json
from treadle.model.families import family_of
from treadle.model.lora import LoraSpec, LowRank, adaptable, adapters, check_bare, merge_lora
from treadle.model.transformer import Transformer
from treadle.weights.safetensors_file import SafetensorsFile, SafetensorsWriter

CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
SIDES = {"a": "lora_A", "b": "lora_B"}
# Keys with the values under which PEFT computes what `LowRank` computes; other keys must be absent or empty.
UNDERSTOOD: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    # The other ways to begin (pissa, olora, loftq, corda) change the base model's weights as well.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
HARMLESS = frozenset(
    """
    alpha_pattern auto_mapping base_model_name_or_path exclude_modules inference_mode layers_pattern
    layers_to_transform lora_alpha lora_dropout megatron_core peft_version qalora_group_size r rank_pattern revision
    runtime_config target_modules use_rslora
    """.split()
)


def save_adapter(
    folder: str | Path,
    model: Transformer,
    base: str = "",
    whole: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the model's adapters into `folder`, which must exist, so that PEFT loads them onto the model `base`.

    `whole` turns a parameter into its whole value where it is sharded. Raises UserError where there is no adapter.
    """
    found = adapters(model)
    if not found:
        raise UserError("the model has no LoRA adapter to save")
    modules = peft_modules(model)
    first = next(iter(found.values()))
    keys = {
        f"{PREFIX}{modules[name]}.{SIDES[part]}.weight": parameter
        for name, adapter in found.items()
        for part, parameter in adapter.named_parameters()
    }
    shapes = {key: tuple(parameter.shape) for key, parameter in keys.items()}
    with SafetensorsWriter(Path(folder) / WEIGHTS, dtype or first.a.dtype, shapes) as writer:
        for key, parameter in keys.items():
            writer.write(key, whole(parameter))
    ranks = {
        modules[name]: adapter.lora.rank for name, adapter in found.items() if adapter.lora.rank != first.lora.rank
    }
    alphas = {
        modules[name]: _plain(adapter.lora.alpha)
        for name, adapter in found.items()
        if adapter.lora.alpha != first.lora.alpha
    }
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": first.lora.rank,
        "lora_alpha": _plain(first.lora.alpha),
        "lora_dropout": first.lora.dropout,
        "use_rslora": first.lora.rank_stabilized,
        "target_modules": _targets([modules[name] for name in found], list(modules.values())),
        "rank_pattern": {re.escape(name): rank for name, rank in ranks.items()},
        "alpha_pattern": {re.escape(name): alpha for name, alpha in alphas.items()},
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (Path(folder) / CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")


@dataclass(frozen=True)
class StoredAdapter:
    """A PEFT folder whose every tensor has its place in a model. `layers` gives for our name of a linear layer the kind
    of its adapter, and the keys of a and b in the file."""

    file: SafetensorsFile
    layers: Mapping[str, tuple[LoraSpec, Mapping[str, str]]]

    @property
    def rank(self) -> int:
        """The largest rank of a layer's adapter."""
        return max(lora.rank for lora, _ in self.layers.values())

    def elements(self) -> int:
        """Return how many numbers it holds."""
        return sum(math.prod(self.file.entries[key].shape) for _, keys in self.layers.values() for key in keys.values())

    @torch.no_grad()
    def terms(self, model: Transformer, dtype: torch.dtype | None = None) -> dict[str, LowRank]:
        """Return the terms of the linear layers that `model` holds, which may be one rank's part, in `dtype` (default:
        the layer's); nothing is attached. Raises UserError where the dtype cannot hold a value."""
        layout, found = model.layout, {}
        for name, (lora, keys) in self.layers.items():
            if layout is not None and not layout.holds(f"{name}.weight"):
                continue
            weight = model.get_submodule(name).get_parameter("weight")
            found[name] = LowRank(weight.shape[1], weight.shape[0], lora, weight, dtype).requires_grad_(False)
            for part, key in keys.items():
                shard = None if layout is None else layout.shard(f"{name}.adapter.{part}")
                target, value = found[name].get_parameter(part), self.file.read(key)
                target.copy_(value if shard is None else shard.of(value))
                if not torch.isfinite(target).all():
                    kind = str(target.dtype).removeprefix("torch.")
                    raise UserError(f"{self.file.path}: tensor '{key}' has values that are no finite {kind} numbers")
        return found


def open_adapter(model: Transformer, folder: str | Path) -> StoredAdapter:
    """Return what a PEFT folder holds for a model, which must be whole but may be on the meta device.

    Raises UserError where the folder is of another kind or model, or any of its tensors would be left without a place.
    """
    folder = Path(folder)
    config = read_json(folder / CONFIG)
    if config is None:
        raise UserError(f"{folder} has no {CONFIG}; give the folder of a LoRA adapter in PEFT's format")
    _check_config(config, folder)
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"{folder} has no {WEIGHTS}; save the adapter as safetensors with PEFT")
    file = SafetensorsFile(folder / WEIGHTS)
    return StoredAdapter(file, _place(model, config, file))


def load_adapter(
    model: Transformer, folder: str | Path, merge: bool = False, dtype: torch.dtype | None = None
) -> list[str]:
    """Attach the adapters of a PEFT folder to the model, or with `merge` add them to its weights.

    Returns the names of the linear layers. Raises UserError where the folder is of another kind or model, or any of its
    tensors would be left without a place.
    """
    terms = open_adapter(model, folder).terms(model, dtype)
    linears = {name: check_bare(model, name) for name in terms}
    for name, linear in linears.items():
        linear.adapter = terms[name]
    if merge:
        merge_lora(model)
    return list(terms)


def peft_modules(model: Transformer) -> dict[str, str]:
    """Return our names of the linear layers that can have an adapter to those of Transformers' modules."""
    names = family_of(model.spec.config).names(model.spec)
    return {name: names[f"{name}.weight"].removesuffix(".weight") for name in adaptable(model)}


def _check_config(config: Mapping[str, Any], folder: Path) -> None:
    for key, value in config.items():
        if key in UNDERSTOOD and value not in UNDERSTOOD[key]:
            allowed = " or ".join(repr(one) for one in UNDERSTOOD[key] if one is not None)
            raise UserError(f"{folder / CONFIG}: {key} is {value!r}, only {allowed} is supported; merge it with PEFT")
        if key not in UNDERSTOOD and key not in HARMLESS and value not in (None, False, {}, []):
            raise UserError(
                f"{folder / CONFIG}: {key} is not supported; merge the adapter with PEFT and load the result"
            )
    for key in ("r", "lora_alpha"):
        _check_number(f"{folder / CONFIG}: {key}", config.get(key))


def _place(
    model: Transformer, config: Mapping[str, Any], file: SafetensorsFile
) -> dict[str, tuple[LoraSpec, dict[str, str]]]:
    """Return for each of our layers its adapter's kind and the keys of a and b; every key has its place."""
    ours = {theirs: name for name, theirs in peft_modules(model).items()}
    pattern = re.compile(rf"{re.escape(PREFIX)}(.+)\.({'|'.join(SIDES.values())})\.weight")
    keys: dict[str, dict[str, str]] = {}
    for key in file.entries:
        match = pattern.fullmatch(key)
        if match is None or match[1] not in ours:
            raise UserError(
                f"{file.path}: tensor '{key[:120]}' belongs to no linear layer of this {model.spec.family} model; "
                "the adapter is of another model, or of a kind that is not supported"
            )
        keys.setdefault(match[1], {})[{side: part for part, side in SIDES.items()}[match[2]]] = key
    if not keys:
        raise UserError(f"{file.path} holds no adapter; it would change nothing")
    placed = {}
    for module, parts in keys.items():
        if set(parts) != set(SIDES):
            raise UserError(f"{file.path}: the adapter of {module} lacks one of lora_A and lora_B")
        lora = LoraSpec(
            rank=int(_of_pattern(config, "rank_pattern", module, config["r"])),
            alpha=float(_of_pattern(config, "alpha_pattern", module, config["lora_alpha"])),
            rank_stabilized=bool(config.get("use_rslora")),
        )
        outputs, inputs = model.get_submodule(ours[module]).get_parameter("weight").shape
        for part, shape in (("a", (lora.rank, inputs)), ("b", (outputs, lora.rank))):
            entry = file.entries[parts[part]]
            if entry.shape != shape or entry.dtype not in ("F32", "BF16", "F16"):
                raise UserError(
                    f"{file.path}: tensor '{parts[part]}' is {list(entry.shape)} of {entry.dtype} instead of "
                    f"{list(shape)}; the adapter is of another model"
                )
        placed[ours[module]] = (lora, parts)
    return placed


def _of_pattern(config: Mapping[str, Any], key: str, module: str, default: float) -> float:
    """Return what PEFT's rank_pattern or alpha_pattern says for a module: its keys are the ends of names, as regular
    expressions."""
    patterns = config.get(key) or {}
    if not isinstance(patterns, Mapping):
        raise UserError(f"{CONFIG}: {key} must give a number for each pattern, it is {patterns!r}")
    for pattern, value in patterns.items():
        try:
            matches = re.match(rf"(.*\.)?({pattern})$", module)
        except re.error as error:
            raise UserError(f"{CONFIG}: {key} has the invalid pattern '{pattern}': {error}") from error
        if matches:
            _check_number(f"{CONFIG}: {key} of '{pattern}'", value)
            return value
    return default


def _check_number(what: str, value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1 << 24:
        raise UserError(f"{what} must be a positive number, it is {value!r}")


def _targets(adapted: list[str], every: list[str]) -> list[str]:
    """Return target_modules: the parts' short names where all layers have them, else whole names."""
    counts = Counter(name.rpartition(".")[2] for name in every)
    have = Counter(name.rpartition(".")[2] for name in adapted)
    return sorted(
        {part if have[part] == counts[part] else name for name in adapted for part in [name.rpartition(".")[2]]}
    )


def _plain(number: float) -> int | float:
    return int(number) if number == int(number) else number
