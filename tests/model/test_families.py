"""Every family against Transformers in fp32: logits, gradients, packing; config.json in all its forms; wrong ones."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig, GenerationConfig

from tests.tiny_models import ROPE, SIZES, TINY, ours_of, packed, random_config, reference_of, some_tokens, tiny
from treadle.config import UserError
from treadle.model.families import (
    family_of,
    gemma2,
    gemma3,
    llama,
    mistral,
    qwen2,
    qwen3,
    read_spec,
    reader,
    smollm3,
)

LENGTH = 23  # beyond the 16 positions that the tiny models know, and beyond every window
# fp32 rounding over a few layers gives 3e-7 of the spread; 1e-5 leaves room for another order of summation alone.
LOGITS = 1e-5


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", TINY)
def test_logits_and_gradients_equal_the_reference(name: str) -> None:
    reference, tokens = reference_of(TINY[name]), some_tokens(LENGTH)
    ours = ours_of(reference, TINY[name])
    targets = some_tokens(LENGTH, seed=2)
    expected = reference(tokens[None]).logits[0]
    logits = ours(tokens, packed(LENGTH))
    spread = expected.max() - expected.min()
    assert (logits - expected).abs().max() <= LOGITS * spread
    torch.nn.functional.cross_entropy(expected, targets, reduction="sum").backward()
    loss, _ = ours(tokens, packed(LENGTH), targets)
    loss.backward()
    theirs = dict(reference.named_parameters())
    # The gradient of a key's bias is zero without RoPE: what both compute there is the rounding of the others.
    rounding = 1e-6 * max(float(parameter.grad.abs().max()) for parameter in theirs.values())
    for our_name, their_name in family_of(TINY[name]).names(ours.spec).items():
        ours_grad, grad = ours.get_parameter(our_name).grad, theirs[their_name].grad
        assert ours_grad is not None and grad is not None
        # Summed in another order over tokens and vocabulary: 1e-4 of the largest element is the figure asked for.
        assert (ours_grad - grad).abs().max() <= 1e-4 * grad.abs().max() + rounding, our_name


@pytest.mark.parametrize("seed", range(40))
def test_logits_of_random_models(seed: int) -> None:
    config = random_config(seed)
    reference, tokens = reference_of(config, seed), some_tokens(1 + seed * 7 % 60, seed)
    with torch.no_grad():
        expected, logits = reference(tokens[None]).logits[0], ours_of(reference, config)(tokens, packed(len(tokens)))
    assert (logits - expected).abs().max() <= LOGITS * (expected.max() - expected.min()), config


@pytest.mark.parametrize("name", TINY)
def test_packed_sequences_equal_separate_ones(name: str) -> None:
    ours = ours_of(reference_of(TINY[name]), TINY[name])
    lengths = [3, LENGTH, 1, 11]
    tokens = some_tokens(sum(lengths))
    with torch.no_grad():
        together = ours(tokens, packed(*lengths)).split(lengths)
        alone = [ours(part, packed(len(part))) for part in tokens.split(lengths)]
    for one, other in zip(together, alone, strict=True):
        # The same arithmetic for each row; matrix products of another number of rows may round differently.
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", TINY)
def test_every_form_of_config_gives_the_same_spec(name: str) -> None:
    config = reference_of(TINY[name]).config
    assert read_spec(config.to_dict()) == read_spec(TINY[name])
    assert read_spec(config.to_diff_dict()) == read_spec(TINY[name])
    assert read_spec(read_spec(TINY[name]).config) == read_spec(TINY[name])
    assert read_spec(json.loads(config.to_json_string())) == read_spec(TINY[name])


@pytest.mark.parametrize("name", TINY)
def test_counts_equal_brute_force(name: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    reference, spec = reference_of(TINY[name]), read_spec(TINY[name])
    assert spec.parameters_count() == sum(parameter.numel() for parameter in reference.parameters())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        reference(some_tokens(LENGTH)[None])
    # The reference multiplies every query with every key, so each token sees LENGTH of them; our count knows windows.
    seen_all = dataclasses.replace(
        spec,
        layers=tuple(
            dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, window=0))
            for layer in spec.layers
        ),
    )
    # All but the elements that rotate positions into angles (a product of one column) are matrix products of ours.
    assert seen_all.flops_per_token(LENGTH) * LENGTH == pytest.approx(counter.get_total_flops(), rel=1e-3)


@pytest.mark.parametrize("module", [llama, smollm3, mistral, qwen2, qwen3, gemma2, gemma3])
def test_defaults_equal_those_of_transformers(module: Any) -> None:
    config = AutoConfig.for_model(module.FAMILIES[0].model_type).__class__
    theirs = {field.name: field.default for field in dataclasses.fields(config)}
    common = {field.name for field in dataclasses.fields(config.__mro__[1])}
    differing = {key: (value, theirs.get(key)) for key, value in module.DEFAULTS.items() if theirs.get(key) != value}
    assert not differing
    assert set(theirs) - common <= set(module.DEFAULTS)
    # An absent key is its default; the class agrees on the whole, layer types and rotary bases included.
    ours = read_spec({"model_type": module.FAMILIES[0].model_type})
    assert ours == read_spec(config().to_dict())


def test_names_are_one_to_one() -> None:
    for config in TINY.values():
        spec = read_spec(config)
        names = family_of(config).names(spec)
        assert len(set(names.values())) == len(names)


def test_sampling_parameters_in_config_are_harmless() -> None:
    known = set(GenerationConfig._get_default_generation_params())
    assert known - {"use_cache"} <= reader.SAMPLING


def test_gemma3_with_images_is_read_as_its_text_part() -> None:
    text = {key: value for key, value in TINY["gemma3_text-odd"].items() if key != "model_type"}
    outer = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 5,
        "eoi_token_index": 6,
        "image_token_index": 7,
        "mm_tokens_per_image": 256,
        "text_config": text,
        "vision_config": {"hidden_size": 8},
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
    }
    spec = read_spec(outer)
    assert spec == read_spec(TINY["gemma3_text-odd"])
    assert family_of(spec.config).model_type == "gemma3_text"
    family = family_of(outer)
    for prefix in ("language_model.model.", "model.language_model."):
        assert family.renamed(prefix + "embed_tokens.weight") == "model.embed_tokens.weight"
    assert family.renamed("language_model.lm_head.weight") == "lm_head.weight"
    assert family.unused.fullmatch("vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight")
    assert family.unused.fullmatch("model.multi_modal_projector.mm_soft_emb_norm.weight")
    assert not family.unused.fullmatch("model.layers.0.mlp.gate_proj.weight")
    with pytest.raises(UserError, match="text_config"):
        read_spec({key: value for key, value in outer.items() if key != "text_config"})
    with pytest.raises(UserError, match="audio_config"):
        read_spec({**outer, "audio_config": {}})


def test_config_files_as_published() -> None:
    """The config.json of well-known releases, abridged from their public model pages."""
    smollm = tiny("llama", rope_interleaved=False, is_llama_config=True, torch_dtype="bfloat16", rope_scaling=None)
    read_spec({**smollm, "transformers.js_config": {"kv_cache_dtype": {}}, "rope_theta": 100000})
    early_gemma = tiny("gemma2", hidden_act="gelu_pytorch_tanh", sliding_window=8, sliding_window_size=8)
    read_spec({**early_gemma, "head_dim": 16, "cache_implementation": "hybrid"})
    read_spec(tiny("qwen2", use_mrope=False, sliding_window=4096, use_sliding_window=False, max_window_layers=21))
    read_spec(tiny("llama", temperature=0.7, do_sample=True, pretraining_tp=1))
    spec = read_spec(
        tiny("gemma3_text", head_dim=16, unsloth_fixed=True, _sliding_window_pattern=3, rope_theta=1000000)
    )
    assert [layer.attention.window > 0 for layer in spec.layers] == [True, True, False]


WRONG = [
    (tiny("llama", rope_parameter={}), "rope_parameter, did you mean 'rope_parameters'"),
    (tiny("llama", foo=1, bar=2), "bar, foo"),
    (tiny("lama"), "did you mean 'llama'"),
    ({**SIZES}, "no model_type"),
    ({**SIZES, "model_type": 7}, "no model_type"),
    (tiny("llama", hidden_size=-48), "hidden_size must be a whole number from 1"),
    (tiny("llama", hidden_size="48"), "hidden_size"),
    (tiny("llama", hidden_size=48.0), "hidden_size"),
    (tiny("llama", hidden_size=True), "hidden_size"),
    (tiny("llama", hidden_size=None), "hidden_size"),
    (tiny("llama", num_hidden_layers=10**9), "num_hidden_layers"),
    (tiny("llama", vocab_size=10**12), "vocab_size"),
    (tiny("llama", hidden_size=49), "multiple of num_attention_heads"),
    (tiny("qwen2", hidden_size=49), "multiple of num_attention_heads"),
    (tiny("llama", num_key_value_heads=3), "4 query heads cannot share 3 key-value heads"),
    (tiny("llama", head_dim=13), "must be even"),
    (tiny("llama", rms_norm_eps=0), "rms_norm_eps"),
    (tiny("llama", rms_norm_eps=float("nan")), "rms_norm_eps"),
    (tiny("llama", tie_word_embeddings="false"), "true or false"),
    (tiny("llama", hidden_act="tanh"), "hidden_act must be silu"),
    (tiny("llama", attention_dropout=0.1), "attention_dropout=0.1 is not supported"),
    (tiny("llama", quantization_config={"quant_method": "gptq"}), "quantized"),
    (tiny("llama", rope_scaling={"type": "mrope"}), "RoPE of type 'mrope' is not supported"),
    (tiny("llama", rope_scaling="linear"), "rope_scaling must be a mapping"),
    (tiny("llama", rope_scaling={"type": "linear"}), "linear needs factor"),
    (tiny("llama", rope_scaling={"type": "linear", "factor": -2}), "factor must be a positive number"),
    (tiny("llama", rope_scaling={"type": "linear", "factor": 2, "betafast": 1}), "does not take betafast"),
    (tiny("llama", rope_theta=-1), "rope_theta"),
    (tiny("llama", partial_rotary_factor=0.5), "partial_rotary_factor must be 1"),
    (tiny("llama", partial_rotary_factor=2), "partial_rotary_factor"),
    (tiny("llama", rope_scaling={**ROPE["longrope"], "long_factor": [1.0]}), "long_factor must be a list of 6"),
    (tiny("llama", rope_scaling={**ROPE["llama3"], "high_freq_factor": 1.0}), "high_freq_factor must be greater"),
    (tiny("llama", rope_scaling={**ROPE["yarn"], "truncate": 3}), "truncate must be true or false"),
    (tiny("llama", rope_interleaved=True), "rope_interleaved=True is not supported"),
    (tiny("mistral", sliding_window=0), "sliding_window"),
    (tiny("mistral", sliding_window=5, layer_types=["full_attention"] * 3), "layer_types differs"),
    (tiny("qwen2", layer_types=["sliding_attention"] * 3), "there is no sliding_window in use"),
    (tiny("qwen2", layer_types=["full_attention"]), "each of the 3 layers"),
    (tiny("qwen2", layer_types=["full_attention", "linear_attention", "full_attention"]), "layer_types must list"),
    (tiny("qwen2", use_mrope=True), "use_mrope=True is not supported"),
    (tiny("qwen2", max_window_layers=-1), "max_window_layers"),
    (tiny("gemma2", head_dim=16, use_bidirectional_attention=True), "use_bidirectional_attention"),
    (tiny("gemma2", head_dim=16, hidden_act="silu"), "hidden_act='silu' is not supported"),
    (tiny("gemma2", head_dim=16, query_pre_attn_scalar=0), "query_pre_attn_scalar"),
    (tiny("gemma3_text", head_dim=16, attn_logit_softcapping=5.0), "attn_logit_softcapping=5.0"),
    (
        tiny("gemma3_text", head_dim=16, rope_parameters={"rope_type": "default"}),
        "full_attention and sliding_attention",
    ),
    (tiny("smollm3", no_rope_layers=[1]), "no_rope_layers"),
]


@pytest.mark.parametrize(("config", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_wrong_configs_are_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        read_spec(config)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
