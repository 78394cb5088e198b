"""A GGUF file as if it were a Hugging Face directory: its config.json, and its tensors under their names there.

    config = gguf_config(file)
    for name, weight in gguf_weights(file, config).items():
        parameter.copy_(weight.read(torch.bfloat16))

llama.cpp's converter changes two things, undone here. It reorders the rows of Llama's query and key projections, so
that the two halves of a rotary pair lie side by side, and it adds the 1 of Gemma's norms to the stored weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from treadle.config import UserError
from treadle.weights.gguf import GgufFile
from treadle.weights.gguf_keys import ArchitectureKeys
from treadle.weights.gguf_rope import rope_parameters

ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class Architecture:
    """What a value of `general.architecture` is in Transformers' terms."""

    model_type: str
    class_name: str
    activation: str = "silu"
    pairs_side_by_side: bool = False
    norm_offset: float = 0.0


GEMMA = {"activation": "gelu_pytorch_tanh", "norm_offset": 1.0}
ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", pairs_side_by_side=True),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", pairs_side_by_side=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", **GEMMA),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", **GEMMA),
}
# Parts of a layer: the name there and here. Norms differ by architecture.
_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_QK_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_GEMMA_NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_LAYER_NORMS = {
    "llama": _NORMS,
    "smollm3": _NORMS,
    "qwen2": _NORMS,
    "qwen3": _NORMS | _QK_NORMS,
    "gemma2": _GEMMA_NORMS,
    "gemma3": _GEMMA_NORMS | _QK_NORMS,
}


@dataclass(frozen=True)
class GgufWeight:
    """One tensor under its Hugging Face name: `read` gives it as a safetensors file would hold it.

    `heads`, where not 0, is the number of heads whose rows are to be put back in order; `offset` is subtracted.
    """

    file: GgufFile
    tensor: str
    heads: int = 0
    offset: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.file.tensors[self.tensor].shape

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.file.tensors[self.tensor].nbytes

    def read(self, dtype: torch.dtype = torch.float32, rows: slice | None = None) -> torch.Tensor:
        """Return the weight, or a contiguous part of its first dim, in `dtype` and memory of its own."""
        if self.heads:
            return self._in_order(dtype, rows)
        if self.offset:
            return (self.file.read(self.tensor, torch.float32, rows) - self.offset).to(dtype)
        return self.file.read(self.tensor, dtype, rows)

    def _in_order(self, dtype: torch.dtype, rows: slice | None) -> torch.Tensor:
        size = self.shape[0] // self.heads
        start, stop, _ = (rows or slice(None)).indices(self.shape[0])
        first, last = start // size, -(-max(start, stop) // size)  # the heads that the rows are part of
        stored = self.file.read(self.tensor, dtype, slice(first * size, last * size))
        pairs = stored.reshape(last - first, size // 2, 2, *self.shape[1:])
        ordered = pairs.transpose(1, 2).reshape(stored.shape)
        return ordered[start - first * size : max(start, stop) - first * size]


def gguf_architecture(file: GgufFile) -> str:
    """Return `general.architecture`. Raises UserError where Treadle has no family for it, or it is no whole model."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise UserError(f"{file.path} does not say what it is (key 'general.architecture'); download it again")
    if file.metadata.get("general.type", "model") != "model":
        raise UserError(
            f"{file.path} is of type '{file.metadata['general.type']}', not a model; give the model's own file"
        )
    if name not in ARCHITECTURES:
        raise UserError(
            f"{file.path}: the architecture '{name[:60]}' is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    return name


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """Return the content of the config.json that the model had before it was converted, as far as the file tells.

    Raises UserError naming a key that is missing, wrong or not understood.
    """
    name = gguf_architecture(file)
    keys = ArchitectureKeys(file, name)
    if "token_embd.weight" not in file.tensors:
        raise UserError(f"{file.path} has no tensor 'token_embd.weight'; it is not a whole model")
    architecture = ARCHITECTURES[name]
    width, heads, layers = keys.size("embedding_length"), keys.size("attention.head_count"), keys.size("block_count")
    if layers > len(file.tensors):
        raise keys.fail("block_count", f"is {layers}, but the file has only {len(file.tensors)} tensors")
    rotary = keys.size_or("rope.dimension_count", width // heads)
    head_size = keys.size_or("attention.key_length", rotary)
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "architectures": [architecture.class_name],
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": width,
        "intermediate_size": keys.size("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.size_or("attention.head_count_kv", heads),
        "head_dim": head_size,
        "max_position_embeddings": keys.size("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "hidden_activation" if architecture.norm_offset else "hidden_act": architecture.activation,
    }
    keys.only("attention.value_length", head_size)
    keys.only("rope.dimension_count", head_size)
    for optional in ("key_length_swa", "value_length_swa"):
        keys.only(f"attention.{optional}", head_size)
    keys.only("rope.dimension_count_swa", head_size)
    if name in ("gemma2", "gemma3"):
        _gemma(keys, name, config)
    else:
        _llama_like(keys, name, file, config)
    for key, role in (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id")):
        if isinstance(index := file.metadata.get(f"tokenizer.ggml.{key}_token_id"), int):
            config[role] = index
    for kind, dtype in ((0, "float32"), (1, "float16"), (32, "bfloat16")):
        if file.metadata.get("general.file_type") == kind:
            config["dtype"] = dtype
    keys.finish()
    return config


def _llama_like(keys: ArchitectureKeys, name: str, file: GgufFile, config: dict[str, Any]) -> None:
    """Llama, Mistral, SmolLM, Qwen 2 and 3."""
    factors = file.read(ROPE_FACTORS).flatten().tolist() if ROPE_FACTORS in file.tensors else None
    config["rope_parameters"] = rope_parameters(keys, config["head_dim"], factors)
    if name == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
        if keys.get("attention.sliding_window"):  # Mistral is a llama to llama.cpp
            window = keys.size("attention.sliding_window")
            config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
            for bias in ("attention_bias", "mlp_bias"):
                if config.pop(bias):
                    raise UserError(f"{file.path}: a model with a sliding window and biases is not supported")
    else:
        keys.only("attention.sliding_window", 0)
    if name in ("qwen3", "smollm3"):
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if name == "smollm3":  # every fourth layer has no positions; the file does not say so
        config["no_rope_layers"] = [int((layer + 1) % 4 != 0) for layer in range(config["num_hidden_layers"])]


def _gemma(keys: ArchitectureKeys, name: str, config: dict[str, Any]) -> None:
    """Gemma 2 and 3: windows on most layers; the scale of the scores follows from the size, as in llama.cpp."""
    layers, period = config["num_hidden_layers"], 2 if name == "gemma2" else 6
    keys.only("attention.sliding_window_pattern", period, [index % period < period - 1 for index in range(layers)])
    largest = layers == (46 if name == "gemma2" else 62)  # the 27B of either
    config |= {
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]
        if largest
        else config["head_dim"],
        "sliding_window": keys.size("attention.sliding_window"),
        "layer_types": [
            "full_attention" if index % period == period - 1 else "sliding_attention" for index in range(layers)
        ],
        "attention_bias": False,
        "attn_logit_softcapping": keys.number_or("attn_logit_softcapping", 50.0 if name == "gemma2" else None),
        "final_logit_softcapping": keys.number_or("final_logit_softcapping", 30.0 if name == "gemma2" else None),
    }
    if name == "gemma2":
        config["rope_parameters"] = rope_parameters(keys, config["head_dim"], None)
        return
    local = keys.number_or("rope.freq_base_swa", 10000.0)
    config["rope_parameters"] = {
        "full_attention": rope_parameters(keys, config["head_dim"], None, default_base=1_000_000.0),
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }


def gguf_weights(file: GgufFile, config: Mapping[str, Any]) -> dict[str, GgufWeight]:
    """Return the model's weights under their Hugging Face names; `config` is what `gguf_config` returned.

    Every tensor of the file is in it once, or is one that the config was read from. Raises UserError naming the
    tensors that are missing, not understood, or of a type that is not supported.
    """
    name = gguf_architecture(file)
    architecture = ARCHITECTURES[name]
    offset = architecture.norm_offset
    wanted = {
        "model.embed_tokens.weight": GgufWeight(file, "token_embd.weight"),
        "model.norm.weight": GgufWeight(file, "output_norm.weight", offset=offset),
    }
    if not config["tie_word_embeddings"]:
        wanted["lm_head.weight"] = GgufWeight(file, "output.weight")
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for layer in range(config["num_hidden_layers"]):
        for there, here in _LAYER_NORMS[name].items():
            tensor = f"blk.{layer}.{here}.weight"
            wanted[f"model.layers.{layer}.{there}.weight"] = GgufWeight(file, tensor, offset=offset)
        for there, here in _PARTS.items():
            order = heads.get(here, 0) if architecture.pairs_side_by_side else 0
            for kind in ("weight", "bias"):
                tensor = f"blk.{layer}.{here}.{kind}"
                if kind == "weight" or tensor in file.tensors:
                    wanted[f"model.layers.{layer}.{there}.{kind}"] = GgufWeight(file, tensor, order)
    _check(file, wanted, set() if offset else {ROPE_FACTORS})
    return wanted


def _check(file: GgufFile, wanted: Mapping[str, GgufWeight], consumed: set[str]) -> None:
    held = {weight.tensor for weight in wanted.values()}
    if missing := sorted(held - set(file.tensors)):
        raise UserError(f"{file.path} lacks {_some(missing)}; download it again")
    if unused := sorted(set(file.tensors) - held - consumed):
        raise UserError(
            f"{file.path} has {_some(unused)}, which a {file.metadata['general.architecture']} model as Treadle knows "
            "it does not have; leaving it out would change what the model computes"
        )
    for weight in wanted.values():
        tensor = file.tensors[weight.tensor]
        file.check_readable(tensor.name)
        if weight.heads and tensor.shape[0] % (2 * weight.heads):
            raise UserError(
                f"{file.path}: tensor '{tensor.name}' has {tensor.shape[0]} rows, not {weight.heads} heads of even size"
            )


def _some(names: list[str]) -> str:
    shown = ", ".join(f"'{name[:80]}'" for name in names[:3])
    return f"the tensor{'s' if len(names) > 1 else ''} {shown}" + (f" and {len(names) - 3} more" if names[3:] else "")
