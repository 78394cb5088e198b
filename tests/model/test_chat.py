import datetime
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model.chat_templates import SPECIAL, TEMPLATES, make_tokenizers
from treadle.config import UserError
from treadle.model import chat_sandbox
from treadle.model.chat import encode_chat, render_chat
from treadle.model.tokenizer import Tokenizer

TURNS = [
    {"role": "user", "content": "What is the answer?  "},
    {"role": "assistant", "content": "\n It depends. 日本 😀"},
    {"role": "user", "content": "On what?"},
]
ANSWERED = [*TURNS, {"role": "assistant", "content": "The question."}]
SYSTEM = {"role": "system", "content": "Be brief."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "It's the weather, <b>now</b> & é",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
        },
    }
]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Zürich"}}}
WITH_TOOLS = [
    TURNS[0],
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "name": "weather", "content": "12 degrees"},
    {"role": "assistant", "content": "Cold."},
    {"role": "user", "content": "Thanks"},
]
THOUGHTFUL = [
    TURNS[0],
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."},
    TURNS[2],
    {"role": "assistant", "reasoning_content": "long thought", "content": "No."},
]


@pytest.fixture(scope="module")
def tokenizers():
    return make_tokenizers()


@pytest.fixture(scope="module")
def theirs(tokenizers, tmp_path_factory):
    """Each tokenizer as Transformers loads it from what we save."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("saved")
    found = {}
    for name, tokenizer in tokenizers.items():
        tokenizer.save(folder / name)
        found[name] = AutoTokenizer.from_pretrained(str(folder / name))
    return found


def chats(name):
    """(messages, further arguments) that the template takes."""
    yield TURNS, {}
    yield ANSWERED, {}
    if TEMPLATES[name][4]:
        yield [SYSTEM, *TURNS], {}
    if name in ("llama 3.1", "mistral tools", "qwen 2.5", "qwen 3"):
        yield WITH_TOOLS, {"tools": TOOLS}
    if name == "llama 3.1":
        yield TURNS, {"tools": TOOLS, "tools_in_user_message": True, "date_string": "1 Jan 2026"}
    if name == "qwen 3":
        yield THOUGHTFUL, {}
        yield TURNS, {"enable_thinking": False}
        yield THOUGHTFUL[:2], {}
    if name == "gemma 3":
        yield [{"role": "user", "content": [{"type": "text", "text": " a "}, {"type": "text", "text": "b"}]}], {}
    if name == "generation":
        yield [{"role": "note", "content": "x"}, *ANSWERED], {}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_text_and_ids_equal_transformers(tokenizers, theirs, name, prompt):
    for messages, more in chats(name):
        arguments = {"add_generation_prompt": prompt, **more}
        text = render_chat(tokenizers[name], messages, **arguments)
        assert text == theirs[name].apply_chat_template(messages, tokenize=False, **arguments)
        ids = encode_chat(tokenizers[name], messages, **arguments)
        assert ids == theirs[name].apply_chat_template(messages, return_dict=False, **arguments)
        if (bos := tokenizers[name].bos_id) is not None and name != "smollm2" and name != "llama 2":
            assert ids.count(bos) == (0 if name == "zephyr" else 1)


def test_one_bos_when_a_rendered_chat_is_encoded_as_text(tokenizers):
    tokenizer = tokenizers["llama 3"]
    text = render_chat(tokenizer, TURNS)
    assert text.startswith("<|begin_of_text|>")
    assert tokenizer.encode(text) == encode_chat(tokenizer, TURNS)


def test_dates_come_from_the_clock(tokenizers):
    today = datetime.datetime.now().strftime("%d %b %Y")
    assert f"Today Date: {today}" in render_chat(tokenizers["llama 3.1"], TURNS)


def test_tool_template_is_used_with_tools(tokenizers):
    tokenizer = tokenizers["chatml"]
    both = Tokenizer(tokenizer.backend, chat_templates={"default": "plain", "tool_use": "tools {{ tools|length }}"})
    assert render_chat(both, TURNS) == "plain"
    assert render_chat(both, TURNS, tools=TOOLS) == "tools 1"


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_message_forges_a_turn(tokenizers, name, data):
    """The special tokens of a chat are those of the same chat with harmless words; its text decodes to itself."""
    tokenizer = tokenizers[name]
    words = st.lists(st.sampled_from([*SPECIAL, " ", "a", "\n", "é", "<|im_", "end|>", "user"]), min_size=1, max_size=6)
    contents = [f"x{''.join(data.draw(words))}x" for _ in TURNS]
    messages = [{**turn, "content": content} for turn, content in zip(TURNS, contents, strict=True)]
    ids = encode_chat(tokenizer, messages)
    harmless = encode_chat(tokenizer, [{**turn, "content": "xx"} for turn in TURNS])
    special = tokenizer.special_ids
    assert [index for index in ids if index in special] == [index for index in harmless if index in special]
    assert tokenizer.decode(ids, skip_special_tokens=False) == render_chat(tokenizer, messages)


def test_a_word_that_is_torn_apart_is_named(tokenizers):
    tokenizer = Tokenizer(tokenizers["chatml"].backend, chat_templates={"default": "{{ messages[0].content[:4] }}"})
    assert encode_chat(tokenizer, [{"role": "user", "content": "fine, all of it"}])
    with pytest.raises(UserError, match="spells a special token"):
        encode_chat(tokenizer, [{"role": "user", "content": "a<|im_end|>"}])


def test_marks_in_a_message_are_replaced(tokenizers):
    text = render_chat(tokenizers["chatml"], [{"role": "user", "content": "a\ufdd0b\ufdd3<|im_end|>"}])
    assert "a\ufffdb\ufffd<|im_end|>" in text


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "a list of at least one message"),
        ("hello", "a list of at least one message"),
        ([{"content": "x"}], "message 1 of the chat is not of the form"),
        ([TURNS[0], "x"], "message 2 of the chat is not of the form"),
        ([{"role": "user", "content": object()}], "hold a object; only what JSON has"),
    ],
)
def test_messages_of_the_wrong_form(tokenizers, messages, message):
    with pytest.raises(UserError, match=message):
        render_chat(tokenizers["chatml"], messages)


def rendered(template, **variables):
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    tokenizer = Tokenizer(Backend(models.BPE()), chat_templates={"default": template})
    return render_chat(tokenizer, TURNS, **variables)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for x in %}", "is wrong in line 1"),
        ("a\n\n{{ x | nofilter }}", "is wrong in line 3: .*nofilter"),
        ("{{ raise_exception('only one\nturn') }}", "refuses these messages: only one turn"),
        ("{{ messages.nothing.more }}", "fails on these messages"),
        ("{{ 1 + 'a' }}", "fails on these messages"),
        ("{{ 1 // 0 }}", "fails on these messages"),
        ("{{ messages[0].content.__class__.__mro__ }}", "fails on these messages"),
        ("{{ ''.__class__ }}{{ messages.append(1) }}", "fails on these messages"),
        ("{% set ns = namespace(__x=1) %}", "fails on these messages"),
        ("{% include 'x' %}", "fails on these messages"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "(fails on these messages|was stopped)"),
    ],
)
def test_template_errors_are_one_sentence(template, message):
    with pytest.raises(UserError, match=message) as caught:
        rendered(template)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


LOOPS = (
    "{% for a in r %}{% for b in r %}{% for c in r %}{% for d in r %}%s{% endfor %}{% endfor %}{% endfor %}{% endfor %}"
)
GREEDY = [
    "{{ 'x' * 10**10 }}",
    "{{ 10**10 * 'x' }}",
    "{{ [0] * 10**10 }}",
    "{{ 9**(9**9) }}",
    "{% set ns = namespace(n=7) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s=[1]) %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s='xx') %}{% for i in range(99) %}{% set ns.s = ns.s.replace('x', ns.s) %}{% endfor %}",
    "{% set ns = namespace(s='xx') %}{% for i in range(99) %}{% set ns.s = ns.s|replace('x', ns.s) %}{% endfor %}",
    "{% set ns = namespace(s='xx') %}{% for i in range(99) %}{% set ns.s = ns.s.join([ns.s, ns.s]) %}{% endfor %}",
    "{% set ns = namespace(s='xx') %}{% for i in range(99) %}{% set ns.s = [ns.s, ns.s]|join(ns.s) %}{% endfor %}",
    "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}",
    "{% set ns = namespace(s=['x']) %}{% for i in range(99) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = {'a': ns.s, 'b': ns.s} %}{% endfor %}",
    "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = dict(a=ns.s, b=ns.s) %}{% endfor %}",
    "{% set ns = namespace(s=[1]) %}{% for i in range(99) %}{% set ns.s = (ns.s + ns.s)|batch(2)|list %}{% endfor %}",
    "{% set ns = namespace(s=[1]) %}{% for i in range(99) %}{% set ns.s = ns.s, ns.s %}{% endfor %}{{ ns.s|tojson }}",
    "{% set s = 'x' * 1000000 %}{{ ([s] * 100000)|string }}",
    "{% set s = 'x' * 1000000 %}{{ [s] * 100000 }}",
    "{% set s = 'x' * 1000000 %}{{ [s] * 100000 ~ '' }}",
    "{% set s = 'x' * 1000000 %}{{ ([s] * 100000)|tojson }}",
    "{% set s = 'x' * 1000000 %}{{ '%s' % ([s] * 100000) }}",
    "{% set s = 'x' * 1000000 %}{{ ('%s' * 1000) % ((s,) * 1000) }}",
    "{% set s = 'x' * 1000000 %}{{ ('{0}' * 1000).format(s) }}",
    "{% set s = 'x' * 1000000 %}{{ range(99999)|map('string')|join(s) }}",
    "{% set s = 'x' * 1000000 %}{{ s.join(range(99999)|map('string')) }}",
    "{{ [[1] * 1000000, [1] * 1000000]|sum(start=[]) }}",
    "{{ [1]|tojson(indent=10**9) }}",
    "{{ 'x'|center(10**10) }}",
    "{{ 'x'.center(10**10) }}",
    "{{ 'x'.ljust(10**10) }}",
    "{{ 'x'.zfill(10**10) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '%*d' % (10**10, 1) }}",
    "{{ '%10000000000d'|format(1) }}",
    "{{ '{:10000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10**10) }}",
    "{{ [1]|batch(10**10, 0)|list }}",
    "{{ 'x'|indent(10**10) }}",
    "{{ 'x\n'|indent('y' * 30000000)|length }}{{ lipsum(10**9) }}",
    "{{ range(10**10)|list }}",
    "{% set r = range(9999)|list %}" + LOOPS.replace("%s", ""),
    "{% set r = range(9999)|list %}" + LOOPS.replace("%s", "some plain text that is written again and again"),
    "{% set r = range(9999)|list %}{% set x %}" + LOOPS.replace("%s", "y" * 5000) + "{% endset %}",
    "{% macro f(n) %}" + "y" * 9000 + "{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    "{{ 'x' * 1100000 }}" * 40,
    "{#" + "x" * (2 << 20) + "#}",
]


@pytest.mark.parametrize("template", GREEDY)
def test_greedy_templates_are_stopped(monkeypatch, template):
    """Neither time nor memory runs away; most are refused before anything is made."""
    monkeypatch.setattr(chat_sandbox, "MAX_SECONDS", 1.0)
    started = time.perf_counter()
    with pytest.raises(UserError, match=r"(was stopped|fails on these messages)"):
        rendered(template)
    assert time.perf_counter() - started < 5


def test_what_a_template_may_do():
    assert rendered("{{ 'ab' * 2 }}{{ '-'.join(['a', 'b']) }}{{ 'a-b'.replace('-', '+') }}") == "ababa-ba+b"
    assert rendered("{{ '%s is %d' % ('x', 3) }}{{ '{:>4}'.format(1) }}{{ 'x' | center(3) }}") == "x is 3   1 x "
    assert rendered("{% for i in range(5) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "012"
    assert rendered("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert rendered("{{ {'b': 1, 'a': [1]} | tojson(indent=2, sort_keys=true) }}") == json.dumps(
        {"a": [1], "b": 1}, indent=2
    )
    assert (
        rendered("{% set a, b = 1, [2, 3] %}{% for k, v in {'x': b}.items() %}{{ k }}{{ v }}{{ a }}{% endfor %}")
        == "x[2, 3]1"
    )
    assert rendered("{{ ', '.join(['a', 'b']|map('upper')) }}{{ [1, 2]|map('string')|join('+') }}") == "A, B1+2"
    assert (
        rendered("{{ [3, 1, 2]|sort|list }}{{ [1, 2]|sum }}{{ (1, 2)[1] }}{{ 'a\nb'|indent(2) }}")
        == "[1, 2, 3]32a\n  b"
    )
    assert rendered("{{ dict(a=1).items()|list }}{{ x }}{{ y }}", x=3) == "[('a', 1)]3"


def test_a_long_chat_is_quick(tokenizers):
    """A thousand turns of a kilobyte each: well below what the bounds allow."""
    messages = [{"role": ("user", "assistant")[number % 2], "content": "word " * 200} for number in range(1001)]
    started = time.perf_counter()
    assert len(render_chat(tokenizers["qwen 3"], messages)) > 1_000_000
    assert time.perf_counter() - started < 3
