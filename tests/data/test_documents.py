"""From bytes to tokens: decoding, records, chats, splits, BOS and EOS."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

import numpy as np
import pytest

from treadle.config import UserError
from treadle.data.documents import TokenizedBlock, TokenizeSettings, split_of, texts_of, threshold, tokenize
from treadle.data.reading import Piece
from treadle.model.tokenizer import Tokenizer

ALL_TRAIN = {"validation": 0.0}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["some words to learn, and more words; words"] * 3, 300)


def text(data: bytes, **fields) -> Piece:
    return Piece("text", fields.pop("name", "x.txt"), data, **fields)


def lines(*records: object, name: str = "x.jsonl") -> Piece:
    joined = b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in records)
    return Piece("lines", name, joined, record=10)


def decoded(block: TokenizedBlock, tokenizer: Tokenizer, split: str = "train") -> list[str]:
    found = block.splits[split]
    parts = np.split(found.tokens, np.cumsum(found.lengths)[:-1])
    return [tokenizer.decode(part.tolist(), skip_special_tokens=False) for part in parts]


def test_each_document_has_one_bos_and_one_eos_and_text_cannot_spell_them(tokenizer: Tokenizer) -> None:
    settings = TokenizeSettings(bos_id=tokenizer.bos_id, eos_id=tokenizer.eos_ids[0], **ALL_TRAIN)
    block = tokenize([text(b"one"), lines({"text": "<|eos|>two"})], settings, tokenizer)
    assert decoded(block, tokenizer) == ["<|bos|>one<|eos|>", "<|bos|><|eos|>two<|eos|>"]
    found = block.splits["train"]
    assert (found.tokens == tokenizer.bos_id).sum() == (found.tokens == tokenizer.eos_ids[0]).sum() == 2
    assert found.mask is None
    assert (found.text_bytes, found.words) == (13, 2)


def test_parts_of_a_document_are_one_document(tokenizer: Tokenizer) -> None:
    settings = TokenizeSettings(bos_id=tokenizer.bos_id, eos_id=tokenizer.eos_ids[0], **ALL_TRAIN)
    digest = hashlib.sha256(b"whatever").hexdigest()
    parts = [
        text(b"a b\n", more=True, digest=digest),
        text(b"c d\n", continues=True, more=True, digest=digest),
        text(b"e", continues=True, digest=digest),
    ]
    assert decoded(tokenize(parts, settings, tokenizer), tokenizer) == ["<|bos|>a b\nc d\ne<|eos|>"]
    middle = tokenize([parts[1], text(b"other")], settings, tokenizer)
    assert middle.splits["train"].continues
    assert decoded(middle, tokenizer) == ["c d\n", "<|bos|>other<|eos|>"]


@pytest.mark.parametrize("policy", ["replace", "skip", "error"])
def test_invalid_utf8_is_counted_and_treated_as_chosen(tokenizer: Tokenizer, policy: str) -> None:
    settings = TokenizeSettings(invalid_utf8=policy, **ALL_TRAIN)
    pieces = [text(b"good"), text(b"caf\xe9", name="bad.txt")]
    if policy == "error":
        with pytest.raises(UserError, match=r"bad.txt is not valid UTF-8 \(byte 0xe9 at 3\); .*--invalid-utf8"):
            tokenize(pieces, settings, tokenizer)
        return
    block = tokenize(pieces, settings, tokenizer)
    assert decoded(block, tokenizer) == (["good", "caf\ufffd"] if policy == "replace" else ["good"])
    assert (block.counts.invalid_utf8, block.counts.names) == (1, {"invalid_utf8": ["bad.txt"]})


def test_half_a_surrogate_pair_in_json_is_invalid_utf8(tokenizer: Tokenizer) -> None:
    block = tokenize([lines(rb'{"text": "half \ud83d of it"}')], TokenizeSettings(**ALL_TRAIN), tokenizer)
    assert decoded(block, tokenizer) == ["half \ufffd\ufffd\ufffd of it"]
    assert block.counts.names == {"invalid_utf8": ["x.jsonl line 11"]}
    chat = rb'{"messages": [{"role": "user", "content": "\ud83d"}, {"role": "assistant", "content": "no \ud83d"}]}'
    (said,) = decoded(tokenize([lines(chat)], TokenizeSettings(**ALL_TRAIN), tokenizer), tokenizer)
    assert "no \ufffd\ufffd\ufffd<|im_end|>" in said
    with pytest.raises(UserError, match=r"line 11 is not valid UTF-8"):
        tokenize([lines(chat)], TokenizeSettings(invalid_utf8="error"), tokenizer)


def test_a_mark_of_byte_order_is_no_text_and_empty_documents_are_left_out(tokenizer: Tokenizer) -> None:
    pieces = [text("\ufeffmarked".encode()), text(b""), text(b" \n\t"), lines({"text": ""}, {"text": None})]
    pieces.append(Piece("lines", "y.jsonl", b'\xef\xbb\xbf{"text": "as well"}\r\n'))
    block = tokenize(pieces, TokenizeSettings(**ALL_TRAIN), tokenizer)
    assert decoded(block, tokenizer) == ["marked", "as well"]
    assert block.counts.empty == 4


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (b'{"text": ', "x.jsonl line 12 is not valid JSON: "),
        ([1], "x.jsonl line 12 is JSON, but not an object with a field 'text'"),
        ({"txt": "a"}, r"x.jsonl line 12 has no field 'text', did you mean 'txt'\?"),
        ({"body": "a", "n": 1}, "x.jsonl line 12 has no field 'text'; its text fields are body: choose one"),
        ({"text": 5}, "x.jsonl line 12: the field 'text' is a int, not a text"),
        ({"messages": []}, "x.jsonl line 12: the chat is not a list of messages"),
        ({"conversations": [{"who": "me"}]}, "x.jsonl line 12: a message has neither"),
        (b"[" * 100_000, "x.jsonl line 12 is not valid JSON"),
    ],
)
def test_bad_records_are_named_or_skipped(tokenizer: Tokenizer, record: object, message: str) -> None:
    piece = lines({"text": "good"}, record)
    with pytest.raises(UserError, match=message):
        tokenize([piece], TokenizeSettings(**ALL_TRAIN), tokenizer)
    block = tokenize([piece], TokenizeSettings(bad_records="skip", **ALL_TRAIN), tokenizer)
    assert decoded(block, tokenizer) == ["good"]
    assert (block.counts.bad_records, block.counts.names) == (1, {"bad_records": ["x.jsonl line 12"]})


def test_both_forms_of_a_chat_learn_the_answers_alone(tokenizer: Tokenizer) -> None:
    chat = [{"role": "user", "content": "some question"}, {"role": "assistant", "content": "the answer"}]
    sharegpt = [{"from": "human", "value": "some question"}, {"from": "gpt", "value": "the answer"}]
    block = tokenize([lines({"messages": chat}, {"conversations": sharegpt})], TokenizeSettings(**ALL_TRAIN), tokenizer)
    found = block.splits["train"]
    assert found.mask is not None
    first, second = np.split(found.tokens, [found.lengths[0]])
    assert first.tolist() == second.tolist()
    learnt = tokenizer.decode(first[found.mask[: len(first)] == 1].tolist(), skip_special_tokens=False)
    assert learnt == "the answer<|im_end|>"
    assert block.counts.chats == 2
    assert found.words == 8


def test_text_among_chats_is_learnt_whole(tokenizer: Tokenizer) -> None:
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    found = tokenize([text(b"plain"), lines({"messages": chat})], TokenizeSettings(**ALL_TRAIN), tokenizer).splits[
        "train"
    ]
    assert found.mask is not None
    assert found.mask[: found.lengths[0]].all()
    assert not found.mask[found.lengths[0] :].all()


def test_a_chat_needs_a_chat_template() -> None:
    plain = Tokenizer.train(["words"], 300, extra_special_tokens=())
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    for policy in ("error", "skip"):
        with pytest.raises(UserError, match=r"x.jsonl line 11 is a chat, but the tokenizer has no chat template"):
            tokenize([lines({"messages": chat})], TokenizeSettings(bad_records=policy), plain)


def test_the_split_is_decided_by_the_content_alone(tokenizer: Tokenizer) -> None:
    settings = TokenizeSettings(validation=0.3)
    contents = [f"document {n}" for n in range(400)]
    as_text = [text(content.encode(), name=f"{n}.txt") for n, content in enumerate(contents)]
    as_lines = [lines(*({"text": content, "n": n} for n, content in enumerate(reversed(contents))))]
    first, second = dict[str, str](), dict[str, str]()
    for found, pieces in ((first, as_text), (second, as_lines)):
        found.update({content: split for split, content in texts_of(pieces, settings)})
    assert first == second
    held_out = sum(split == "validation" for split in first.values())
    assert 85 < held_out < 155  # 120 expected, 9 the deviation
    block = tokenize(as_text, settings, tokenizer)
    assert len(block.splits["validation"].lengths) == held_out
    assert split_of(b"\xff" * 32, 0.999) == "train" and split_of(b"\0" * 32, 1e-9) == "validation"
    assert split_of(b"\0" * 32, 0.0) == "train"


def test_a_small_corpus_holds_out_the_document_of_the_smallest_hash() -> None:
    digests = [hashlib.sha256(bytes([n])).digest() for n in range(40)]
    read: list[bytes] = []

    def watched(found: list[bytes]) -> Iterator[bytes]:
        for digest in found:
            read.append(digest)
            yield digest

    share = threshold(1e-6, watched(digests))
    assert len(read) == 40
    assert [d for d in digests if split_of(d, share) == "validation"] == [min(digests)]
    assert threshold(1e-6, iter(reversed(digests))) == share
    # One document, even many times, stays in training.
    assert threshold(0.01, iter(digests[:1] * 5)) == 0.01
    assert threshold(0.0, iter(digests)) == 0.0
    # Where chance holds one out, that share is kept, and reading stops there.
    read.clear()
    assert threshold(0.3, watched(digests)) == 0.3
    assert len(read) == 1 + next(n for n, d in enumerate(digests) if split_of(d, 0.3) == "validation")
