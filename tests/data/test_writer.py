"""Shards: continued after a cut, the same however documents arrive."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.data.shards import SplitRecord
from treadle.data.writer import SplitState, SplitWriter, TokenizedDocuments


def batch(
    documents: list[list[int]], masks: list[list[int]] | None = None, continues: bool = False
) -> TokenizedDocuments:
    flat = np.array([token for document in documents for token in document], np.uint16)
    mask = None if masks is None else np.array([bit for m in masks for bit in m], np.uint8)
    lengths = np.array([len(document) for document in documents], np.int64)
    return TokenizedDocuments(flat, lengths, mask, continues, len(flat), len(documents))


def read(folder: Path, record: SplitRecord) -> list[tuple[list[list[int]], list[int] | None]]:
    """Return each shard's documents and mask, read without our reader."""
    shards = []
    for shard in record.shards:
        tokens = np.fromfile(folder / shard.files["tokens"].name, "<u2")
        starts = np.fromfile(folder / shard.files["documents"].name, "<i8").tolist()
        mask = np.fromfile(folder / shard.files["mask"].name, np.uint8).tolist() if "mask" in shard.files else None
        shards.append(([tokens[a:b].tolist() for a, b in itertools.pairwise(starts)], mask))
    return shards


documents = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=12), min_size=1, max_size=30)


@given(documents, st.integers(1, 40), st.data())
@settings(max_examples=60, deadline=None)
def test_shards_depend_on_the_documents_alone(tmp_path_factory, found, shard_tokens: int, data) -> None:
    """However the documents are batched, split into parts, and however often the writing is cut off and continued."""
    whole, folder = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("cut")
    writer = SplitWriter(whole, "train", "uint16", shard_tokens)
    for document in found:
        writer.add(batch([document]))
    expected = writer.finish()
    assert [d for shard, _ in read(whole, expected) for d in shard] == found
    assert all(shard.tokens >= shard_tokens for shard in expected.shards[:-1])
    assert expected.learnt == sum(len(d) - 1 for d in found)

    writer, state = SplitWriter(folder, "train", "uint16", shard_tokens), SplitState()
    first, begun = 0, 0  # documents before `first` are written, and `begun` tokens of that one
    place = (0, 0)
    while first < len(found):
        action = data.draw(st.sampled_from(["add", "part", "sync", "lose"]))
        if action == "sync":
            state, place = writer.sync(), (first, begun)
        elif action == "lose":
            writer.abandon()
            writer = SplitWriter(folder, "train", "uint16", shard_tokens, state)
            first, begun = place
        elif action == "part" and len(found[first]) - begun > 1:
            end = data.draw(st.integers(begun + 1, len(found[first]) - 1))
            writer.add(batch([found[first][begun:end]], continues=begun > 0))
            begun = end
        else:
            last = data.draw(st.integers(first + 1, len(found)))
            writer.add(batch([found[first][begun:], *found[first + 1 : last]], continues=begun > 0))
            first, begun = last, 0
    # Words count the calls here, not the text.
    assert writer.finish().model_copy(update={"words": 0}) == expected.model_copy(update={"words": 0})


def test_a_mask_begins_with_the_first_chat(tmp_path: Path) -> None:
    writer = SplitWriter(tmp_path, "train", "uint16", 1000)
    writer.add(batch([[1, 2], [3]]))
    writer.add(batch([[4, 5, 6]], masks=[[0, 1, 1]]))
    state = writer.sync()
    writer.abandon()
    writer = SplitWriter(tmp_path, "train", "uint16", 1000, state)
    writer.add(batch([[7]]))
    record = writer.finish()
    assert read(tmp_path, record) == [([[1, 2], [3], [4, 5, 6], [7]], [1, 1, 1, 0, 1, 1, 1])]
    assert record.learnt == 3


@pytest.mark.parametrize("size", [0, 1])
def test_nothing_written_is_no_shard(tmp_path: Path, size: int) -> None:
    writer = SplitWriter(tmp_path, "train", "uint16", 10, SplitState())
    assert writer.finish().shards == []
    assert list(tmp_path.iterdir()) == []
