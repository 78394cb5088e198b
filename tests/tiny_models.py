"""Tiny models of every family with odd sizes, and Transformers' own model of each as the reference."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from treadle.model.context import PackedContext
from treadle.model.families import family_of, read_spec
from treadle.model.transformer import Transformer

# Odd on purpose: a prime vocabulary, a width that is no power of two, more positions in the tests than the model knows.
SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 76,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SHORT, LONG = [1.0, 1.1, 1.3, 1.6, 2.0, 2.5], [1.0, 1.5, 2.5, 4.0, 7.0, 11.0]
ROPE: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 12},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
    "yarn-mscale": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.0, "truncate": False},
    "longrope": {
        "rope_type": "longrope",
        "factor": 2.0,
        "original_max_position_embeddings": 18,
        "short_factor": SHORT,
        "long_factor": LONG,
    },
}


def tiny(model_type: str, **changes: Any) -> dict[str, Any]:
    """Return the config.json of a tiny model."""
    return {"model_type": model_type, **SIZES, **changes}


# name: config.json. Every switch that a family's file reads is on in one of them and off in another.
TINY: dict[str, dict[str, Any]] = {
    "llama": tiny("llama"),
    "llama-odd": tiny(
        "llama",
        hidden_size=45,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=22,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        rms_norm_eps=1e-3,
        hidden_act="gelu",
    ),
    "smollm3": tiny("smollm3", num_hidden_layers=5, no_rope_layer_interval=2),
    "smollm3-window": tiny(
        "smollm3",
        no_rope_layers=[1, 0, 1],
        use_sliding_window=True,
        sliding_window=7,
        tie_word_embeddings=False,
        attention_bias=True,
        mlp_bias=True,
    ),
    "mistral": tiny("mistral", sliding_window=5),
    "mistral-odd": tiny(
        "mistral", sliding_window=None, head_dim=26, hidden_size=50, num_attention_heads=6, tie_word_embeddings=True
    ),
    "qwen2": tiny("qwen2"),
    "qwen2-window": tiny(
        "qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1, tie_word_embeddings=True
    ),
    "qwen2-types": tiny(
        "qwen2",
        use_sliding_window=True,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "qwen3": tiny("qwen3", head_dim=32),
    "qwen3-odd": tiny(
        "qwen3",
        hidden_size=35,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=14,
        attention_bias=True,
        tie_word_embeddings=True,
        use_sliding_window=True,
        sliding_window=3,
        max_window_layers=0,
    ),
    "gemma2": tiny("gemma2", head_dim=16, sliding_window=5, query_pre_attn_scalar=21),
    "gemma2-odd": tiny(
        "gemma2",
        head_dim=10,
        sliding_window=9,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        attention_bias=True,
        tie_word_embeddings=False,
        layer_types=["full_attention", "full_attention", "sliding_attention"],
    ),
    "gemma2-caps": tiny("gemma2", head_dim=16, attn_logit_softcapping=2.0, final_logit_softcapping=1.5),
    "gemma3_text": tiny("gemma3_text", head_dim=16, sliding_window=5, num_hidden_layers=7, query_pre_attn_scalar=24),
    "gemma3_text-odd": tiny(
        "gemma3_text",
        head_dim=18,
        sliding_window=4,
        sliding_window_pattern=2,
        rope_theta=777.0,
        rope_local_base_freq=33.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        attention_bias=True,
        final_logit_softcapping=3.0,
        tie_word_embeddings=False,
    ),
}
# Every RoPE kind with Llama, whose heads of 12 have six frequencies, and two kinds with each other family.
TINY |= {f"llama-{kind}": tiny("llama", rope_parameters={"rope_theta": 100.0, **ROPE[kind]}) for kind in ROPE}
TINY |= {
    f"{family}-yarn": tiny(family, rope_parameters={"rope_theta": 100.0, **ROPE["yarn"]})
    for family in ("mistral", "qwen2")
}
TINY |= {
    "qwen3-dynamic": tiny("qwen3", head_dim=16, rope_scaling={"type": "dynamic", "factor": 2.0}, rope_theta=50.0),
    "smollm3-longrope": tiny("smollm3", rope_parameters=ROPE["longrope"]),
    "gemma2-llama3": tiny("gemma2", head_dim=12, rope_parameters={"rope_theta": 100.0, **ROPE["llama3"]}),
    "gemma3_text-ropes": tiny(
        "gemma3_text",
        head_dim=12,
        sliding_window=6,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        rope_parameters={"full_attention": ROPE["dynamic"], "sliding_attention": ROPE["longrope"]},
    ),
}


def reference_of(config: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    """Return Transformers' model of a config.json in fp32 with random weights, biases and norms included."""
    config = dict(config)
    kind = AutoConfig.for_model(config.pop("model_type")).__class__
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(kind(**_copied(config)), attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.5 if "norm" in name else 0.2
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return model


def _copied(config: Any) -> Any:
    """Transformers writes into the mappings that it is given."""
    if isinstance(config, dict):
        return {key: _copied(value) for key, value in config.items()}
    return list(config) if isinstance(config, list) else config


def ours_of(reference: PreTrainedModel, config: dict[str, Any]) -> Transformer:
    """Return our model with the reference's weights, all of them and no others."""
    spec = read_spec(config)
    state, names = reference.state_dict(), family_of(config).names(spec)
    tied = {"lm_head.weight"} if spec.tied else set()
    assert set(state) - tied == set(names.values())
    model = Transformer(spec)
    model.load_state_dict({ours: state[theirs] for ours, theirs in names.items()})
    return model


def some_tokens(count: int, seed: int = 1) -> torch.Tensor:
    """Return random tokens of the tiny vocabulary."""
    return torch.randint(0, SIZES["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed))


def packed(*lengths: int) -> PackedContext:
    """Return the context of sequences of these lengths."""
    return PackedContext.of_lengths(list(lengths))


def random_config(seed: int) -> dict[str, Any]:
    """Return the config.json of a random tiny model: any family, odd sizes, every switch, every RoPE kind."""
    random = Random(seed)
    family = random.choice(["llama", "smollm3", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text"])
    kv_heads = random.randint(1, 3)
    heads, head_size = kv_heads * random.randint(1, 3), 2 * random.randint(2, 12)
    divisible = family in ("llama", "gemma2", "gemma3_text")
    window, maybe = random.randint(1, 40), [random.random() < 0.5 for _ in range(4)]
    config = tiny(
        family,
        hidden_size=heads * random.randint(2, 12) if divisible else random.randint(8, 70),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_size,
        num_hidden_layers=random.randint(1, 4),
        intermediate_size=random.randint(3, 90),
        tie_word_embeddings=maybe[0],
        max_position_embeddings=random.randint(2, 64),
        rms_norm_eps=10 ** random.uniform(-7, -2),
        rope_parameters=_random_rope(random, head_size),
    )
    gemma = family.startswith("gemma")
    activations = ["silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu", "relu2"]
    config["hidden_activation" if gemma else "hidden_act"] = random.choice(activations)
    if family not in ("mistral", "qwen2"):
        config["attention_bias"] = maybe[1]
    if family in ("llama", "smollm3"):
        config["mlp_bias"] = maybe[2]
    if family in ("mistral", "gemma2", "gemma3_text"):
        config["sliding_window"] = window if gemma or maybe[3] else None
    elif family != "llama":
        config |= {"use_sliding_window": maybe[3], "sliding_window": window}
    if family in ("qwen2", "qwen3"):
        config["max_window_layers"] = random.randint(0, 4)
    if family == "smollm3":
        config["no_rope_layer_interval"] = random.randint(1, 4)
    if gemma:
        config["query_pre_attn_scalar"] = random.randint(1, 300)
        config["final_logit_softcapping"] = random.choice([None, random.uniform(0.5, 50)])
    if family == "gemma2":
        config["attn_logit_softcapping"] = random.choice([None, random.uniform(0.5, 50)])
    if family == "gemma3_text":
        config["sliding_window_pattern"] = random.randint(1, 4)
        local = _random_rope(random, head_size)
        config["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": local}
    return config


def _random_rope(random: Random, head_size: int) -> dict[str, Any]:
    kind = random.choice(["default", "linear", "dynamic", "llama3", "yarn", "longrope"])
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": random.choice([10.0, 100.0, 1e4, 1e6])}
    if kind in ("linear", "dynamic", "llama3", "yarn"):
        rope["factor"] = random.uniform(1, 9)
    if kind in ("llama3", "yarn", "longrope"):
        rope["original_max_position_embeddings"] = random.randint(2, 40)
    if kind == "llama3":
        rope |= {"low_freq_factor": random.uniform(0.5, 2), "high_freq_factor": random.uniform(2.5, 8)}
    if kind == "yarn":
        extra = {"attention_factor": (0.5, 2), "beta_fast": (4, 50), "mscale": (0.1, 2), "mscale_all_dim": (0.1, 2)}
        rope |= {key: random.uniform(*span) for key, span in extra.items() if random.random() < 0.4}
    if kind == "longrope":
        rope |= {f"{name}_factor": [random.uniform(1, 9) for _ in range(head_size // 2)] for name in ("short", "long")}
    return rope
