"""A Jinja environment for chat templates that strangers wrote: no access to Python, bounded time, text and numbers.

Jinja's sandbox keeps a template away from Python's internals, but not from `'x' * 10**10` or from loops within loops.
So loops, calls and outputs are counted here, and whatever can make a long text or number out of short ones is checked
first. What a template may use is what Transformers offers: raise_exception, strftime_now, tojson, break and continue,
{% generation %} blocks.
"""

from __future__ import annotations

import contextvars
import datetime
import functools
import json
import re
import time
from collections.abc import Callable
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_TEMPLATE_CHARACTERS = 1 << 20
MAX_CHARACTERS = 32 << 20
MAX_ITEMS = 1 << 20
MAX_STEPS = 5_000_000
MAX_SECONDS = 10.0
MAX_NUMBER_BITS = 4096
# Noncharacters of Unicode, which no text holds, mark where a {% generation %} block begins and ends.
GENERATION_OPEN, GENERATION_CLOSE = "\ufdd0", "\ufdd1"


class Refusal(Exception):
    """The template itself refuses the messages (raise_exception)."""


class TooMuch(Exception):
    """The template went over a bound."""


class _Budget:
    """What one rendering may still use."""

    def __init__(self) -> None:
        self.steps, self.characters = MAX_STEPS, MAX_CHARACTERS
        self.deadline = time.monotonic() + MAX_SECONDS

    def spend(self, steps: int, characters: int) -> None:
        self.steps -= steps
        self.characters -= characters
        if self.steps < 0 or (self.steps & 15 == 0 and time.monotonic() > self.deadline):
            raise TooMuch("it does not come to an end")
        if self.characters < 0:
            raise TooMuch(f"it writes more than {MAX_CHARACTERS >> 20} million characters")


_budget: contextvars.ContextVar[_Budget | None] = contextvars.ContextVar("budget", default=None)


def render(template: str, variables: dict[str, Any]) -> str:
    """Return the template's output, generation blocks between their marks. Raises Refusal, TooMuch, jinja2's errors."""
    compiled = _compile(template)
    token = _budget.set(_Budget())
    try:
        return compiled.render(**variables)
    finally:
        _budget.reset(token)


def has_generation_blocks(template: str) -> bool:
    """Whether the template itself says which text the model writes."""
    return re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", template) is not None


@functools.lru_cache(maxsize=64)
def _compile(template: str) -> jinja2.Template:
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise TooMuch(f"it is longer than {MAX_TEMPLATE_CHARACTERS >> 20} million characters")
    return _environment().from_string(template)


def _check_length(length: int, most: int = MAX_CHARACTERS) -> None:
    if length > most:
        raise TooMuch(f"it makes a text or list of {length} parts, more than {most}")


def _measured(value: Any) -> Any:
    """Return `value`, refusing a list or mapping that is giant when written out, however little memory it takes."""
    if not isinstance(value, (list, tuple, dict)):
        return value
    waiting, items, characters = [value], 0, 0
    while waiting:
        one = waiting.pop()
        items += 1
        if isinstance(one, str):
            characters += len(one)
        elif isinstance(one, dict):
            waiting.extend(one)
            waiting.extend(one.values())
        elif isinstance(one, (list, tuple)):
            waiting.extend(one)
        _check_length(items + len(waiting), 2 * MAX_ITEMS)
        _check_length(characters)
    return value


def _check_format(text: Any, arguments: Any) -> None:
    """Refuse widths and precisions that would make a format much longer than what goes in."""
    for argument in arguments:
        _measured(argument)
    if not isinstance(text, str):
        return
    if re.search(r"\d{5}", text):
        raise TooMuch("it formats with a width of five digits or more")
    if any(isinstance(value, int) and abs(value) > 9999 for value in arguments) and re.search(r"\*|:[^}]*\{", text):
        raise TooMuch("it formats with a width that is an argument")
    pieces = len(re.findall(r"[%{]", text))
    _check_length(len(text) + pieces * (64 + max((len(one) for one in arguments if isinstance(one, str)), default=0)))


def _check_replace(text: Any, *arguments: Any, **named: Any) -> None:
    old, new = ([*arguments, *named.values(), "", ""])[:2]
    if isinstance(text, str) and isinstance(old, str) and isinstance(new, str):
        _check_length(len(text) + (text.count(old) if old else len(text) + 1) * len(new))


def _check_join(parts: list[Any], separator: Any) -> None:
    _measured(parts)
    _check_length(len(parts) * (len(separator) if isinstance(separator, str) else 1))


def _check_numbers(arguments: Any) -> None:
    for value in arguments:
        if isinstance(value, int) and abs(value) > MAX_ITEMS:
            raise TooMuch(f"it asks for {value} of something")


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def tick(self, characters: int = 0) -> None:
        """Count a turn of a loop or a call, and the fixed text that it writes."""
        if (budget := _budget.get()) is not None:
            budget.spend(1, characters)

    def emit(self, value: Any) -> Any:
        """Count a value that is written."""
        text = value if isinstance(value, str) else str(_measured(value))
        self.tick(len(text))
        return text

    def join_text(self, *parts: Any) -> str:
        """The operator ~."""
        texts = [str(_measured(part)) for part in parts]
        _check_length(sum(map(len, texts)))
        self.tick()
        return "".join(texts)

    def measured(self, value: Any) -> Any:
        """A list, tuple or mapping that the template writes down: only these can nest what is there already."""
        return _measured(value)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Counting().visit(super()._parse(source, name, filename))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.tick()
        method = getattr(__obj, "__wrapped__", __obj)
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str):
            if name == "replace":
                _check_replace(owner, *args, **kwargs)
            elif name == "join" and args:
                args = (list(args[0]), *args[1:])  # it may be a generator, which can be read but once
                _check_join(args[0], owner)
            elif name in ("format", "format_map"):
                _check_format(owner, [*args, *kwargs.values()])
            elif name in ("center", "ljust", "rjust", "zfill", "expandtabs"):
                _check_numbers([*args, *kwargs.values()])
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _check_format(left, right if isinstance(right, tuple) else [right])
        elif operator == "+" and isinstance(left, str) and isinstance(right, str):
            _check_length(len(left) + len(right))
        elif operator == "+" and isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
            _check_length(len(left) + len(right), MAX_ITEMS)
        elif operator == "*":
            for part, count in ((left, right), (right, left)):
                if isinstance(part, (str, list, tuple)) and isinstance(count, int):
                    _check_length(len(part) * max(count, 0), MAX_CHARACTERS if isinstance(part, str) else MAX_ITEMS)
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_NUMBER_BITS:
                raise TooMuch("it computes a giant number")
        return super().call_binop(context, operator, left, right)


class _Counting(NodeTransformer):
    """Puts calls of `tick`, `emit` and `join_text` into a template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _statement("tick", node, _fixed_text(node.body)))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _statement("tick", node, _fixed_text(node.body)))
        return node

    def _visit_written(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        # What is assigned to is not a value: {% set a, b = ... %}, {% for key, value in ... %}.
        return node if getattr(node, "ctx", "load") != "load" else _call("measured", node, [node])

    visit_List = visit_Tuple = visit_Dict = _visit_written

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("join_text", node, node.nodes)

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [one if isinstance(one, nodes.TemplateData) else _call("emit", one, [one]) for one in node.nodes]
        return node


def _call(name: str, place: nodes.Node, arguments: list[nodes.Expr]) -> nodes.Call:
    call = nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)
    call.set_lineno(place.lineno)
    return call


def _statement(name: str, place: nodes.Node, characters: int) -> nodes.ExprStmt:
    statement = nodes.ExprStmt(_call(name, place, [nodes.Const(characters)]))
    statement.set_lineno(place.lineno)
    return statement


def _fixed_text(body: list[nodes.Node]) -> int:
    """The most characters of plain text that one pass over `body` writes."""
    return sum(len(data.data) for node in body for data in node.find_all(nodes.TemplateData))


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}: the text that the model writes, put between two marks."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{GENERATION_OPEN}{caller()}{GENERATION_CLOSE}"


class _Namespace(Namespace):
    """A namespace whose names lead nowhere into Python."""

    def __init__(*args: Any, **named: Any) -> None:
        self, given = args[0], args[1:]
        attributes = dict(*given, **named)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace may not have the attribute {name!r}")


# Filters whose result is no text: what they are given is not written out, however large.
_STRUCTURAL = frozenset(
    """length count first last sort reverse map select selectattr reject rejectattr items dictsort batch slice unique
    groupby default d attr min max random""".split()
)


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter `name`, with its arguments checked first."""

    @functools.wraps(function)
    def filtered(*arguments: Any, **named: Any) -> Any:
        # Where Jinja passes its context or environment it comes first, the filtered value after it.
        first = 1 if hasattr(function, "jinja_pass_arg") else 0
        value, given = arguments[first], [*arguments[first + 1 :], *named.values()]
        _check_numbers(given)
        if name == "join":
            value = list(value)
            _check_join(value, given[0] if given else "")
        elif name == "replace":
            _check_replace(value, *given)
        elif name == "indent":
            _check_replace(value, "\n", "\n" + (given[0] if given and isinstance(given[0], str) else " " * 64))
        elif name == "format":
            _check_format(value, given)
        elif name == "sum" and any(not isinstance(one, (int, float, str, type(None))) for one in given):
            raise TooMuch("it sums up lists")
        elif name not in _STRUCTURAL:
            _measured(value)
        result = function(*arguments[:first], value, *arguments[first + 1 :], **named)
        return _measured(result) if name == "list" else result

    return filtered


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Not Jinja's own, which escapes what is special in HTML.
    _check_numbers([indent])
    return json.dumps(
        _measured(value), ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: Any) -> None:
    raise Refusal(str(message))


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _dict(*arguments: Any, **named: Any) -> dict[Any, Any]:
    return _measured(dict(*arguments, **named))


@functools.cache
def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters = {name: _bounded(name, function) for name, function in environment.filters.items()}
    environment.filters["tojson"] = _tojson
    environment.globals.pop("lipsum", None)
    environment.filters.pop("urlize", None)
    environment.globals.update(
        raise_exception=_raise_exception,  # pyrefly: ignore
        strftime_now=_strftime_now,  # pyrefly: ignore
        dict=_dict,  # pyrefly: ignore
        namespace=_Namespace,
    )
    return environment
