"""Blocks: every byte once, the same from any place, cut where it cannot be seen."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
import zstandard
from tokenizers import models, normalizers, pre_tokenizers

from treadle.config import UserError
from treadle.data import reading
from treadle.data.corpus_tokenizer import safe_cut_of
from treadle.data.reading import Piece, ReadSettings, read_blocks
from treadle.data.sources import expand
from treadle.model.tokenizer import Tokenizer

BLOCK_BYTES = 1 << 16


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks, so that small files are many of them."""
    monkeypatch.setattr(reading, "BLOCK_BYTES", BLOCK_BYTES)


def random_text(seed: int, size: int) -> str:
    """Return lines of words in several scripts, about `size` bytes of them."""
    random = np.random.default_rng(seed)
    words = ["alpha", "Straße", "слово", "語", "x+=1;", "\tindent", "  ", "12345", "🙂", "…", "don't"]
    lines = []
    while size > 0:
        line = " ".join(words[n] for n in random.integers(0, len(words), random.integers(0, 25)))
        lines.append(line)
        size -= len(line.encode()) + 1
    return "\n".join(lines)


def pieces(path: Path | str, settings: ReadSettings = ReadSettings(), **options) -> list[Piece]:
    return [piece for block in read_blocks(expand([str(path)]), settings, **options) for piece in block.pieces]


def documents(found: list[Piece]) -> list[bytes]:
    """Join the parts of documents, split records."""
    joined: list[bytes] = []
    for piece in found:
        if piece.kind == "lines":
            joined += piece.data.splitlines()
        elif piece.continues:
            joined[-1] += piece.data
        else:
            joined.append(piece.data)
    return joined


def write_everything(folder: Path) -> None:
    """Files of every format, some larger than a block."""
    folder.mkdir()
    (folder / "a-small.txt").write_text("small")
    (folder / "b-large.txt").write_text(random_text(1, 3 * BLOCK_BYTES))
    records = [{"text": random_text(n, 5_000), "n": n} for n in range(60)]
    (folder / "c.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (folder / "d.jsonl.gz").write_bytes(gzip.compress((folder / "c.jsonl").read_bytes()))
    table = pyarrow.table({"text": [r["text"] for r in records], "n": [r["n"] for r in records]})
    pyarrow.parquet.write_table(table, folder / "e.parquet", row_group_size=25)
    (folder / "f-empty.txt").write_text("")
    (folder / "g-binary.bin").write_bytes(bytes(range(256)) * 10)
    (folder / "h.txt.zst").write_bytes(zstandard.ZstdCompressor().compress(random_text(2, 2 * BLOCK_BYTES).encode()))
    (folder / "i-last.py").write_text("print('last')\n")


def test_from_every_block_on_the_rest_is_the_same(tmp_path: Path) -> None:
    write_everything(tmp_path / "all")
    found = expand([str(tmp_path / "all")])
    blocks = list(read_blocks(found, ReadSettings()))
    assert len(blocks) > 10
    assert [block.position for block in blocks] == sorted(block.position for block in blocks)
    assert blocks[-1].position == sum(source.bytes or 0 for source in found)
    assert sum(len(block.skipped) for block in blocks) == 1
    for number, block in enumerate(blocks[:-1]):
        again = list(read_blocks(found, ReadSettings(), block.cursor))
        assert [b.pieces for b in again] == [b.pieces for b in blocks[number + 1 :]]
        assert [b.cursor for b in again] == [b.cursor for b in blocks[number + 1 :]]


def test_every_format_gives_every_byte(tmp_path: Path) -> None:
    write_everything(tmp_path / "all")
    folder = tmp_path / "all"
    for name in ("a-small.txt", "b-large.txt", "i-last.py"):
        assert documents(pieces(folder / name)) == [(folder / name).read_bytes()]
    lines = (folder / "c.jsonl").read_bytes().splitlines()
    assert documents(pieces(folder / "c.jsonl")) == lines
    assert documents(pieces(folder / "d.jsonl.gz")) == lines
    texts = [json.loads(line)["text"] for line in lines]
    assert [json.loads(line) for line in documents(pieces(folder / "e.parquet"))] == [{"text": text} for text in texts]
    assert documents(pieces(folder / "h.txt.zst")) == [random_text(2, 2 * BLOCK_BYTES).encode()]
    assert len(pieces(folder / "b-large.txt")) >= 3
    # Numbers of records, for messages.
    assert [piece.record for piece in pieces(folder / "c.jsonl")] == [
        sum(p.data.count(b"\n") for p in pieces(folder / "c.jsonl")[:n]) for n in range(len(pieces(folder / "c.jsonl")))
    ]


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [
        (".gz", gzip.compress),
        (".bz2", bz2.compress),
        (".xz", lzma.compress),
        (".zst", zstandard.ZstdCompressor().compress),
    ],
)
def test_compressed_files_are_read_and_damage_is_named(tmp_path: Path, suffix: str, compress) -> None:
    text = random_text(3, 100_000).encode()
    path = tmp_path / f"x.txt{suffix}"
    # Two members one after another, as `cat a.gz b.gz` makes them.
    path.write_bytes(compress(text) + compress(b"more"))
    assert documents(pieces(path)) == [text + b"more"]
    unnamed = tmp_path / "no-suffix"
    unnamed.write_bytes(compress(text))
    assert documents(pieces(unnamed)) == [text]
    whole = compress(text)
    for damaged in (whole[:-30], whole[: len(whole) // 2] + bytes(40) + whole[len(whole) // 2 + 40 :]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=rf"x.txt{suffix} (is damaged|cannot be read|is not text)"):
            pieces(path)
    path.write_text("not compressed at all")
    with pytest.raises(UserError, match=r"is named as .* data but is none"):
        pieces(path)


def test_a_small_file_that_stands_for_very_much_is_read_in_bounded_memory(tmp_path: Path) -> None:
    import resource

    path = tmp_path / "zeros.txt.zst"
    compressor = zstandard.ZstdCompressor(level=19).compressobj()
    with path.open("wb") as file:
        for _ in range(512):
            file.write(compressor.compress(b"\n" * (1 << 20)))
        file.write(compressor.flush())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with reading.open_stream(expand([str(path)])[0]) as stream:
        total = 0
        while part := stream.read(1 << 20):
            total += len(part)
    assert total == 512 << 20
    # In KiB: 512 MiB passed, the growth stays below a fifth of it.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


def test_an_explicit_binary_file_is_refused_one_among_others_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"\x7fELF\0\1\2")
    (tmp_path / "x.txt").write_text("text")
    with pytest.raises(UserError, match=r"x.bin is not text but binary"):
        pieces(tmp_path / "x.bin")
    (block,) = read_blocks(expand([str(tmp_path)]), ReadSettings())
    assert block.skipped == [str(tmp_path / "x.bin")]
    assert [piece.data for piece in block.pieces] == [b"text"]


@pytest.mark.parametrize(
    ("content", "binary"),
    [
        (b"", False),
        ("plain, ümläut, 語, 🙂\n".encode(), False),
        ("caf\xe9 au lait, cr\xe8me br\xfbl\xe9e and more plain words".encode("latin-1"), False),
        (b"\x1b[31mred\x1b[0m in a log", False),
        ("語".encode() * 30_000, False),  # the first bytes end within a character
        (b"%PDF-1.7\n", True),
        ("text".encode("utf-16"), True),
        (bytes(range(1, 256)), True),
    ],
)
def test_binary_is_told_from_text(tmp_path: Path, content: bytes, binary: bool) -> None:
    (tmp_path / "x").write_bytes(content)
    (block,) = read_blocks(expand([str(tmp_path)]), ReadSettings())
    assert bool(block.skipped) == binary


def test_separators_and_sizes_divide_text_files(tmp_path: Path) -> None:
    parts = [random_text(n, 1000 * n) for n in range(1, 30)]
    path = tmp_path / "x.txt"
    path.write_text("<|end|>".join(parts))
    assert documents(pieces(path, ReadSettings(separator="<|end|>"))) == [part.encode() for part in parts]
    sized = documents(pieces(path, ReadSettings(document_bytes=5_000)))
    assert b"".join(sized) == path.read_bytes()
    assert all(5_000 <= len(part) <= 6_000 and part.endswith(b"\n") for part in sized[:-1])
    settings = ReadSettings(separator="<|end|>")
    blocks = list(read_blocks(expand([str(path)]), settings))
    assert len(blocks) > 1
    assert [b.pieces for b in read_blocks(expand([str(path)]), settings, blocks[0].cursor)] == [
        b.pieces for b in blocks[1:]
    ]


def test_json_is_records_only_where_it_looks_so(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    assert [piece.kind for piece in pieces(path)] == ["lines"]
    path.write_text('{\n  "name": "settings"\n}\n')
    assert [piece.kind for piece in pieces(path)] == ["text"]
    path.write_text('[{"text": "a"}]')
    with pytest.raises(UserError, match=r"one JSON array; .*jq"):
        pieces(path)
    assert [piece.kind for piece in pieces(path, ReadSettings(format="text"))] == ["text"]


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_RECORD_BYTES", 1 << 20)
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "ok"}\n{"text": "' + b"x" * (3 << 20) + b'"}')
    with pytest.raises(UserError, match=r"x.jsonl: line 2 is longer than 1 MiB"):
        pieces(tmp_path / "x.jsonl")


def test_parquet_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"txt": ["a"], "n": [1]}), path)
    with pytest.raises(UserError, match=r"x.parquet has no column 'text', did you mean 'txt'\?; it has txt, n"):
        pieces(path)
    assert documents(pieces(path, ReadSettings(text_field="txt"))) == [b'{"txt": "a"}']
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"x.parquet is not a Parquet file that can be read"):
        pieces(path)


def test_a_chat_column_is_found(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    pyarrow.parquet.write_table(pyarrow.table({"messages": [chat], "id": [1]}), path)
    assert [json.loads(line) for line in documents(pieces(path))] == [{"messages": chat}]


def byte_level(split: str | None) -> Tokenizer:
    """A byte-level BPE trained on the same kind of text, with the split of GPT-2 (None) or the given one."""
    backend = tokenizers.Tokenizer(models.BPE())
    if split is None:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(split), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([random_text(7, 50_000)], trainer)
    return Tokenizer(backend)


def sentencepiece_like() -> Tokenizer:
    """One word for the whole text, a blank put before it: no cut is ever invisible."""
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={"▁": 0, "a": 1, "<0x0A>": 2, "<unk>": 3}, merges=[], unk_token="<unk>")
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return Tokenizer(backend)


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "sentencepiece"])
def test_long_documents_are_cut_only_where_the_tokens_do_not_tell(tmp_path: Path, kind: str) -> None:
    from treadle.model.tokenizer_build import LLAMA3_SPLIT

    tokenizer = {
        "gpt2": lambda: byte_level(None),
        "llama3": lambda: byte_level(LLAMA3_SPLIT),
        "sentencepiece": sentencepiece_like,
    }[kind]()
    text = random_text(11, 3 * BLOCK_BYTES)
    (tmp_path / "x.txt").write_text(text)
    found = pieces(tmp_path / "x.txt", safe_cut=safe_cut_of(tokenizer))
    assert (len(found) > 1) == (kind != "sentencepiece")
    assert not any(piece.forced for piece in found)
    assert [piece.continues for piece in found] == [False] + [True] * (len(found) - 1)
    assert [piece.more for piece in found] == [True] * (len(found) - 1) + [False]
    joined = [token for piece in found for token in tokenizer.encode(piece.data.decode(), False, False)]
    assert joined == tokenizer.encode(text, False, False)


def test_a_document_that_cannot_be_cut_invisibly_is_cut_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MAX_PART_BYTES", 2 << 20)
    for text in ("語" * (2 << 20), "line of words\n" * (1 << 18)):
        (tmp_path / "x.txt").write_text(text)
        found = pieces(tmp_path / "x.txt", safe_cut=lambda left, right: False)
        assert len(found) > 1 and all(piece.forced for piece in found[:-1]) and not found[-1].forced
        assert "".join(piece.data.decode() for piece in found) == text
    # Bytes that are within a character everywhere: cut all the same.
    (tmp_path / "x.txt").write_bytes(b"text" * (1 << 15) + b"\x80" * (5 << 20))
    assert b"".join(documents(pieces(tmp_path / "x.txt"))) == (tmp_path / "x.txt").read_bytes()


def test_a_document_without_separator_is_cut_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_RECORD_BYTES", 100_000)
    text = "語" * 100_000 + "|" + "x"
    (tmp_path / "x.txt").write_text(text)
    found = pieces(tmp_path / "x.txt", ReadSettings(separator="|"))
    assert [piece.forced for piece in found] == [True] * (len(found) - 2) + [False, False]
    assert "".join(piece.data.decode() for piece in found) == text.replace("|", "")


def test_a_file_that_went_away_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("x")
    found = expand([str(tmp_path / "x.txt")])
    (tmp_path / "x.txt").unlink()
    with pytest.raises(UserError, match=r"x.txt is gone"):
        list(read_blocks(found, ReadSettings()))
