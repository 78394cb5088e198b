import shutil
import struct
import time

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.weights import gguf_files
from tests.weights.gguf_files import entry, handmade, quantized, smollm2, text, write
from treadle.config import UserError
from treadle.weights.gguf import GgufFile

U32 = struct.Struct("<I").pack


def key(name, kind, value):
    return text(name) + U32(kind) + value


@pytest.fixture
def opened(tmp_path):
    def open_bytes(content: bytes) -> GgufFile:
        path = tmp_path / "bad.gguf"
        path.write_bytes(content)
        return GgufFile.open(path)

    return open_bytes


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A valid file with every kind of metadata, plain and quantized tensors."""
    writer_fields = {
        "a.uint": 7,
        "a.float": 0.5,
        "a.bool": True,
        "a.text": "héllo",
        "a.numbers": [1, 2, 3],
        "a.floats": [0.5, -1.0],
        "a.texts": ["", "x", "日本"],
    }
    tensors = {
        "w": (quantized("Q4_K", (2, 256), 0), "Q4_K"),
        "v": np.arange(6, dtype=np.float32).reshape(2, 3),
        "h": np.arange(4, dtype=np.float16),
    }
    return write(tmp_path_factory.mktemp("small") / "small.gguf", writer_fields, tensors)


def test_metadata_and_tensors_are_those_of_the_reference(small):
    for path in (small, smollm2()):
        file, theirs = GgufFile.open(path), gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
        assert file.metadata == fields
        assert {name: (list(t.shape), t.type, t.offset, t.nbytes) for name, t in file.tensors.items()} == {
            t.name: (t.shape.tolist()[::-1], t.tensor_type.name, t.data_offset, t.n_bytes) for t in theirs.tensors
        }


def test_version_2_and_alignment_and_nested_arrays(opened):
    nested = U32(9) + struct.pack("<Q", 2) + 2 * (U32(4) + struct.pack("<Q2I", 2, 5, 6))
    keys = [key("general.alignment", 4, U32(64)), key("nested", 9, nested)]
    head = b"GGUF" + struct.pack("<IQQ", 2, 1, 2) + b"".join(keys) + entry("a", [2, 3], 0, 64)
    values = np.arange(6, dtype=np.float32)
    file = opened(head + b"\0" * (-len(head) % 64) + b"\0" * 64 + values.tobytes())
    assert file.metadata == {"general.alignment": 64, "nested": [[5, 6], [5, 6]]}
    assert torch.equal(file.read("a"), torch.from_numpy(values).reshape(3, 2))


def test_scalars_and_empty_dims(opened):
    file = opened(handmade([], [entry("a", [], 0, 0)], struct.pack("<f", 2.5)))
    assert file.read("a").shape == () and file.read("a").item() == 2.5


def test_unknown_tensor_names_the_nearest(small):
    with pytest.raises(UserError, match=r"no tensor 'vv', did you mean 'v'\?"):
        GgufFile.open(small).read("vv")


def test_real_file_opens_fast():
    """Processor time, which other work on the machine leaves alone: 0.03 s; the reference takes 1.5."""
    started = time.process_time()
    GgufFile.open(smollm2())
    assert time.process_time() - started < 0.5


HUGE = (1 << 64) - 1
ONE = [entry("a", [4], 0, 0)]
BAD = {
    "empty": (b"", "bad.gguf is empty"),
    "short": (b"GGUF\3", "bad.gguf is cut short"),
    "short text": (b"hello", "is not a GGUF file"),
    "not GGUF": (b"PK\3\4" + b"\0" * 40, "is not a GGUF file"),
    "old GGML": (b"tjgg" + b"\0" * 40, "older GGML format"),
    "version 1": (handmade(version=1), "is GGUF version 1;"),
    "version 99": (handmade(version=99), "is GGUF version 99;"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + b"\0" * 16, "is a big-endian GGUF file"),
    "many keys": (b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE) + b"\0" * 8, "promises 18446744073709551615 metadata keys"),
    "many tensors": (b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0) + b"\0" * 8, "promises 18446744073709551615 tensors"),
    "long key": (handmade([struct.pack("<Q", HUGE) + b"a"]), r"metadata key 1 of 1 has a text of 18446744073709551615"),
    "long key beyond": (handmade([struct.pack("<Q", 5000) + b"a"]), "key 1 of 1 goes beyond the end"),
    "long text": (
        handmade([key("k", 8, struct.pack("<Q", HUGE))]),
        "metadata key 'k' has a text of 18446744073709551615",
    ),
    "long text beyond": (handmade([key("k", 8, struct.pack("<Q", 4000))]), "metadata key 'k' goes beyond the end"),
    "unknown value": (handmade([key("k", 77, b"\0" * 64)]), "'k' has a value of the unknown type 77"),
    "key twice": (handmade([key("k", 0, b"\1"), key("k", 0, b"\1")]), "metadata key 'k' is given twice"),
    "key not UTF-8": (handmade([key(b"\xff", 0, b"\1")]), "metadata key 1 of 1 holds a text that is not UTF-8"),
    "text not UTF-8": (handmade([key("k", 8, text(b"\xff"))]), "metadata key 'k' holds a text that is not UTF-8"),
    "item not UTF-8": (
        handmade([key("k", 9, U32(8) + struct.pack("<Q", 2) + text("a") + text(b"\xff"))]),
        r"'k' holds a text that is not UTF-8 \(item 1\)",
    ),
    "huge array": (
        handmade([key("k", 9, U32(0) + struct.pack("<Q", HUGE))]),
        "'k' has an array of 18446744073709551615",
    ),
    "array beyond": (handmade([key("k", 9, U32(5) + struct.pack("<Q", 1 << 20))]), "'k' goes beyond the end"),
    "texts beyond": (handmade([key("k", 9, U32(8) + struct.pack("<Q", 1 << 20))]), "more than the file can hold"),
    "long item": (
        handmade([key("k", 9, U32(8) + struct.pack("<QQ", 1, HUGE))], data=b"\0" * 64),
        "'k' has a text of 18446744073709551615 bytes",
    ),
    "deep array": (handmade([key("k", 9, (U32(9) + struct.pack("<Q", 1)) * 9)], data=b"\0" * 64), "more than 4 deep"),
    "alignment 0": (handmade([key("general.alignment", 4, U32(0))]), "'general.alignment' is 0, not a power of two"),
    "alignment 48": (handmade([key("general.alignment", 4, U32(48))]), "'general.alignment' is 48, not a power"),
    "alignment text": (handmade([key("general.alignment", 8, text("x"))]), "'general.alignment' is x, not a power"),
    "five dims": (handmade([], [entry("a", [1] * 5, 0, 0)], b"\0" * 64), "tensor 'a' has 5 dims"),
    "dim 0": (handmade([], [entry("a", [0, 4], 0, 0)], b"\0" * 64), r"tensor 'a' has the shape \[4, 0\], which holds"),
    "dims overflow": (handmade([], [entry("a", [1 << 62, 16], 0, 0)], b"\0" * 64), "is cut short: tensor 'a' ends"),
    "half a block": (handmade([], [entry("a", [40], 2, 0)], b"\0" * 64), "whole Q4_0 blocks of 32"),
    "unknown type": (handmade([], [entry("a", [32], 999, 0)], b"\0" * 64), "tensor 'a' is of the unknown type 999"),
    "removed type": (handmade([], [entry("a", [32], 4, 0)], b"\0" * 64), "tensor 'a' is of the unknown type 4"),
    "bad offset": (
        handmade([], [entry("a", [4], 0, 4)], b"\0" * 64),
        "tensor 'a' starts at 4, which is not a multiple",
    ),
    "far offset": (handmade([], [entry("a", [4], 0, 1 << 62)], b"\0" * 64), "is cut short: tensor 'a' ends at byte"),
    "cut data": (handmade([], [entry("a", [4], 0, 0)], b"\0" * 15), "is cut short: tensor 'a' ends"),
    "tensor twice": (handmade([], [entry("a", [4], 0, 0), entry("a", [4], 0, 32)], b"\0" * 64), "'a' is given twice"),
    "overlap": (handmade([], [entry("a", [16], 0, 0), entry("b", [4], 0, 32)], b"\0" * 64), "'a' overlaps tensor 'b'"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_header_that_lies_is_one_clear_sentence(opened, name):
    content, message = BAD[name]
    with pytest.raises(UserError, match=message) as caught:
        opened(content)
    assert "bad.gguf" in str(caught.value) and "\n" not in str(caught.value)


def test_a_name_made_to_deceive_stays_on_one_line(opened):
    with pytest.raises(UserError) as caught:
        opened(handmade([], [entry("a\n\x1b[2Jtreadle: all is well" * 50, [0], 0, 0)], b"\0" * 64))
    assert "\n" not in str(caught.value) and "\x1b" not in str(caught.value) and len(str(caught.value)) < 400


def test_cut_at_every_byte(small, opened):
    whole = small.read_bytes()
    last = max(tensor.offset + tensor.nbytes for tensor in GgufFile.open(small).tensors.values())
    for length in range(last):
        with pytest.raises(UserError, match=r"bad\.gguf"):
            opened(whole[:length])
    assert opened(whole[:last]).tensors  # padding after the last tensor may be missing


def test_missing_files_and_folders(tmp_path):
    for path in (tmp_path, tmp_path / "nothing.gguf"):
        with pytest.raises(UserError, match="is not a file"):
            GgufFile.open(path)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_are_read_or_refused(small, opened, data):
    """Random damage gives a valid reading or UserError: no other exception, no hang, no giant allocation."""
    content = bytearray(small.read_bytes())
    header = min(tensor.offset for tensor in GgufFile.open(small).tensors.values())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(4, header - 1))
        if data.draw(st.booleans()):
            content[place] = data.draw(st.integers(0, 255))
        else:
            content[place : place + 8] = data.draw(st.sampled_from([0, 1, 1 << 31, 1 << 33, 1 << 63, HUGE])).to_bytes(
                8, "little"
            )
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(24, len(content))) :]
    started = time.process_time()
    try:
        file = opened(bytes(content))
        for name, tensor in file.tensors.items():
            if tensor.kind.decode or tensor.type == "F32":
                assert file.read(name).shape == tensor.shape
    except UserError:
        pass
    assert time.process_time() - started < 2


def split(tmp_path, count=3):
    for number in range(count):
        fields = {"split.no": number, "split.count": count, "split.tensors.count": count}
        tensors = {f"t{number}": np.full((2, 2), number, np.float32)}
        write(tmp_path / f"m-{number + 1:05}-of-{count:05}.gguf", fields, tensors)
    return tmp_path / f"m-00001-of-{count:05}.gguf"


def test_split_files_read_as_one(tmp_path):
    file = GgufFile.open(split(tmp_path))
    assert [file.read(f"t{number}").unique().item() for number in range(3)] == [0, 1, 2]


def test_split_files_that_do_not_belong_together(tmp_path):
    first = split(tmp_path)
    second, third = (tmp_path / f"m-0000{number}-of-00003.gguf" for number in (2, 3))
    with pytest.raises(UserError, match=r"is not the first shard; give m-00001-of-00003\.gguf"):
        GgufFile.open(second)
    shutil.copy(second, third)
    with pytest.raises(UserError, match="is not shard 3 of"):
        GgufFile.open(first)
    write(third, {"split.no": 2, "split.count": 3}, {"t1": np.zeros((2, 2), np.float32)})
    with pytest.raises(UserError, match="tensor 't1' is in another shard too"):
        GgufFile.open(first)
    write(third, {"split.no": 2, "split.count": 3}, {})
    with pytest.raises(UserError, match="the shards hold 2 tensors, the header says 3"):
        GgufFile.open(first)
    third.unlink()
    with pytest.raises(UserError, match=r"m-00003-of-00003\.gguf is not a file; all shards must lie in one folder"):
        GgufFile.open(first)
    renamed = first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(UserError, match="is one of 3 shards; give it its name back"):
        GgufFile.open(renamed)


def test_raw_is_a_view_of_the_file():
    file = GgufFile.open(smollm2())
    name = "token_embd.weight"
    assert file.raw(name).data_ptr() == file.raw(name).data_ptr()
    assert file.raw(name).numel() == file.tensors[name].nbytes
    assert gguf_files.smollm2() == file.path
