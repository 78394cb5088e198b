"""Whatever a model's logits are, an answer that keeps to its grammar is what the grammar says."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from tests.serve.tiny import TEXT, TOKENS
from treadle.config import TreadleError, UserError
from treadle.model.tokenizer import Tokenizer
from treadle.serve.request import Grammar
from treadle.serve.structured import Matcher, compile_grammar

PADDED = TOKENS + 21  # rows of the logits that no token has


def byte_level() -> Tokenizer:
    return Tokenizer.train([TEXT] * 4, TOKENS)


def byte_fallback() -> Tokenizer:
    """Like Llama 2's: words begin with a blank, other characters are bytes, and a text gets a blank before it."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *'abcdef0123456789{}[]",:']
    merges = [("\u2581", "a"), ("{", '"'), ("a", "b"), ("\u2581", "{")]
    vocabulary = {name: index for index, name in enumerate([*names, *("".join(pair) for pair in merges)])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend, bos_token="<s>", eos_token="</s>")


TOKENIZERS = {"byte level": byte_level(), "byte fallback": byte_fallback()}


def compiled(kind: Any, text: str, tokenizer: Tokenizer = TOKENIZERS["byte level"], **more: Any) -> Matcher:
    return compile_grammar(Grammar(kind=kind, text=text, **more), tokenizer, PADDED)


def answer(
    matcher: Matcher, tokenizer: Tokenizer, chance: random.Random, patience: int = 80, rows: int = PADDED
) -> str | None:
    """Return what a model of random logits says within the grammar, None where it does not come to an end.

    Once its patience is over it likes the ends of texts, lists and objects.
    """
    generator = torch.Generator().manual_seed(chance.getrandbits(32))
    said: list[int] = []
    closing = [index for end in '"}]0' if (index := tokenizer.token_to_id(end)) is not None]
    for count in range(600):
        if matcher.finished:
            break
        logits = torch.randn(rows, generator=generator) * 3
        if count > patience:
            logits[closing] += 20
            logits[list(tokenizer.eos_ids)] += 40
        matcher.mask(logits)
        token = int(torch.argmax(logits))
        assert logits[token] > -torch.inf
        assert matcher.accept(token)
        if token in tokenizer.eos_ids:
            break
        said.append(token)
    else:
        return None
    return tokenizer.decode(said, skip_special_tokens=False)


NAMES = st.sampled_from(["a", "b c", "é", '"', "x/y", "name", "東"])
PATTERNS = ["^[a-z]{2,4}$", "^a{1,3}b", "^(x|yz)*$", "^[0-9]{3}-[0-9]{2}$"]
SCALARS = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    st.tuples(st.integers(-50, 50), st.integers(0, 300)).map(
        lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[0] + pair[1]}
    ),
    st.just({"type": "number", "minimum": -1.5, "exclusiveMaximum": 20}),
    st.integers(0, 8).map(lambda most: {"type": "string", "maxLength": most}),
    st.sampled_from(PATTERNS).map(lambda pattern: {"type": "string", "pattern": pattern}),
    st.sampled_from(["uuid", "ipv4"]).map(lambda name: {"type": "string", "format": name}),
    st.lists(NAMES | st.integers(-3, 3) | st.none(), min_size=1, max_size=4).map(lambda some: {"enum": some}),
    st.just({"const": {"a": [1, "\u6771"]}}),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def as_object(parts: dict[str, Any], needed: list[bool]) -> dict[str, Any]:
        required = [name for name, need in zip(parts, needed, strict=False) if need]
        return {"type": "object", "properties": parts, "required": required, "additionalProperties": False}

    lists = st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
        lambda given: {"type": "array", "items": given[0], "minItems": given[1], "maxItems": given[1] + given[2]}
    )
    objects = st.builds(as_object, st.dictionaries(NAMES, inner, max_size=3), st.lists(st.booleans(), max_size=3))
    return lists | objects | st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some})


SCHEMAS = st.recursive(SCALARS, containers, max_leaves=6)


@pytest.mark.parametrize("which", list(TOKENIZERS))
@settings(max_examples=40, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 1 << 32))
def test_random_answers_validate(which: str, schema: dict[str, Any], seed: int) -> None:
    tokenizer = TOKENIZERS[which]
    text = answer(compiled("json_schema", json.dumps(schema), tokenizer), tokenizer, random.Random(seed))
    assert text is not None, "every schema here is bounded"
    jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())


@settings(max_examples=40, deadline=None)
@given(
    pattern=st.recursive(
        st.sampled_from(["a", "[bc]", "[0-9]", "é", "東?", "x{2,3}", "/", "\\.", "[^a-z]", '"']),
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3).map("".join),
            st.lists(inner, min_size=1, max_size=3).map(lambda some: f"({'|'.join(some)})"),
            inner.map(lambda one: f"({one}){{0,3}}"),
        ),
        max_leaves=8,
    ),
    seed=st.integers(0, 1 << 32),
)
def test_random_answers_match(pattern: str, seed: int) -> None:
    tokenizer = TOKENIZERS["byte level"]
    text = answer(compiled("regex", pattern), tokenizer, random.Random(seed))
    assert text is not None and re.fullmatch(pattern, text), text


def test_json_objects_and_choices_and_grammars() -> None:
    tokenizer = TOKENIZERS["byte level"]
    for seed in range(5):
        chance = random.Random(seed)
        said = answer(compiled("json_object", ""), tokenizer, chance)
        assert said is None or isinstance(json.loads(said), dict)
        choices = ["yes", "yes, but", 'a "quoted" one\n', "東京\\"]
        assert answer(compiled("choice", json.dumps(choices)), tokenizer, chance) in choices
        lark = 'start: "(" sum ")"\nsum: NUMBER ("+" NUMBER){0,3}\nNUMBER: /[1-9][0-9]{0,3}/'
        said = answer(compiled("grammar", lark), tokenizer, chance)
        assert said is not None and re.fullmatch(r"\([1-9]\d{0,3}(\+[1-9]\d{0,3}){0,3}\)", said)


def test_blanks_come_to_an_end() -> None:
    """A model that says nothing but blanks is made to go on."""
    tokenizer = TOKENIZERS["byte level"]
    matcher = compiled("json_schema", '{"type": "array", "items": {"const": 1}, "minItems": 1}')
    assert matcher.accept(tokenizer.encode("[", special_tokens=False)[0])
    (blank,) = tokenizer.encode("\n", special_tokens=False)
    assert sum(matcher.accept(blank) for _ in range(200)) == 1


@pytest.mark.parametrize("opened", [True, False])
def test_a_reasoning_block_comes_first(opened: bool) -> None:
    tokenizer = TOKENIZERS["byte level"]
    markers = {"reasoning_end": "</think>"} | ({} if opened else {"reasoning_start": "<think>"})
    text = ("" if opened else "<think>") + "let me <b>see</b>\n</think>\n\n"
    for end in ("yes", "no"):
        matcher = compiled("regex", "yes|no", **markers)
        for token in tokenizer.encode(text + end, special_tokens=False):
            assert not matcher.may_end and matcher.accept(token)
        assert matcher.finished
    for wrong in ("maybe", "<think>") if opened else ("maybe", "</think>"):
        matcher = compiled("regex", "yes|no", **markers)
        ids = tokenizer.encode(text + wrong, special_tokens=False)
        assert not all(matcher.accept(token) for token in ids)
    assert compiled("regex", "yes|no", reasoning_start="<think>", reasoning_end="</think>").accept(
        tokenizer.encode("y", special_tokens=False)[0]
    ), "it need not reason"


def test_masks_name_exactly_what_is_accepted() -> None:
    tokenizer = TOKENIZERS["byte level"]
    matcher = compiled("json_schema", '{"type": "object", "properties": {"a": {"type": "string"}}}')
    for place in range(12):
        logits, words = torch.zeros(PADDED), torch.full(((PADDED + 31) // 32,), -1, dtype=torch.int32)
        matcher.mask(logits)
        matcher.fill_mask(words)
        allowed = {index for index in range(PADDED) if logits[index] == 0}
        assert allowed == {index for index in range(32 * len(words)) if int(words[index // 32]) >> index % 32 & 1}
        assert allowed and max(allowed) < tokenizer.vocabulary_size
        accepted = set()
        for index in range(PADDED):
            twin = matcher.clone()
            if twin.accept(index):
                accepted.add(index)
        # A text that is forced is allowed only as the tokenizer would write it, though other ways are accepted.
        assert allowed <= accepted
        assert bool(allowed & set(tokenizer.eos_ids)) == matcher.may_end
        if matcher.finished:
            break
        going_on = sorted(allowed - set(tokenizer.eos_ids))
        assert matcher.accept(going_on[place % len(going_on)])


def test_tokens_are_taken_back() -> None:
    tokenizer = TOKENIZERS["byte level"]
    matcher = compiled("choice", '["yes", "no"]')
    yes = [tokenizer.encode(letter, special_tokens=False)[0] for letter in "yes"]
    for _ in range(2):
        assert all(map(matcher.accept, yes)) and matcher.finished and matcher.may_end
        assert not matcher.accept(yes[0])
        assert matcher.accept(tokenizer.eos_ids[0])
        matcher.rollback(4)
        assert not matcher.finished and not matcher.may_end
    twin = matcher.clone()
    assert twin.accept(yes[0]) and matcher.accept(tokenizer.encode("n", special_tokens=False)[0])


def test_a_tokenizer_without_an_end_token() -> None:
    bare = Tokenizer(TOKENIZERS["byte level"].backend)
    matcher = compile_grammar(Grammar(kind="regex", text="ab"), bare, PADDED)
    for letter in "ab":
        logits = torch.zeros(PADDED)
        matcher.mask(logits)
        assert 0 < int((logits == 0).sum()) <= 2 and matcher.accept(bare.encode(letter, special_tokens=False)[0])
    assert matcher.finished
    with pytest.raises(TreadleError, match="nothing can follow"):
        matcher.mask(torch.zeros(PADDED))


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("json_schema", "false", "schema is false"),
        ("json_schema", "{", "refused"),
        ("json_schema", "[]", "a JSON schema is an object"),
        ("json_schema", '{"type": "strin"}', "strin"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"uniqueItems": true, "x-guidance": {"lenient": true}}', "uniqueItems"),
        ("json_schema", '{"type": "string", "minLength": 3, "maxLength": 2}', "minLength"),
        ("json_schema", '{"enum": []}', "refused"),
        ("json_schema", '{"$ref": "#/$defs/none"}', "none"),
        ("json_schema", '{"$ref": "https://example.com/schema"}', "example.com"),
        ("json_schema", '{"$ref": "#"}', "without end"),
        ("json_schema", '{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}', "without end"),
        ("json_schema", '{"type": "object", "minProperties": 3}', "minProperties=3"),
        ("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000, "nested"),
        ("json_schema", '{"items":' * 200 + "{}" + "}" * 200, "recursion limit"),
        ("regex", "(", "unclosed group"),
        ("regex", "a(?=b)", "look-ahead"),
        ("regex", "a[^\\s\\S]", "impossible"),
        ("regex", "(" * 5000 + "a" + ")" * 5000, "nested"),
        ("grammar", "start: x", "unknown name"),
        ("grammar", "", "refused"),
        ("grammar", 'start: "a" start', "without end"),
        ("grammar", 'start: a | b\na: "x" b\nb: ("y" | "z") a+', "without end"),
        ("choice", "[]", "at least one"),
        ("choice", '"yes"', "at least one"),
        ("choice", "[1]", "at least one"),
        ("choice", json.dumps(list(map(str, range(10_001)))), "10001 choices"),
    ],
)  # fmt: skip
def test_what_no_answer_can_keep_to_is_refused(kind: str, text: str, words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)) as error:
        compiled(kind, text)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_an_endless_rule_beside_one_that_ends_is_no_fault() -> None:
    compiled("grammar", 'start: "a" start | "b"')
    compiled("grammar", 'start: ("a" start)?')
    compiled("json_schema", '{"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}')
    tree = {"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}
    compiled("json_schema", json.dumps(tree))
