import json
import string

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from treadle.config import UserError
from treadle.model.tokenizer import Tokenizer, check_vocabulary
from treadle.model.tokenizer_files import set_bos_eos

TEXTS = [
    "def main(arguments):\n    return [x ** 2 for x in range(1000)]\n" * 20,
    "The quick brown fox jumps over the lazy dog, isn't it? " * 20,
    "Größe Ñandú 日本語のテキスト مرحبا 😀👩‍👩‍👧 \u00a0\u2003\t\r\n  12345 ½²③",
]


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return Tokenizer.train(TEXTS, 330)


@pytest.fixture(scope="module")
def fallback() -> Tokenizer:
    """A small vocabulary of Llama 2's kind: '▁' for spaces, bytes where a character is missing, BOS in front."""
    vocab = {token: rank for rank, token in enumerate(["<unk>", "<s>", "</s>"])}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for character in "▁" + string.ascii_letters + string.digits + ".,!?é":
        vocab[character] = len(vocab)
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "▁")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    set_bos_eos(backend, "<s>", None)
    return Tokenizer(backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def auto(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_survive(trained, text):
    assert trained.decode(trained.encode(text)) == text
    assert trained.decode(np.array(trained.encode(text))) == text


def test_training_is_deterministic_and_compresses(trained):
    assert Tokenizer.train(TEXTS, 330).fingerprint == trained.fingerprint
    assert Tokenizer.train(TEXTS, 320).fingerprint != trained.fingerprint
    assert trained.vocabulary_size == 330
    assert len(trained.encode(TEXTS[0])) < len(TEXTS[0]) / 2


def test_training_names_what_is_wrong():
    with pytest.raises(UserError, match="no text"):
        Tokenizer.train([], 600)
    with pytest.raises(UserError, match="no text"):
        Tokenizer.train(["", ""], 600)
    with pytest.raises(UserError, match="below 261"):
        Tokenizer.train(TEXTS, 260)


@pytest.mark.parametrize("model_type", [None, "llama", "qwen3", "gemma2", "mistral"])
@pytest.mark.parametrize("which", ["trained", "fallback"])
def test_transformers_loads_what_is_saved(request, tmp_path, which, model_type):
    tokenizer = request.getfixturevalue(which)
    tokenizer.chat_templates.setdefault("default", "{{ messages[0]['content'] }}")
    tokenizer.save(tmp_path)
    if model_type:  # AutoTokenizer picks its class by the model's type as well
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    theirs, again = auto(tmp_path), Tokenizer.load(tmp_path)
    for text in [*TEXTS, "", " ", "  the  the", "<s>the", "a<|im_end|>b"]:
        ids = tokenizer.encode(text)
        assert again.encode(text) == ids
        assert tokenizer.encode(text, special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        if which == "trained" or not text.startswith("<s>"):  # Transformers adds a second BOS there
            assert theirs.encode(text) == ids
        assert again.decode(ids) == tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (
        tokenizer.bos_id,
        tokenizer.eos_ids[0],
        tokenizer.pad_id,
    )
    assert theirs.chat_template == tokenizer.chat_template == again.chat_template
    assert (again.fingerprint, again.eos_ids) == (tokenizer.fingerprint, tokenizer.eos_ids)
    assert len(theirs) == tokenizer.vocabulary_size


def test_one_bos_never_two(trained, fallback):
    for tokenizer in (trained, fallback):
        bos = tokenizer.bos_id
        for text in ["", "the", f"{tokenizer.bos_token}the", f"{tokenizer.bos_token}"]:
            assert tokenizer.encode(text).count(bos) == 1
            assert tokenizer.encode(text)[0] == bos
            assert tokenizer.encode_with_offsets(text)[0] == tokenizer.encode(text, special_tokens=False)
        assert bos not in tokenizer.encode("the", special_tokens=False)


def test_text_that_spells_a_special_token_is_text_where_asked(trained, fallback):
    for tokenizer in (trained, fallback):
        for token in (tokenizer.bos_token, tokenizer.eos_token):
            text = f"a{token}b".replace("|", "")
            ids = tokenizer.encode(text, special_tokens=False, parse_special=False)
            assert not tokenizer.special_ids & set(ids) - {tokenizer.unk_id}
        text = f"a{tokenizer.eos_token}b"
        assert tokenizer.eos_ids[0] in tokenizer.encode(text)
        assert tokenizer.eos_ids[0] not in tokenizer.encode(text, parse_special=False)
    text = "a<|eos|>b"
    assert trained.decode(trained.encode(text, parse_special=False)) == text


def test_only_bpe_reads_special_tokens_as_text():
    backend = Backend(models.Unigram([("<unk>", 0.0), ("</s>", 0.0), ("a", -1.0)], unk_id=0))
    backend.add_special_tokens(["</s>"])
    tokenizer = Tokenizer(backend, eos_token="</s>")
    assert tokenizer.encode("aa", parse_special=False) == [2, 2]
    with pytest.raises(UserError, match="spells the special token '</s>', which a Unigram tokenizer"):
        tokenizer.encode("a</s>", parse_special=False)


def test_batch_equals_one_by_one(trained):
    assert trained.encode_batch(TEXTS) == [trained.encode(text) for text in TEXTS]


def test_offsets_cover_the_text(trained):
    text = TEXTS[2]
    ids, offsets = trained.encode_with_offsets(text)
    assert ids == trained.encode(text, special_tokens=False)
    assert {place for start, end in offsets for place in range(start, end)} == set(range(len(text)))


@pytest.mark.parametrize("which", ["trained", "fallback"])
@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_stream_joined_equals_decode(request, which, skip, data):
    """Any ids at all: invalid bytes, cut characters, specials between bytes, ids that do not exist."""
    tokenizer = request.getfixturevalue(which)
    anything = st.integers(0, tokenizer.vocabulary_size + 5)
    ids = data.draw(
        st.one_of(
            st.lists(anything, max_size=40),
            st.text(max_size=20).map(tokenizer.encode),
            st.lists(st.integers(3, 262), max_size=12),
        )
    )
    stream = tokenizer.stream(skip_special_tokens=skip)
    pieces = [stream.push(index) for index in ids] + [stream.finish()]
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("which", ["trained", "fallback"])
def test_no_piece_cuts_a_character(request, which):
    tokenizer = request.getfixturevalue(which)
    text = "the 😀 日本 the"
    stream = tokenizer.stream()
    pieces = [stream.push(index) for index in tokenizer.encode(text)]
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)


def test_blanks_have_places_though_a_post_processor_trims_them():
    backend = Tokenizer.train(TEXTS, 330).backend
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    _, offsets = Tokenizer(backend).encode_with_offsets("a   fox")
    assert {place for start, end in offsets for place in range(start, end)} == set(range(7))


def test_unknown_decoder_still_streams_exactly():
    backend = Backend(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer = Tokenizer(backend)
    stream = tokenizer.stream()
    assert "".join([stream.push(0), stream.push(1), stream.push(0), stream.finish()]) == tokenizer.decode([0, 1, 0])


def test_surrogates_and_other_types_are_named(trained):
    with pytest.raises(UserError, match=r"text 1 .* lone surrogate U\+D800"):
        trained.encode_batch(["fine", "bad \ud800"])
    with pytest.raises(UserError, match="bytes, not a str"):
        trained.encode(b"bytes")


def test_vocabulary_that_does_not_match_the_embedding(trained):
    assert check_vocabulary(trained, 330) is None
    assert check_vocabulary(trained, 384) is None
    assert "never used" in check_vocabulary(trained, 5000)
    with pytest.raises(UserError, match="330 tokens but the embedding has 328 rows"):
        check_vocabulary(trained, 328)


def test_tokenizer_json_decides_bos_and_eos_not_the_older_flags(trained, tmp_path):
    trained.save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for add_bos in (True, False):
        for add_eos in (True, False):
            flags = {"add_bos_token": add_bos, "add_eos_token": add_eos}
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | flags))
            assert Tokenizer.load(tmp_path).encode("the fox") == auto(tmp_path).encode("the fox")


def test_tokens_that_only_the_configuration_lists(trained, tmp_path):
    trained.save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {"330": {"content": "<|tool|>", "special": True}}
    config["pad_token"] = "<|padding|>"
    config["additional_special_tokens"] = ["<|more|>"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer, theirs = Tokenizer.load(tmp_path), auto(tmp_path)
    text = "a<|tool|>b<|padding|><|more|>"
    assert tokenizer.encode(text) == theirs.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)
    assert tokenizer.pad_id == theirs.pad_token_id == 331
    config["added_tokens_decoder"] = {"700": {"content": "<|tool|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"'<\|tool\|>' the id 700 .* 330"):
        Tokenizer.load(tmp_path)


def test_end_tokens_of_the_generation_config(trained, tmp_path):
    trained.save(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7, 9], "temperature": 0.6}))
    assert Tokenizer.load(tmp_path).eos_ids == (1, 7, 9)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": "x"}))
    with pytest.raises(UserError, match=r"generation_config.json: eos_token_id"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "tokenizer.json is not a valid tokenizer"),
        ("tokenizer.json", '{"model": {"type": "Magic"}}', "tokenizer.json is not a valid tokenizer"),
        ("tokenizer_config.json", "[1]", "must hold a JSON object"),
        ("tokenizer_config.json", "\x00", "not valid JSON"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}', "key 'x', not an id"),
    ],
)
def test_broken_files_are_named(trained, tmp_path, name, content, message):
    trained.save(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        Tokenizer.load(tmp_path)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(UserError, match="is not a folder"):
        Tokenizer.load(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)


def sentencepiece_folder(folder, **options):
    import sentencepiece

    (folder / "text").write_text("\n".join(TEXTS).replace("\r\n  ", " ") * 3)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "tokenizer"),
        **{
            "vocab_size": 400,
            "model_type": "bpe",
            "byte_fallback": True,
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            "minloglevel": 2,
            **options,
        },
    )
    return sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))


def test_sentencepiece_model_without_tokenizer_json(tmp_path, capsys):
    """Compared with sentencepiece itself; no Transformers needed; what we save Transformers reads the same."""
    model = sentencepiece_folder(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert capsys.readouterr().err == ""
    tokenizer.save(tmp_path / "saved")
    theirs = auto(tmp_path / "saved")
    for text in [*TEXTS, "  two", "", "unseen: ŵ"]:
        assert tokenizer.encode(text) == [model.bos_id(), *model.encode(text)] == theirs.encode(text)
    assert tokenizer.eos_ids == (model.eos_id(),) and tokenizer.unk_id == model.unk_id()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False, "add_eos_token": True}))
    assert Tokenizer.load(tmp_path).encode("the fox") == [*model.encode("the fox"), model.eos_id()]


def test_other_old_files_go_through_transformers_and_this_is_said(trained, tmp_path, capsys):
    state = json.loads(trained.backend.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(state["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in state["merges"]))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    tokenizer = Tokenizer.load(tmp_path)
    assert "Transformers converts its older tokenizer files" in capsys.readouterr().err
    for text in TEXTS:
        assert tokenizer.encode(text) == auto(tmp_path).encode(text)


def test_old_files_that_are_not_what_they_seem(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"not a model at all")
    with pytest.raises(UserError, match=r"cannot be read .* add a tokenizer\.json"):
        Tokenizer.load(tmp_path)
