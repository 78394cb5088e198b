"""What a request wants its answer to look like, as the text that llguidance compiles."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import llguidance

from treadle.model.tokenizer import Tokenizer
from treadle.serve.grammar_checks import check_lark, check_schema
from treadle.serve.lark import Grammars, json_grammar, literal, marker, text_until
from treadle.serve.parsers.formats import FORMATS
from treadle.serve.parsers.tools import Tool
from treadle.serve.request import Grammar

MAX_CHOICES = 10_000


def llguidance_grammar(grammar: Grammar, tokenizer: Tokenizer) -> str:
    """Return the text to compile. Raises ValueError saying what is wrong."""
    try:
        return json.dumps({"grammars": _after_reasoning(_grammars(grammar, tokenizer), grammar, tokenizer)})
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def tools_text(tools: Sequence[Tool], form: str, required: bool, parallel: bool, text: Grammar | None = None) -> str:
    """Return the text of a grammar of kind "tools": answers that call one or (`parallel`) several of `tools`.

    `form` names a ToolFormat. Without `required` an answer may also be text, that of a grammar if one is given.
    """
    listed = [{"name": one.name, "parameters": one.parameters, "strict": one.strict} for one in tools]
    other = None if text is None else {"kind": text.kind, "text": text.text}
    return json.dumps({"tools": listed, "format": form, "required": required, "parallel": parallel, "other": other})


def _tools(given: Any, tokenizer: Tokenizer) -> Grammars:
    tools = [Tool(**one) for one in given["tools"]]
    for tool in tools:
        check_schema(tool.parameters)
    form, other = FORMATS[given["format"]], given["other"]
    if other is None:
        return form.grammar(tools, given["required"], given["parallel"], tokenizer)
    calls, text = form.grammar(tools, True, given["parallel"], tokenizer), _grammars(Grammar(**other), tokenizer)
    top = {"lark_grammar": "start: @calls | @text"}
    return [top, {**calls[0], "name": "calls"}, *calls[1:], {**text[0], "name": "text"}, *text[1:]]


def _grammars(grammar: Grammar, tokenizer: Tokenizer) -> Grammars:
    text = grammar.text
    if grammar.kind == "json_object":
        return [json_grammar({"type": "object"})]
    if grammar.kind == "json_schema":
        schema = json.loads(text)
        check_schema(schema)
        return [json_grammar(schema)]
    if grammar.kind == "regex":
        # The library puts the expression between slashes, with those that it has escaped.
        return json.loads(llguidance.LLMatcher.grammar_from_regex(text))["grammars"]
    if grammar.kind == "grammar":
        check_lark(text)
        return [{"lark_grammar": text}]
    if grammar.kind == "choice":
        return [{"lark_grammar": "start: " + " | ".join(map(literal, _choices(json.loads(text))))}]
    return _tools(json.loads(text), tokenizer)


def _choices(choices: Any) -> Sequence[str]:
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise ValueError("choices are a list of at least one text")
    if len(choices) > MAX_CHOICES:
        raise ValueError(f"there are {len(choices)} choices, at most {MAX_CHOICES} are allowed")
    return choices


def _after_reasoning(grammars: Grammars, grammar: Grammar, tokenizer: Tokenizer) -> Grammars:
    """Return the grammar behind a reasoning block, whose text is free."""
    if not grammar.reasoning_end:
        return grammars
    thoughts = "thoughts GAP?"
    if grammar.reasoning_start:
        thoughts = f"({marker(grammar.reasoning_start, tokenizer)} {thoughts})?"
    lark = f"start: {thoughts} @answer\nGAP: /[ \\n]{{1,4}}/\n"
    lark += text_until(grammar.reasoning_end, tokenizer, "thoughts")
    return [{"lark_grammar": lark}, {**grammars[0], "name": "answer"}, *grammars[1:]]
