"""Opening and reading corpora, and what is said of damaged ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from tests.data.corpora import document, random_documents
from treadle.config import UserError
from treadle.data.corpus import Corpus


@pytest.mark.parametrize("shard_tokens", [1, 50, 10_000])
@pytest.mark.parametrize("vocabulary_size", [1000, 70_000])
def test_what_was_written_is_read(make_corpus: Callable[..., Corpus], shard_tokens: int, vocabulary_size: int) -> None:
    documents = random_documents(0, 60, vocabulary_size=vocabulary_size)
    corpus = make_corpus(documents, shard_tokens=shard_tokens, vocabulary_size=vocabulary_size)
    assert [document(corpus, n) for n in range(corpus.documents)] == documents
    flat = [token for document in documents for token in document]
    starts = np.cumsum([0] + [len(d) for d in documents])
    assert corpus.tokens == len(flat) and corpus.documents == len(documents)
    random = np.random.default_rng(0)
    for _ in range(200):
        start, end = sorted(random.integers(0, len(flat) + 1, 2).tolist())
        assert corpus.read(start, end).tolist() == flat[start:end]
        assert corpus.boundaries(start, end).tolist() == [s for s in starts.tolist() if start <= s <= end]
        assert corpus.mask(start, end).all()
    first, last = 7, 41
    assert corpus.document_spans(first, last).tolist() == np.stack([starts[:-1], starts[1:]], 1)[first:last].tolist()
    corpus.verify()


def test_reading_outside_is_refused(make_corpus: Callable[..., Corpus]) -> None:
    corpus = make_corpus([[1, 2, 3]])
    for call in (lambda: corpus.read(0, 4), lambda: corpus.read(-1, 2)):
        with pytest.raises(IndexError):
            call()


def test_masks_cover_documents_without_one(make_corpus: Callable[..., Corpus]) -> None:
    corpus = make_corpus([[1, 2], [3, 4], [5, 6, 7]], masks=[None, [0, 1], None], at_once=1, shard_tokens=1000)
    assert corpus.mask(0, 7).tolist() == [True, True, False, True, True, True, True]


def test_folders_that_are_no_corpus_are_named(make_corpus: Callable[..., Corpus], tmp_path) -> None:
    with pytest.raises(UserError, match="nothing does not exist"):
        Corpus.open(tmp_path / "nothing")
    (tmp_path / "else").mkdir()
    with pytest.raises(UserError, match="else is not a prepared corpus"):
        Corpus.open(tmp_path / "else")
    for text, message in [("{", "not valid JSON"), ('{"a": 1}', "something else"), ("[]", "something else")]:
        (tmp_path / "else" / "manifest.json").write_text(text)
        with pytest.raises(UserError, match=message):
            Corpus.open(tmp_path / "else")
    corpus = make_corpus([[1, 2]])
    with pytest.raises(UserError, match="no split 'validation'; it has: train"):
        Corpus.open(corpus.folder, "validation")
    tree = json.loads((corpus.folder / "manifest.json").read_text())
    (corpus.folder / "manifest.json").write_text(json.dumps(tree | {"version": 99}))
    with pytest.raises(UserError, match="format version 99"):
        Corpus.open(corpus.folder)


@pytest.mark.parametrize("kind", ["tokens", "documents", "mask"])
def test_damaged_files_are_named(make_corpus: Callable[..., Corpus], kind: str) -> None:
    corpus = make_corpus([[1, 2, 3], [4, 5]], masks=[[0, 1, 1], [0, 1]])
    path = corpus.folder / f"train-00000.{kind}"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(UserError, match=f"train-00000.{kind} is cut short: {len(content) - 1} bytes instead of"):
        Corpus.open(corpus.folder)
    path.unlink()
    with pytest.raises(UserError, match=f"train-00000.{kind} is missing"):
        Corpus.open(corpus.folder)
    middle = len(content) // 2
    path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    with pytest.raises(UserError, match=f"train-00000.{kind} is damaged"):
        Corpus.open(corpus.folder).verify()


def test_a_manifest_may_not_point_outside(make_corpus: Callable[..., Corpus]) -> None:
    corpus = make_corpus([[1, 2, 3]])
    manifest = corpus.folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace("train-00000.tokens", "../../secret"))
    with pytest.raises(UserError, match="leads out of"):
        Corpus.open(corpus.folder)


def test_another_tokenizer_is_refused(make_corpus: Callable[..., Corpus]) -> None:
    corpus = make_corpus([[1, 2, 3]], fingerprint="a" * 64)
    corpus.check_tokenizer(SimpleNamespace(fingerprint="a" * 64))
    with pytest.raises(UserError, match="another tokenizer than models/x has"):
        corpus.check_tokenizer(SimpleNamespace(fingerprint="b" * 64), whose="models/x")
