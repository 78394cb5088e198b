import pytest

from tests.model.chat_templates import TEMPLATES, make_tokenizers
from tests.model.test_chat import ANSWERED, CALL, SYSTEM, THOUGHTFUL, TOOLS, TURNS, WITH_TOOLS
from treadle.config import UserError
from treadle.model.chat import encode_chat, render_chat
from treadle.model.chat_answers import encode_chat_with_answers
from treadle.model.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizers():
    return make_tokenizers()


def answers(tokenizer, messages, **more):
    """The texts that are learnt, each run of tokens by itself; the ids are those of the chat."""
    ids, mask = encode_chat_with_answers(tokenizer, messages, **more)
    assert ids == encode_chat(tokenizer, messages, add_generation_prompt=False, **more)
    assert len(mask) == len(ids)
    runs, before = [], False
    for index, learnt in zip(ids, mask, strict=True):
        if learnt:
            runs = runs if before else [*runs, []]
            runs[-1].append(index)
        before = learnt
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_and_their_ends_and_nothing_else(tokenizers, name):
    end = TEMPLATES[name][3]
    first, second = "\n It depends. 日本 😀", "The question."
    if name in ("llama 2", "llama 3", "llama 3.1", "mistral tools", "gemma", "gemma 3"):  # these trim
        first = first.strip()
    if name == "llama 2":
        first, second = first + " ", second + " "
    if name == "qwen 3":
        second = "<think>\n\n</think>\n\n" + second  # it opens the last answer with an empty thought
    found = answers(tokenizers[name], ANSWERED)
    # Where no special token stands before an answer, its first token may take the blank before it along.
    assert [text.strip() for text in found] == [(first + end).strip(), (second + end).strip()]
    if name not in ("llama 2", "mistral", "mistral tools"):
        assert found == [first + end, second + end]
    if TEMPLATES[name][4]:
        assert answers(tokenizers[name], [SYSTEM, *ANSWERED]) == found


@pytest.mark.parametrize("name", ["chatml", "llama 3", "gemma", "qwen 2.5", "generation"])
def test_what_is_learnt_is_what_generation_continues(tokenizers, name):
    """The tokens before an answer are those that a server would send to have it generated."""
    tokenizer = tokenizers[name]
    messages = [TURNS[0], {"role": "assistant", "content": "Yes."}]
    ids, mask = encode_chat_with_answers(tokenizer, messages)
    assert encode_chat(tokenizer, messages[:1]) == ids[: mask.index(True)]


def test_without_a_generation_prompt_the_header_is_not_learnt(tokenizers):
    assert answers(tokenizers["chatml without prompt"], ANSWERED)[1] == "The question.<|im_end|>"


def test_thinking_is_learnt_where_the_template_keeps_it(tokenizers):
    found = answers(tokenizers["qwen 3"], THOUGHTFUL)
    assert found == ["Yes.<|im_end|>", "<think>\nlong thought\n</think>\n\nNo.<|im_end|>"]
    one = [TURNS[0], {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."}]
    assert answers(tokenizers["qwen 3"], one) == ["<think>\nhm\n</think>\n\nYes.<|im_end|>"]


@pytest.mark.parametrize("name", ["llama 3.1", "qwen 2.5", "qwen 3", "mistral tools"])
def test_calls_of_tools_are_answers_too(tokenizers, name):
    end = TEMPLATES[name][3]
    found = answers(tokenizers[name], WITH_TOOLS[:4], tools=TOOLS)
    assert len(found) == 2
    assert '"name": "weather"' in found[0] and found[0].endswith(end)
    assert found[1].strip().endswith(f"Cold.{end}")
    messages = [*WITH_TOOLS, {"role": "assistant", "content": "Welcome."}]
    if name == "mistral tools":  # it moves the tools to the last question, so nothing tells where a call begins
        with pytest.raises(UserError, match="message 2 of the chat"):
            answers(tokenizers[name], messages, tools=TOOLS)
        return
    found = answers(tokenizers[name], messages, tools=TOOLS)
    assert len(found) == 3
    assert found[1].strip() == f"Cold.{end}"
    assert found[2].endswith(f"Welcome.{end}")


def test_text_beside_calls(tokenizers):
    messages = [TURNS[0], {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]}]
    (found,) = answers(tokenizers["qwen 2.5"], messages)
    assert found.startswith("Let me see.\n<tool_call>") and found.endswith("</tool_call><|im_end|>")


def test_several_answers_in_a_row_and_one_that_comes_first(tokenizers):
    chat = [{"role": "assistant", "content": "Hello!"}, TURNS[0], ANSWERED[3], ANSWERED[3]]
    assert answers(tokenizers["chatml"], chat) == ["Hello!<|im_end|>", *["The question.<|im_end|>"] * 2]


def test_answers_that_repeat_other_text_are_found_where_they_stand(tokenizers):
    chat = [
        {"role": "user", "content": "No."},
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": "No.<|im_end|>"},
        {"role": "assistant", "content": "assistant\nNo."},
    ]
    tokenizer = tokenizers["smollm2"]
    ids, mask = encode_chat_with_answers(tokenizer, chat)
    assert answers(tokenizer, chat) == ["No.<|im_end|>", "assistant\nNo.<|im_end|>"]
    assert mask[-1] is False and mask[-2] is True  # the line end after the last turn is the template's
    assert tokenizer.decode(ids, skip_special_tokens=False) == render_chat(tokenizer, chat, False)


def test_an_answer_that_spells_the_end_of_a_turn(tokenizers):
    chat = [TURNS[0], {"role": "assistant", "content": "write <|im_end|> there"}]
    for name in ("chatml", "generation"):
        tokenizer = tokenizers[name]
        ids, mask = encode_chat_with_answers(tokenizer, chat)
        learnt = [index for index, yes in zip(ids, mask, strict=True) if yes]
        assert learnt.count(tokenizer.token_to_id("<|im_end|>")) == 1
        assert learnt[-1] == tokenizer.token_to_id("<|im_end|>")


def test_empty_answers(tokenizers):
    chat = [TURNS[0], {"role": "assistant", "content": ""}]
    assert answers(tokenizers["chatml"], chat) == ["<|im_end|>"]
    assert answers(tokenizers["qwen 3"], chat) == ["<think>\n\n</think>\n\n<|im_end|>"]


def test_masks_equal_transformers_for_generation_blocks(tokenizers, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = tokenizers["generation"]
    # Without the macro, which Transformers' tracking does not see through.
    plain = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    )
    tokenizer = Tokenizer(tokenizer.backend, eos_token="<|im_end|>", chat_templates={"default": plain})
    tokenizer.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path)).apply_chat_template(
        ANSWERED, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = encode_chat_with_answers(tokenizer, ANSWERED)
    assert ids == theirs["input_ids"]
    assert [int(one) for one in mask] == theirs["assistant_masks"]


def test_what_cannot_be_learnt_is_said(tokenizers):
    with pytest.raises(UserError, match="no message of the assistant"):
        encode_chat_with_answers(tokenizers["chatml"], TURNS[:1])
    backend = tokenizers["chatml"].backend
    backwards = "{% for m in messages %}{{ m.role ~ ':' ~ (m.content | reverse) ~ '\n' }}{% endfor %}"
    shuffled = "{% for m in messages | reverse %}{{ m.role ~ ':' ~ (m.content | upper | reverse) }}{% endfor %}"
    assert answers(Tokenizer(backend, chat_templates={"default": backwards}), ANSWERED)
    with pytest.raises(UserError, match=r"message 2 of the chat .* put \{% generation %\}"):
        encode_chat_with_answers(Tokenizer(backend, chat_templates={"default": shuffled}), ANSWERED)


def test_chats_of_a_tokenizer_that_we_train():
    tokenizer = Tokenizer.train([message["content"] for message in ANSWERED], 300)
    ids, _ = encode_chat_with_answers(tokenizer, ANSWERED)
    assert ids[0] == tokenizer.bos_id and ids.count(tokenizer.bos_id) == 1
    assert answers(tokenizer, ANSWERED) == ["\n It depends. 日本 😀<|im_end|>", "The question.<|im_end|>"]
    assert tokenizer.token_to_id("<|im_end|>") in tokenizer.eos_ids
