"""Reads a config.json: every value is checked, and every key is either used or declared harmless."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.config import UserError
from treadle.config.errors import in_short, nearest
from treadle.model.spec import ROPE_KINDS, RopeSpec

# A config.json beyond these is a mistake or an attack; building the model would exhaust memory before any other check.
LARGEST = {"num_hidden_layers": 4096, "vocab_size": 1 << 26}
LARGEST_SIZE = 1 << 24

# Hugging Face's names of activations to those of `treadle.ops.gated_activation`.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}

# They say how a checkpoint was made, sampled from or trained; they change no weight and no arithmetic of the model.
HARMLESS = frozenset(
    """
    _attn_implementation_autoset _commit_hash _flash_attn_2_enabled _name_or_path architectures attn_implementation
    auto_map bos_token_id cache_implementation chunk_size_feed_forward dtype eos_token_id finetuning_task id2label
    is_decoder label2id max_sequence_length model_type name_or_path num_labels output_attentions output_hidden_states
    pad_token_id prefix pretraining_tp problem_type return_dict sep_token_id task_specific_params tokenizer_class
    torch_dtype torchscript transformers.js_config transformers_version unk_token_id unsloth_fixed unsloth_version
    use_bfloat16 use_cache
    """.split()
)
# Older checkpoints keep their sampling parameters here; Transformers moves them to generation_config.json.
SAMPLING = frozenset(
    """
    assistant_confidence_threshold assistant_early_exit assistant_lookbehind bad_words_ids begin_suppress_tokens
    cache_config decoder_start_token_id disable_compile diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff exponential_decay_length_penalty
    forced_bos_token_id forced_eos_token_id guidance_scale is_assistant length_penalty low_memory max_length
    max_matching_ngram_size max_new_tokens max_time min_length min_new_tokens min_p no_repeat_ngram_size
    num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams num_return_sequences output_logits
    output_scores penalty_alpha prefill_chunk_size prompt_lookup_num_tokens remove_invalid_values
    renormalize_logits repetition_penalty return_dict_in_generate sequence_bias stop_strings suppress_tokens
    target_lookbehind temperature token_healing top_h top_k top_p typical_p watermarking_config
    """.split()
)
# Keys of old Transformers versions with the one value under which they change nothing.
INERT: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "tf_legacy_loss": (False,),
    "tie_encoder_decoder": (False,),
    "attention_dropout": (0, 0.0, None),
}
ROPE_PARAMETERS: dict[str, tuple[set[str], set[str]]] = {  # kind: (required, optional)
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor"}, {"original_max_position_embeddings"}),
    "yarn": (
        set(),
        {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale"}
        | {"mscale_all_dim", "truncate"},
    ),
    "longrope": (
        {"short_factor", "long_factor"},
        {"factor", "original_max_position_embeddings", "attention_factor"},
    ),
}


class ConfigReader:
    """Takes checked values out of a config.json and knows which keys were never asked for.

    `defaults` holds what the family takes for an absent key (a key that is null is null, not absent). All methods that
    return a value raise UserError naming the key where it is of the wrong kind.
    """

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.config, self.defaults = config, defaults
        self._asked: set[str] = {*HARMLESS, *SAMPLING}

    def take(self, key: str) -> Any:
        """Return the value of `key` as it is, or the family's default (None where there is none)."""
        self._asked.add(key)
        return self.config[key] if key in self.config else self.defaults.get(key)

    def size(self, key: str) -> int:
        """Return the positive whole number under `key`."""
        value, most = self.take(key), LARGEST.get(key, LARGEST_SIZE)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
            raise self.wrong(key, f"a whole number from 1 to {most}")
        return value

    def size_or_none(self, key: str) -> int | None:
        """Return the positive whole number under `key`, None where it is null or has no default."""
        return None if self.take(key) is None else self.size(key)

    def number(self, key: str, at_least: float | None = None) -> float:
        """Return the number under `key`, which must be positive, or `at_least` this where given."""
        value = self.take(key)
        if not _is_positive(value) and not (at_least is not None and _is_number(value) and at_least <= value <= 0):
            raise self.wrong(key, "a positive number" if at_least is None else f"a number from {at_least:g}")
        return float(value)

    def number_or_none(self, key: str) -> float | None:
        """Return the positive number under `key`, None where it is null or has no default."""
        return None if self.take(key) is None else self.number(key)

    def flag(self, key: str) -> bool:
        """Return the true or false under `key`."""
        value = self.take(key)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def activation(self, key: str) -> str:
        """Return the activation under `key` by its name in `treadle.ops`."""
        value = self.take(key)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise self.wrong(key, " or ".join(ACTIVATIONS))
        return ACTIVATIONS[value]

    def layer_types(self, layers: int) -> list[str] | None:
        """Return for each layer "full_attention" or "sliding_attention", or None where the key is absent or null."""
        value = self.take("layer_types")
        if value is None:
            return None
        allowed = ("full_attention", "sliding_attention")
        if not isinstance(value, list) or len(value) != layers or any(kind not in allowed for kind in value):
            raise UserError(
                f"config.json: layer_types must list {' or '.join(allowed)} for each of the {layers} layers "
                "(num_hidden_layers)"
            )
        return value

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse any value of `key` but these (or its absence): the others would change the arithmetic."""
        self._asked.add(key)
        if key in self.config and self.config[key] not in allowed:
            raise UserError(
                f"config.json: {key}={in_short(self.config[key])} is not supported for a {self.name} model, only "
                + " or ".join(map(in_short, allowed))
            )

    def harmless(self, *keys: str) -> None:
        """Declare keys that change nothing here."""
        self._asked.update(keys)

    def finish(self) -> None:
        """Raise UserError where config.json holds a key that was neither used nor declared harmless."""
        if self.config.get("quantization_config"):
            raise UserError(
                "the checkpoint is quantized (config.json has a quantization_config), which is not supported; "
                "use the unquantized model, or its GGUF file"
            )
        self.harmless("quantization_config")
        for key, allowed in INERT.items():
            self.only(key, *allowed)
        unknown = sorted(set(self.config) - self._asked)
        if unknown:
            hint = nearest(unknown[0], self._asked) if len(unknown) == 1 else ""
            raise UserError(
                f"config.json of a {self.name} model has keys that are not understood: {', '.join(unknown)}"
                f"{hint or '; remove them if they change nothing in what the model computes'}"
            )

    @property
    def name(self) -> str:
        return str(self.config.get("model_type"))

    def wrong(self, key: str, allowed: str) -> UserError:
        return UserError(f"config.json: {key} must be {allowed}, it is {in_short(self.take(key))}")

    def rope(self, head_size: int, default_theta: float = 10000.0) -> RopeSpec:
        """Return the rotary embedding, from `rope_parameters` (Transformers 5) or `rope_theta` and `rope_scaling`."""
        given = self._rope_mapping("rope_scaling") or self._rope_mapping("rope_parameters") or {}
        theta = self.take("rope_theta")
        partial = self.take("partial_rotary_factor")
        return self.rope_from(
            {
                "rope_theta": default_theta if theta is None else theta,
                "partial_rotary_factor": 1.0 if partial is None else partial,
                **given,
            },
            head_size,
        )

    def _rope_mapping(self, key: str) -> dict[str, Any] | None:
        value = self.take(key)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, "a mapping or null")
        return value

    def rope_from(self, given: Mapping[str, Any], head_size: int) -> RopeSpec:
        """Return the rotary embedding that one mapping of parameters describes, rope_theta included."""
        given = dict(given)
        kind = given.pop("type", None)
        kind = given.pop("rope_type", None) or kind or "default"
        if kind not in ROPE_PARAMETERS:
            known = ", ".join(ROPE_KINDS)
            raise UserError(f"config.json: RoPE of type {in_short(kind)} is not supported, only {known}")
        theta, partial = given.pop("rope_theta"), given.pop("partial_rotary_factor", None)
        partial = 1.0 if partial is None else partial
        if not _is_number(theta) or not 1 < theta < float("inf"):
            raise UserError(f"config.json: rope_theta must be a number above 1, it is {in_short(theta)}")
        if not _is_number(partial) or not 0 < partial <= 1:
            raise UserError(f"config.json: partial_rotary_factor must lie in (0, 1], it is {in_short(partial)}")
        max_positions = self.size("max_position_embeddings")
        if kind in ("llama3", "yarn", "longrope"):
            # Beside the mapping it wins (Phi 3 has it there); nowhere, the model was trained on all its positions.
            trained = self.size_or_none("original_max_position_embeddings") or max_positions
            if "original_max_position_embeddings" in self.config or not given.get("original_max_position_embeddings"):
                given["original_max_position_embeddings"] = trained
        rotary_size = int(head_size * partial)
        _check_rope(kind, given, rotary_size)
        parameters = {
            key: tuple(value) if isinstance(value, list) else value for key, value in given.items() if value is not None
        }
        return RopeSpec(float(theta), rotary_size, max_positions, kind, tuple(sorted(parameters.items())))


def _check_rope(kind: str, given: Mapping[str, Any], rotary_size: int) -> None:
    """Raise UserError where a parameter of the kind is missing, unknown or of the wrong form."""
    required, optional = ROPE_PARAMETERS[kind]
    present = {key for key, value in given.items() if value is not None}
    if missing := sorted(required - present):
        raise UserError(f"config.json: RoPE of type {kind} needs {', '.join(missing)}")
    if unknown := sorted(present - required - optional):
        raise UserError(f"config.json: RoPE of type {kind} does not take {', '.join(unknown)}")
    for key in sorted(present):
        value = given[key]
        if key == "truncate":
            right, wanted = isinstance(value, bool), "true or false"
        elif key in ("short_factor", "long_factor"):
            right = isinstance(value, list) and len(value) == rotary_size // 2 and all(map(_is_positive, value))
            wanted = f"a list of {rotary_size // 2} positive numbers"
        elif key == "original_max_position_embeddings":
            right, wanted = _is_positive(value) and value > 1, "a number above 1"
        elif key in ("mscale", "mscale_all_dim"):
            right, wanted = value == 0 or _is_positive(value), "a number, not negative"
        else:
            right, wanted = _is_positive(value), "a positive number"
        if not right:
            raise UserError(f"config.json: RoPE's {key} must be {wanted}, it is {in_short(value)}")
    if kind == "llama3" and given["high_freq_factor"] <= given["low_freq_factor"]:
        raise UserError("config.json: RoPE's high_freq_factor must be greater than its low_freq_factor")
    if kind == "dynamic" and rotary_size <= 2:
        raise UserError("config.json: RoPE of type dynamic needs more than two rotated elements a head")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    return _is_number(value) and 0 < value < float("inf")
