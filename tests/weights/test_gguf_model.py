"""GGUF against Transformers: tiny models are written as llama.cpp's converter writes them and read back."""

import json
import math
import time

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.weights import gguf_files
from tests.weights.gguf_files import quantized, smollm2, write
from treadle.config import UserError
from treadle.model.context import PackedContext
from treadle.model.families import read_spec
from treadle.model.rope import rope_table
from treadle.weights.gguf import GgufFile
from treadle.weights.gguf_model import gguf_config, gguf_weights
from treadle.weights.gguf_tokenizer import gguf_tokenizer
from treadle.weights.load import load_model

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
WINDOW = {"sliding_window": 32, "query_pre_attn_scalar": 16}
MODELS = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "llama tied, biased": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "num_key_value_heads": 4,
        "head_dim": 24,
    },
    "llama 3": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_theta": 500000.0,
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "mistral": {"model_type": "mistral", "sliding_window": 64, "tie_word_embeddings": False},
    "smollm3": {"model_type": "smollm3", "tie_word_embeddings": True, "pad_token_id": 0},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": False},
    "qwen2 yarn": {
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_theta": 1e6,
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 24},
    "gemma2": {"model_type": "gemma2", **WINDOW, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3": {"model_type": "gemma3_text", **WINDOW},
    "gemma3 scaled": {
        "model_type": "gemma3_text",
        **WINDOW,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
}
ARCH = {"gemma3_text": "gemma3", "mistral": "llama"}
# Not part of the computation, or spelled otherwise by Transformers' own defaults.
UNCOMPARED = {"architectures", "dtype", "bos_token_id", "eos_token_id", "pad_token_id", "head_dim"}


def reference(name):
    from transformers import AutoConfig, AutoModelForCausalLM

    given = {**SIZES, **MODELS[name]}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**given), dtype=torch.float32)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(0.3 if "norm" in key else 0.0, 0.1)
    return model


def permuted(weight, heads):
    """llama.cpp's order of the rows of Llama's q and k: of each rotary pair, both halves side by side."""
    size = len(weight) // heads
    order = [
        head * size + half * size // 2 + pair for head in range(heads) for pair in range(size // 2) for half in (0, 1)
    ]
    return weight[order]


def convert(model, path, quantize=lambda name, array: array):
    """Write `model` as llama.cpp's convert_hf_to_gguf.py does: its names (those of the gguf package), its changes."""
    config = model.config
    arch = ARCH.get(config.model_type, config.model_type)
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    tensors = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = weight.numpy()
        if arch in ("llama", "smollm3") and ".q_proj." in name:
            array = permuted(array, config.num_attention_heads)
        if arch in ("llama", "smollm3") and ".k_proj." in name:
            array = permuted(array, config.num_key_value_heads)
        if arch.startswith("gemma") and "norm" in name:
            array = array + 1
        there = names.get_name(name, try_suffixes=(".weight", ".bias"))
        tensors[there] = quantize(there, np.ascontiguousarray(array))
    fields = {
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.vocab_size": config.vocab_size,
        f"{arch}.attention.key_length": getattr(config, "head_dim", None) or 16,
        f"{arch}.attention.value_length": getattr(config, "head_dim", None) or 16,
        "general.file_type": 0,
        "tokenizer.ggml.eos_token_id": 2,
    }
    rope = config.rope_parameters
    if arch == "gemma3":
        rope = rope["full_attention"]
    if arch != "gemma2":
        fields[f"{arch}.rope.freq_base"] = float(rope["rope_theta"])
    if arch.startswith("gemma") or config.model_type == "mistral":
        fields[f"{arch}.attention.sliding_window"] = config.sliding_window
    if arch == "gemma2":
        fields["gemma2.attn_logit_softcapping"] = config.attn_logit_softcapping
        fields["gemma2.final_logit_softcapping"] = config.final_logit_softcapping
    if rope["rope_type"] in ("linear", "yarn"):
        fields[f"{arch}.rope.scaling.type"] = rope["rope_type"]
        fields[f"{arch}.rope.scaling.factor"] = rope["factor"]
    if rope["rope_type"] == "yarn":
        fields[f"{arch}.rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if rope["rope_type"] == "llama3":
        tensors["rope_freqs.weight"] = llama3_factors(rope, config.head_dim)
    return write(path, fields, tensors, arch)


def llama3_factors(rope, size):
    """The divisors of Llama 3's frequencies, after llama.cpp's converter."""
    found = []
    for index in range(size // 2):
        wave = 2 * math.pi * rope["rope_theta"] ** (2 * index / size)
        original, factor = rope["original_max_position_embeddings"], rope["factor"]
        if wave < original / rope["high_freq_factor"]:
            found.append(1.0)
        elif wave > original / rope["low_freq_factor"]:
            found.append(factor)
        else:
            smooth = (original / wave - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


@pytest.mark.parametrize("name", MODELS)
def test_config_and_weights_come_back(tmp_path, name):
    """Transformers reads our config.json into the model's own config, and the weights are bit for bit the model's."""
    from transformers import AutoConfig

    model = reference(name)
    file = GgufFile.open(convert(model, tmp_path / "model.gguf"))
    config = gguf_config(file)
    json.dumps(config)
    ours, theirs = AutoConfig.for_model(**config).to_dict(), model.config.to_dict()
    assert {key: value for key, value in ours.items() if key not in UNCOMPARED} == {
        key: value for key, value in theirs.items() if key not in UNCOMPARED
    }
    assert config["head_dim"] == (getattr(model.config, "head_dim", None) or 16)
    weights = gguf_weights(file, config)
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    assert set(weights) == set(state)
    for key, value in state.items():
        got = weights[key].read()
        assert weights[key].shape == tuple(value.shape)
        if config["model_type"].startswith("gemma") and "norm" in key:
            # (w + 1) - 1 in fp32 loses w's last bits: half an ulp of a number up to 2.
            assert (got - value).abs().max() <= 2**-23
        else:
            assert torch.equal(got, value), key
        for rows in (slice(0, 3), slice(5, 21), slice(7, 7), slice(1, None)):
            assert torch.equal(weights[key].read(rows=rows), got[rows])


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_model_that_was_converted(tmp_path, name):
    """From the file alone, through our family and modules; longer than every window. Both sum in fp32."""
    model = reference(name).eval()
    ours = load_model(convert(model, tmp_path / "model.gguf"))
    tokens = torch.randint(0, 96, (150,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens[None]).logits[0]
        found = ours(tokens, PackedContext.of_lengths([len(tokens)]))
    assert (found - expected).abs().max() <= 1e-4 * (expected.max() - expected.min())


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_same_state_as_transformers_own_gguf_loader(tmp_path, name):
    """Quantized, against Transformers' independent reading of the same file."""
    from transformers import AutoModelForCausalLM

    model = reference(name)

    def quantize(name, array):
        kind = "Q8_0" if name.endswith("ffn_up.weight") else "Q5_1"
        if array.ndim < 2 or array.shape[-1] % 32:
            return array
        return gguf.quants.quantize(array, gguf.GGMLQuantizationType[kind]), kind

    path = convert(model, tmp_path / "model.gguf", quantize)
    # With the config given: left to itself, Transformers drops the size of a head from the file.
    theirs = AutoModelForCausalLM.from_pretrained(
        str(tmp_path), gguf_file=path.name, config=model.config, dtype=torch.float32
    ).state_dict()
    file = GgufFile.open(path)
    weights = gguf_weights(file, gguf_config(file))
    for key, weight in weights.items():
        assert torch.equal(weight.read(), theirs[key]), key


def test_smollm2():
    file = GgufFile.open(smollm2())
    config = gguf_config(file)
    assert config["model_type"] == "llama" and config["tie_word_embeddings"] and config["head_dim"] == 64
    assert config["rms_norm_eps"] == 1e-5 and config["rope_parameters"]["rope_theta"] == 100000.0
    weights = gguf_weights(file, config)
    assert len({weight.tensor for weight in weights.values()}) == len(file.tensors) == len(weights)
    name = "model.layers.3.self_attn.q_proj.weight"
    assert torch.equal(weights[name].read(), torch.from_numpy(unpermuted(file.read("blk.3.attn_q.weight").numpy(), 9)))


def unpermuted(weight, heads):
    order = permuted(np.arange(len(weight)), heads)
    back = np.empty_like(weight)
    back[order] = weight
    return back


@pytest.mark.parametrize("size", [16, 64, 128])
@pytest.mark.parametrize(("high", "original"), [(4.0, 8192), (4.0, 4096), (8.0, 8192), (2.5, 32768)])
def test_llama3_scaling_is_recovered_from_its_factors(tmp_path, size, high, original):
    """Whatever the parameters, Transformers' frequencies from our config are those that the file was made with."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_theta": 500000.0,
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
    file = GgufFile.open(tiny(tmp_path, size, {"rope_freqs.weight": llama3_factors(rope, size)}))
    found = gguf_config(file)["rope_parameters"]
    frequencies = []
    for parameters in (rope, found):
        config = LlamaConfig(head_dim=size, rope_parameters=parameters, max_position_embeddings=131072)
        inverse, attention = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu", seq_len=64)
        frequencies.append(inverse)
        assert attention == 1.0
    assert torch.allclose(*frequencies, rtol=1e-5, atol=0)
    if size == 128:  # with fewer frequencies other parameters may give the same factors
        assert found == rope


def test_factors_that_no_llama3_has_are_kept_as_they_are(tmp_path):
    factors = np.linspace(1, 3, 8, dtype=np.float32)
    config = gguf_config(GgufFile.open(tiny(tmp_path, 16, {"rope_freqs.weight": factors})))
    found, rope = config["rope_parameters"], read_spec(config).layers[0].attention.rope
    cosines, _ = rope_table(rope, torch.tensor([3]), torch.tensor([4]))
    angles = 3 * 500000.0 ** (-torch.arange(8) / 8) / torch.from_numpy(factors)
    assert torch.allclose(cosines.flatten()[:8], angles.cos(), atol=1e-6)
    assert found["rope_type"] == "longrope" and found["attention_factor"] == 1.0
    assert found["short_factor"] == found["long_factor"] == factors.tolist()


def tiny(tmp_path, size=16, tensors=None, fields=None, arch="llama", drop=()):
    """A whole one-layer model file with changes."""
    keys = {
        f"{arch}.context_length": 131072,
        f"{arch}.embedding_length": 32,
        f"{arch}.block_count": 1,
        f"{arch}.feed_forward_length": 32,
        f"{arch}.attention.head_count": 2,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.dimension_count": size,
        f"{arch}.rope.freq_base": 500000.0,
        **(fields or {}),
    }
    held = {
        "token_embd.weight": np.zeros((8, 32), np.float32),
        "output_norm.weight": np.zeros(32, np.float32),
        "blk.0.attn_norm.weight": np.zeros(32, np.float32),
        "blk.0.ffn_norm.weight": np.zeros(32, np.float32),
        "blk.0.attn_q.weight": np.zeros((2 * size, 32), np.float32),
        "blk.0.attn_k.weight": np.zeros((2 * size, 32), np.float32),
        "blk.0.attn_v.weight": np.zeros((2 * size, 32), np.float32),
        "blk.0.attn_output.weight": np.zeros((32, 2 * size), np.float32),
        "blk.0.ffn_gate.weight": np.zeros((32, 32), np.float32),
        "blk.0.ffn_up.weight": np.zeros((32, 32), np.float32),
        "blk.0.ffn_down.weight": np.zeros((32, 32), np.float32),
        **(tensors or {}),
    }
    return write(
        tmp_path / "tiny.gguf",
        {key: value for key, value in keys.items() if key not in drop},
        {key: value for key, value in held.items() if key not in drop},
        arch,
    )


def test_tiny_file_is_whole(tmp_path):
    file = GgufFile.open(tiny(tmp_path))
    assert len(gguf_weights(file, gguf_config(file))) == 11


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "mamba"}, "the architecture 'mamba' is not supported; supported: llama"),
        ({"fields": {"general.type": "adapter"}}, "is of type 'adapter', not a model"),
        ({"drop": ("llama.block_count",)}, "'llama.block_count' is missing"),
        ({"fields": {"llama.block_count": "one"}}, "'llama.block_count' must be a positive whole number, it is 'one'"),
        (
            {"fields": {"llama.block_count": 1 << 30}},
            "'llama.block_count' is 1073741824, but the file has only 11 tensors",
        ),
        ({"fields": {"llama.attention.head_count": 0}}, "'llama.attention.head_count' must be a positive"),
        ({"fields": {"llama.attention.head_count_kv": [1, 2]}}, "'llama.attention.head_count_kv' must be a positive"),
        ({"fields": {"llama.attention.layer_norm_rms_epsilon": -1.0}}, "must be a positive number"),
        ({"fields": {"llama.expert_count": 8}}, "'llama.expert_count' is 8; Treadle supports only 0"),
        ({"fields": {"llama.attention.value_length": 8}}, "'llama.attention.value_length' is 8; .* only 16"),
        ({"fields": {"llama.novel_thing": 3}}, "'llama.novel_thing' is not understood; ignoring it could change"),
        ({"fields": {"llama.rope.scaling.type": "longrope"}}, "'llama.rope.scaling.type' is 'longrope'; none, linear"),
        ({"tensors": {"rope_freqs.weight": np.ones(3, np.float32)}}, "rope_freqs.weight that is not 8 factors"),
        ({"tensors": {"rope_freqs.weight": np.ones((2, 8), np.float32)}}, "rope_freqs.weight that is not 8 factors"),
        ({"drop": ("token_embd.weight",)}, "no tensor 'token_embd.weight'; it is not a whole model"),
        ({"drop": ("blk.0.attn_q.weight",)}, "lacks the tensor 'blk.0.attn_q.weight'; download"),
        ({"fields": {"llama.block_count": 2}}, r"lacks the tensors 'blk\.1\.attn_k\.weight', .* and 6 more"),
        (
            {"tensors": {"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}},
            "has the tensor 'blk.0.attn_q_norm.weight'",
        ),
        ({"tensors": {"blk.0.attn_q.weight": np.ones((30, 32), np.float32), "x": np.ones(1)}}, "has the tensor 'x'"),
        ({"tensors": {"blk.0.attn_q.weight": np.ones((30, 32), np.float32)}}, "has 30 rows, not 2 heads of even size"),
        (
            {"tensors": {"blk.0.ffn_up.weight": (np.zeros((32, 17), np.uint8), "MXFP4")}},
            "'blk.0.ffn_up.weight' is of type MXFP4, which is not supported",
        ),
    ],
)
def test_what_does_not_fit_is_named_before_anything_is_read(tmp_path, changes, message):
    file = GgufFile.open(tiny(tmp_path, **changes))
    with pytest.raises(UserError, match=message) as caught:
        gguf_weights(file, gguf_config(file))
    assert "tiny.gguf" in str(caught.value)


def test_a_window_of_0_is_none(tmp_path):
    for arch in ("llama", "qwen2"):
        path = tiny(tmp_path, arch=arch, fields={f"{arch}.attention.sliding_window": 0})
        assert gguf_config(GgufFile.open(path))["model_type"] == arch
    with pytest.raises(UserError, match=r"'qwen2\.attention\.sliding_window' is 64; Treadle supports only 0"):
        gguf_config(GgufFile.open(tiny(tmp_path, arch="qwen2", fields={"qwen2.attention.sliding_window": 64})))


def test_heads_are_put_in_order_in_quantized_weights_too(tmp_path):
    blocks = quantized("Q4_K", (64, 256), 5)
    path = tiny(tmp_path, 32, {"blk.0.attn_q.weight": (blocks, "Q4_K")}, {"llama.embedding_length": 256})
    file = GgufFile.open(path)
    weight = gguf_weights(file, gguf_config(file))["model.layers.0.self_attn.q_proj.weight"]
    plain = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q4_K)
    assert torch.equal(weight.read(), torch.from_numpy(unpermuted(plain, 2)))
    assert weight.nbytes == blocks.nbytes
    assert gguf_files.smollm2().exists()


VOCABULARY = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<|eot_id|>", "<think>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3, 4],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 3,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": "{{ messages }}",
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.padding_token_id": 0,
    "general.file_type": 0,
    "general.type": "model",
    "llama.attention.sliding_window": 8,
    "llama.attention.head_count_kv": 1,
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 2.0,
}
ODD = [0, 1, 7, -1, 1 << 31, 2.5, float("nan"), float("inf"), 1e300, True, "", "x", "llama", [], [1], ["a"], [[]], None]


def test_any_value_of_any_key_is_a_model_or_one_sentence(tmp_path):
    file = GgufFile.open(tiny(tmp_path, fields=VOCABULARY))
    for key, right in list(file.metadata.items()):
        for value in ODD:
            file.metadata[key] = value
            if value is None:
                del file.metadata[key]
            for reading in (lambda: gguf_weights(file, gguf_config(file)), lambda: gguf_tokenizer(file).encode("ab")):
                try:
                    reading()
                except UserError as error:
                    assert "\n" not in str(error), (key, value)
        file.metadata[key] = right


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(places=st.lists(st.tuples(st.integers(4, 1500), st.integers(0, 255)), min_size=1, max_size=3))
def test_damaged_models_are_read_or_refused(tmp_path, places):
    content = bytearray(tiny(tmp_path, fields=VOCABULARY).read_bytes())
    for place, value in places:
        content[place] = value
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    started = time.perf_counter()
    try:
        file = GgufFile.open(path)
        gguf_tokenizer(file).encode("ab")
        for weight in gguf_weights(file, gguf_config(file)).values():
            weight.read()
    except UserError:
        pass
    assert time.perf_counter() - started < 5
