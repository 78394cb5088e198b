"""Tokens from a GGUF file against Transformers, llama.cpp's rules in plain Python, and sentencepiece."""

import itertools
import random
import time
import unicodedata
from functools import cache

import numpy as np
import pytest
import regex
from tokenizers import pre_tokenizers

from tests.weights.gguf_files import smollm2, write
from treadle.config import UserError
from treadle.model.tokenizer import Tokenizer, check_vocabulary
from treadle.model.tokenizer_stream import byte_of_character
from treadle.weights.gguf import GgufFile
from treadle.weights.gguf_tokenizer import SPLITS, gguf_tokenizer

CODE = 'def f(x, *args):\n    """Doc."""\n\tif x != 3.14e-10 and "é" in x:\r\n        return {k: v[:-1]}\n\n\n'
SCRIPTS = [(0x20, 0x7E), (0xA0, 0x24F), (0x370, 0x3FF), (0x400, 0x4FF), (0x590, 0x6FF), (0x900, 0x97F), (0xE00, 0xE7F)]
SCRIPTS += [(0x2000, 0x206F), (0x300, 0x36F), (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x1F300, 0x1FAFF)]
SCRIPTS += [(0x2070, 0x218F), (0x2460, 0x24FF), (0x10000, 0x100FF), (0x1D7CE, 0x1D7FF), (0x660, 0x669), (0, 0x1F)]
WORDS = [
    "the",
    "it's",
    "WE'LL",
    "naïve",
    "Straße",
    "don't",
    "3rd",
    "HTTPServer",
    "snake_case",
    "日本語",
    "العربية",
    "👩‍👩‍👧‍👦",
]


@cache
def mixed_text(size: int, digits: bool = True) -> str:
    """Text of many scripts, with emoji, code, runs of whitespace and digits; the same at each call."""
    draw, parts, length = random.Random(7), [], 0
    while length < size:
        low, high = draw.choice(SCRIPTS)
        word = "".join(chr(draw.randint(low, high)) for _ in range(draw.randint(1, 9)))
        parts.append(draw.choice([word, word, draw.choice(WORDS), CODE]))
        blank = draw.choice(
            [" ", " ", "  ", "\n", "\t", "", " " * draw.randint(1, 20), "\r\n", "\n\n\n", " \n ", "\u3000"]
        )
        parts.append(blank)
        parts.append(str(draw.randint(0, 10 ** draw.randint(1, 9))) if draw.random() < 0.3 else "")
        length += sum(map(len, parts[-3:]))
    text = "".join(parts)[:size]
    return text if digits else regex.sub(r"\p{N}", "", text)


@pytest.fixture(scope="module")
def ours():
    return gguf_tokenizer(GgufFile.open(smollm2()))


@pytest.fixture(scope="module")
def theirs():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(smollm2().parent), gguf_file=smollm2().name)


def test_smollm2_equals_transformers_on_a_megabyte(ours, theirs):
    """Without digits, where Transformers' reading of this file departs from the model: see the next test."""
    text = mixed_text(1_000_000, digits=False)
    assert len(text.encode()) > 1_000_000
    assert ours.encode(text, special_tokens=False) == theirs.encode(text, add_special_tokens=False)


def test_smollm2_equals_transformers_on_digits_once_it_splits_them_off(ours, theirs):
    """SmolLM's tokenizer.json cuts each digit off before GPT-2's split; Transformers' GGUF reader does not know
    tokenizer.ggml.pre = smollm and leaves that step out. That it belongs there shows in the vocabulary: no token has a
    digit and anything else in it, not even " 1", the most frequent of all where digits stay with the space before them.
    So the two differ where blanks stand before a number, and are equal once Transformers takes that step too.
    """
    text = mixed_text(1_000_000)
    mine = ours.encode(text, special_tokens=False)
    assert theirs.encode("  1", add_special_tokens=False) != ours.encode("  1", special_tokens=False)
    digit = regex.compile(r"[0-9]")
    assert {token for token in theirs.get_vocab() if digit.search(token)} == set("0123456789")
    backend = theirs._tokenizer
    before = backend.pre_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    try:
        assert mine == theirs.encode(text, add_special_tokens=False)
    finally:
        backend.pre_tokenizer = before
    kept = regex.sub(r"[\x00-\x08\x0b-\x1f]", "", text)  # it has no token for some control bytes
    assert ours.decode(ours.encode(kept)) == kept


def test_smollm2_equals_transformers_from_the_directory_we_save(ours, tmp_path):
    from transformers import AutoTokenizer

    ours.save(tmp_path)
    theirs, again = AutoTokenizer.from_pretrained(str(tmp_path)), Tokenizer.load(tmp_path)
    text = mixed_text(200_000) + "<|im_start|>user\n<|im_end|>"
    assert ours.encode(text) == theirs.encode(text) == again.encode(text)
    assert (theirs.chat_template, theirs.bos_token_id, theirs.eos_token_id) == (ours.chat_template, 1, 2)
    assert again.fingerprint == ours.fingerprint and again.eos_ids == ours.eos_ids == (2,)
    assert len(theirs) == ours.vocabulary_size == 49152
    assert check_vocabulary(ours, 49152) is None


# llama.cpp's patterns (llama-vocab.cpp), cut by one after the other; what a pattern leaves between matches stays whole.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
CASELESS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|"
REST = r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SIGNS = r"| ?[^\s\p{L}\p{N}]+"
UPPER, LOWER = r"((?=[\p{L}])([^a-z]))", r"((?=[\p{L}])([^A-Z]))"
LLAMA_CPP = {
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
    "llama-bpe": [CASELESS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + SIGNS + REST],
    "deepseek-r1-qwen": [CASELESS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + SIGNS + REST],
    "tekken": [
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}"
        + SIGNS
        + REST.replace(r"[\r\n]*", r"[\r\n/]*", 1)
    ],
}


def by_hand(text, patterns, vocabulary, merges, whole_words):
    """Byte-level BPE in plain Python: split, then always merge the pair of lowest rank."""
    pieces = [text]
    for pattern in patterns:
        cut = []
        for piece in pieces:
            place = 0
            for match in regex.finditer(pattern, piece):
                cut += [piece[place : match.start()], match.group()]
                place = match.end()
            cut.append(piece[place:])
        pieces = [piece for piece in cut if piece]
    spelling = {byte: character for character, byte in byte_of_character().items()}
    return [
        index
        for piece in pieces
        for index in bpe("".join(spelling[b] for b in piece.encode()), vocabulary, merges, whole_words)
    ]


def bpe(word, vocabulary, merges, whole_words):
    if whole_words and word in vocabulary:
        return [vocabulary[word]]
    parts = [character for character in word if character in vocabulary]  # SmolLM2 lacks some control bytes
    while len(parts) > 1:
        rank, place = min((merges.get(pair, 1 << 60), place) for place, pair in enumerate(itertools.pairwise(parts)))
        if rank == 1 << 60:
            break
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return [vocabulary[part] for part in parts]


@pytest.mark.parametrize("pre", LLAMA_CPP)
def test_each_split_equals_llama_cpp_in_plain_python(tmp_path, pre):
    """SmolLM2's vocabulary and merges under each pre-tokenizer's name, cut and merged by two programs."""
    file = GgufFile.open(smollm2())
    keys = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}
    tokens, merges = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.merges"]
    path = write(tmp_path / "a.gguf", {**keys, "tokenizer.ggml.pre": pre})
    tokenizer = gguf_tokenizer(GgufFile.open(path))
    # The libraries know different versions of Unicode, and Python takes four control characters for blanks.
    text = "".join(c for c in mixed_text(60_000) if unicodedata.category(c) != "Cn" and c not in "\x1c\x1d\x1e\x1f")
    if pre == "tekken":  # its case classes in llama.cpp are an approximation that holds for ASCII letters
        text = regex.sub(r"[^\x00-\x7f]", "", text)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
    found = by_hand(text, LLAMA_CPP[pre], vocabulary, ranks, SPLITS[pre].whole_words)
    assert tokenizer.encode(text, special_tokens=False) == found


def test_qwen2_composes_characters_as_its_tokenizer_json_does(tmp_path):
    from transformers import Qwen2Tokenizer

    keys = {key: value for key, value in GgufFile.open(smollm2()).metadata.items() if key.startswith("tokenizer.")}
    ours = gguf_tokenizer(GgufFile.open(write(tmp_path / "a.gguf", {**keys, "tokenizer.ggml.pre": "qwen2"})))
    theirs = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(keys["tokenizer.ggml.tokens"])},
        merges=[tuple(merge.split(" ")) for merge in keys["tokenizer.ggml.merges"]],
    )
    text = mixed_text(300_000) + "e\u0301 A\u030a"
    assert ours.encode(text, special_tokens=False) == theirs.encode(text, add_special_tokens=False)


def test_opening_the_file_and_its_tokenizer_is_quick():
    """Processor time, which other work on the machine leaves alone: 0.1 s."""
    started = time.process_time()
    gguf_tokenizer(GgufFile.open(smollm2()))
    assert time.process_time() - started < 1.0


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory):
    """A real sentencepiece BPE with byte fallback, trained here, and the keys that llama.cpp makes of it."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("spm")
    (folder / "text").write_text("\n".join([CODE.replace("\n", " ") + " ".join(WORDS)] * 300 + [mixed_text(6_000)]))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "m"),
        vocab_size=540,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        control_symbols=["[INST]"],
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(str(folder / "m.model"))
    kinds = []
    for index in range(model.vocab_size()):
        kinds.append(
            2 if model.is_unknown(index) else 3 if model.is_control(index) else 6 if model.is_byte(index) else 1
        )
    keys = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(index) for index in range(model.vocab_size())],
        "tokenizer.ggml.scores": [float(model.get_score(index)) for index in range(model.vocab_size())],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return model, keys


def test_llama_vocabulary_equals_sentencepiece(sentencepiece_model, tmp_path):
    model, keys = sentencepiece_model
    tokenizer = gguf_tokenizer(GgufFile.open(write(tmp_path / "a.gguf", keys)))
    for text in [mixed_text(60_000).replace("\0", ""), "  two blanks", "", "a", " ", "\n", "x" * 3000]:
        assert tokenizer.encode(text) == [1, *model.encode(text)]
        if text.strip():
            assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<s>[INST] a")[:2] == [1, model.piece_to_id("[INST]")]
    assert tokenizer.encode("</s>a", parse_special=False)[1] != 2
    assert tokenizer.eos_ids == (2,) and tokenizer.bos_id == 1 and tokenizer.unk_id == 0


def test_gemma_vocabulary_equals_transformers(sentencepiece_model, tmp_path):
    """No space in front, runs of spaces written as spaces, merges by the order of the tokens."""
    from transformers import AutoTokenizer

    _, keys = sentencepiece_model
    tokens = [
        token.replace("▁", " ") if not token.strip("▁") and len(token) > 1 else token
        for token in keys["tokenizer.ggml.tokens"]
    ]
    kinds = [4 if " " in token else kind for token, kind in zip(tokens, keys["tokenizer.ggml.token_type"], strict=True)]
    changed = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.add_space_prefix": False,
    }
    sizes = {"gemma3.block_count": 1, "gemma3.embedding_length": 32, "gemma3.attention.head_count": 2}
    path = write(
        tmp_path / "a.gguf",
        {**keys, **changed, **sizes},
        {"token_embd.weight": np.zeros((8, 32), np.float32)},
        "gemma3",
    )
    ours = gguf_tokenizer(GgufFile.open(path))
    theirs = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=path.name)
    text = mixed_text(60_000)
    assert ours.encode(text, special_tokens=False) == theirs.encode(text, add_special_tokens=False)
    assert ours.encode("a")[0] == 1


def handmade(**changes):
    keys = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["a", "b", "ab", "<|im_end|>", "<think>", "<|eot_id|>", "Ġ"],
        "token_type": [1, 1, 1, 3, 4, 3, 1],
        "merges": ["a b"],
        "eos_token_id": 3,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


def read(tmp_path, keys):
    return gguf_tokenizer(GgufFile.open(write(tmp_path / "t.gguf", keys)))


def test_kinds_of_tokens_flags_and_templates(tmp_path):
    keys = handmade(bos_token_id=0, add_bos_token=True, add_eos_token=True, eot_token_id=5, padding_token_id=6)
    keys |= {"tokenizer.chat_template": "{{ '<|im_end|>' }}", "tokenizer.chat_template.tool_use": "t"}
    tokenizer = read(tmp_path, keys)
    assert tokenizer.encode("ab<|im_end|><think>") == [0, 2, 3, 4, 3]
    assert tokenizer.decode([2, 3, 4]) == "ab<think>"
    assert tokenizer.eos_ids == (3, 5) and tokenizer.pad_id == 6 and tokenizer.special_ids == {3, 5}
    assert tokenizer.chat_templates == {"default": "{{ '<|im_end|>' }}", "tool_use": "t"}
    assert read(tmp_path, handmade(eos_token_id=2)).eos_ids == (2,)
    chat = {"tokenizer.chat_template": "{{ '<|eot_id|>' }}"}
    assert read(tmp_path, handmade(eos_token_id=2) | chat).eos_ids == (2, 5)  # the template's own end of a turn


def test_bos_by_default(tmp_path):
    assert read(tmp_path, handmade(bos_token_id=0)).encode("b") == [1]
    assert read(tmp_path, handmade(bos_token_id=0, pre="llama-bpe")).encode("b") == [0, 1]
    assert read(tmp_path, handmade(bos_token_id=0, pre="llama-bpe", add_bos_token=False)).encode("b") == [1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "holds no tokenizer"),
        ({"tokens": None}, "holds no tokenizer"),
        ({"model": "t5"}, "tokenizers of type 't5' are not supported"),
        ({"model": 3}, "'tokenizer.ggml.model' is a int, not a str"),
        ({"pre": None}, "has no key 'tokenizer.ggml.pre'"),
        ({"pre": "smolllm"}, "the pre-tokenizer 'smolllm' is not known, did you mean 'smollm'"),
        ({"tokens": [1, 2]}, "'tokenizer.ggml.tokens' is not a list of texts"),
        ({"tokens": ["a", "b", "ab", "a", "x", "y", "z"]}, "has 'a' twice, as 0 and 3"),
        ({"token_type": [1, 1]}, "'tokenizer.ggml.token_type' is not a list of one number for each of the 7 tokens"),
        ({"merges": None}, "'tokenizer.ggml.merges' is not a list of texts"),
        ({"merges": ["ab"]}, r"has 'ab' \(item 0\), which is not two tokens"),
        ({"merges": ["a q"]}, "'tokenizer.ggml.merges' does not fit the tokens"),
        ({"merges": ["b a"]}, "'tokenizer.ggml.merges' does not fit the tokens"),
        ({"eos_token_id": 7}, "'tokenizer.ggml.eos_token_id' is 7, but there are 7 tokens"),
        ({"add_bos_token": 1}, "'tokenizer.ggml.add_bos_token' is a int, not a bool"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, changes, message):
    with pytest.raises(UserError, match=message) as caught:
        read(tmp_path, handmade(**changes))
    assert "t.gguf" in str(caught.value)
