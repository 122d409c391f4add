"""Compile and render a model's Jinja chat template as the hostile input it is.

The language is the one ``transformers`` gives to chat templates: an immutable sandbox with trimmed blocks,
``break`` and ``continue``, ``tojson``, ``raise_exception`` and ``strftime_now``. On top of the sandbox lie
limits of time and size, because a template can loop for ever or multiply a text until memory is gone.
Knows nothing of tokenizers or messages.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Environment, Template, TemplateError, filters, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

_BUDGET = "budget of this rendering"  # no identifier, so a template can't name it
_MAX_SOURCE_CHARACTERS = 1 << 20
_MAX_PADDING = 10_000
_MAX_INTEGER_BITS = 4096
_LONG_NUMBER = re.compile(r"\d{5}|\*")
_NESTED_FIELD = re.compile(r"\{[^{}]+\{")
# Filters that exist to make long texts out of short ones; chat templates have no use for them.
_REMOVED_FILTERS = (
    *("batch", "center", "filesizeformat", "format", "pprint", "random", "round", "slice"),
    *("urlize", "wordwrap", "xmlattr"),
)
_PADDING_METHODS = {"center", "expandtabs", "ljust", "rjust", "zfill"}


class TemplateRefusal(TemplateError):
    """The template itself called ``raise_exception``: it doesn't take these messages."""


class TemplateLimitExceeded(TemplateError):
    """The template takes too long or makes too much text."""


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """How much one rendering may cost."""

    seconds: float = 10.0
    characters: int = 1 << 26
    """Of the whole output and of any text or list on the way to it."""


def render_template(
    source: str, variables: Mapping[str, Any], *, now: datetime, limits: TemplateLimits | None = None
) -> str:
    """The text that a template gives; ``now`` is what its ``strftime_now`` tells.

    Raises:
        TemplateRefusal: the template called ``raise_exception``; the message is the template's own.
        TemplateLimitExceeded: it takes too long or makes too much text.
        TemplateError: it has a mistake, or does what the sandbox forbids.
    """
    limits = limits or TemplateLimits()
    budget = _Budget(limits)

    def strftime_now(pattern: str) -> str:
        if len(pattern) > 100 or _LONG_NUMBER.search(pattern):
            raise TemplateLimitExceeded("a date format is too long")
        return now.strftime(pattern)

    pieces: list[str] = []
    length = 0
    try:
        template = _compile(source)
        context = {**variables, "strftime_now": strftime_now, _BUDGET: budget}
        for piece in template.generate(context):
            budget.spend()
            length += len(piece)
            budget.check_size(length)
            pieces.append(piece)
    except TemplateError:
        raise
    except (RecursionError, MemoryError) as error:
        raise TemplateLimitExceeded("it nests too deeply or needs too much memory") from error
    except Exception as error:  # whatever a template's own expressions raise: TypeError, KeyError, ...
        raise TemplateError(f"{type(error).__name__}: {error}") from error
    return "".join(pieces)


@lru_cache(maxsize=16)
def literal_text(source: str) -> str:
    """The texts written in a template, joined by NUL; empty when it doesn't parse."""
    try:
        tree = _environment().parse(source)
    except (TemplateError, RecursionError):
        return ""
    texts = [node.data for node in tree.find_all(nodes.TemplateData)]
    texts += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
    return "\0".join(texts)


@lru_cache(maxsize=16)
def _compile(source: str) -> Template:
    if len(source) > _MAX_SOURCE_CHARACTERS:
        raise TemplateLimitExceeded("it is longer than a chat template can be")
    environment = _environment()
    tree = _Instrumentation().visit(environment.parse(source))
    return Template.from_code(environment, environment.compile(tree), environment.make_globals(None))


class _Budget:
    """What is left to one rendering."""

    def __init__(self, limits: TemplateLimits) -> None:
        self._deadline = time.monotonic() + limits.seconds
        self._limits = limits

    def spend(self) -> None:
        if time.monotonic() > self._deadline:
            raise TemplateLimitExceeded(f"it takes longer than {self._limits.seconds:g} s")

    def check_size(self, length: int) -> None:
        if length > self._limits.characters:
            raise TemplateLimitExceeded(f"it makes a text longer than {self._limits.characters} characters")


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox, with a look at the budget wherever a template can repeat or multiply something."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def spend(self, context: Context) -> bool:
        """Called once for each turn of a loop, each macro call and each tested loop item."""
        context.parent[_BUDGET].spend()
        return True

    def join_text(self, context: Context, *parts: object) -> str:
        """The ``~`` operator."""
        return self._sized(context, "".join(map(str, parts)))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator in ("*", "**"):
            _check_product(context.parent[_BUDGET], operator, left, right)
        elif operator == "%" and isinstance(left, str) and _LONG_NUMBER.search(left):
            raise TemplateLimitExceeded("a format is too wide")
        return self._sized(context, super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        budget = __context.parent[_BUDGET]
        budget.spend()
        if isinstance(getattr(__obj, "__self__", None), str):
            _check_method(budget, __obj.__self__, getattr(__obj, "__name__", ""), args)
        return __self._sized(__context, super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None
        pattern = value.__self__

        def limited(*args: Any, **kwargs: Any) -> str:
            if _LONG_NUMBER.search(pattern) or _NESTED_FIELD.search(pattern):
                raise TemplateLimitExceeded("a format is too wide")
            return formatted(*args, **kwargs)

        return limited

    def _sized(self, context: Context, value: Any) -> Any:
        if isinstance(value, (str, list, tuple)):
            context.parent[_BUDGET].check_size(len(value))
        return value


def _check_product(budget: _Budget, operator: str, left: Any, right: Any) -> None:
    for sequence, count in ((left, right), (right, left)):
        if operator == "*" and isinstance(sequence, (str, list, tuple)) and isinstance(count, int):
            budget.check_size(len(sequence) * max(count, 0))
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() + right.bit_length() if operator == "*" else left.bit_length() * abs(right)
        if bits > _MAX_INTEGER_BITS:
            raise TemplateLimitExceeded("a number is too large")


def _check_method(budget: _Budget, text: str, name: str, args: tuple[Any, ...]) -> None:
    """Refuse a call of a text's method whose result would be out of proportion."""
    too_wide = any(isinstance(value, int) and value > _MAX_PADDING for value in args)
    if name in _PADDING_METHODS and too_wide:
        raise TemplateLimitExceeded("a padding is too wide")
    if name == "translate":
        raise SecurityError("translate isn't available to chat templates")
    if name == "replace" and len(args) >= 2:
        _check_replacement(budget, text, *args[:2])
    if name == "join" and args and hasattr(args[0], "__len__"):
        budget.check_size(len(text) * len(args[0]))


def _check_replacement(budget: _Budget, text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        budget.check_size(len(text) + text.count(old) * len(new))


class _Instrumentation(NodeTransformer):
    """Puts the sandbox's checks into a parsed template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("spend"), lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(_call("spend"), node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro | nodes.CallBlock) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("spend"), lineno=node.lineno))
        return node

    visit_CallBlock = visit_Macro  # noqa: N815

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("join_text", *node.nodes)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.filter = nodes.Filter(node.filter, "sized", [], [], None, None)
        return node


def _call(name: str, *args: nodes.Expr) -> nodes.Call:
    """The call of a method of the environment, which no template can shadow."""
    return nodes.Call(nodes.EnvironmentAttribute(name), [nodes.ContextReference(), *args], [], None, None)


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's part for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - the name and type that Jinja asks for

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """``namespace()`` without names that begin with an underscore, which could reach Python's own."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace can't hold the name {name!r}")


def _raise_exception(message: object = "") -> None:
    raise TemplateRefusal(str(message))


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if not (indent is None or (isinstance(indent, int) and indent <= 16)):
        raise TemplateLimitExceeded("an indent is too wide")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@pass_context
def _replace(context: Context, text: Any, old: str, new: str, count: int | None = None) -> str:
    _check_replacement(context.parent[_BUDGET], str(text), old, new)
    return filters.do_replace(context.eval_ctx, text, old, new, count)


@pass_context
def _join(context: Context, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    items = list(value)
    context.parent[_BUDGET].check_size(len(str(d)) * len(items))
    joined = filters.sync_do_join(context.eval_ctx, items, d, attribute)
    context.parent[_BUDGET].check_size(len(joined))
    return joined


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    if (width if isinstance(width, int) else len(width)) > 1000:
        raise TemplateLimitExceeded("an indent is too wide")
    return filters.do_indent(text, width, first, blank)


@pass_context
def _sized(context: Context, text: str) -> str:
    context.parent[_BUDGET].check_size(len(text))
    return text


@lru_cache(maxsize=1)
def _environment() -> Environment:
    # Folding constants would run a template's expressions before any limit holds.
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters.update(replace=_replace, join=_join, indent=_indent, sized=_sized, tojson=_to_json)
    for name in _REMOVED_FILTERS:
        del environment.filters[name]
    del environment.globals["lipsum"]
    environment.globals.update(raise_exception=_raise_exception, dict=_make_dict, namespace=_Namespace)
    return environment
