"""Compile and render a model's Jinja chat template as the hostile input it is.

The language is the one ``transformers`` gives to chat templates: an immutable sandbox with trimmed blocks,
``break`` and ``continue``, ``tojson``, ``raise_exception`` and ``strftime_now``. On top of the sandbox lie
limits of time and size (see :mod:`nanochat.engine.template_budget`), because a template can loop for ever
or multiply a text until memory is gone. Knows nothing of tokenizers or messages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer

from nanochat.engine.template_budget import (
    BUDGET,
    MAX_INTEGER_BITS,
    MAX_PADDING,
    Budget,
    TemplateLimitExceeded,
    TemplateLimits,
    budget_of,
)
from nanochat.engine.template_filters import limited_filters

_MAX_SOURCE_CHARACTERS = 1 << 20
_LONG_NUMBER = re.compile(r"\d{5}")
_WIDTH_ARGUMENT = re.compile(r"[%).][#0\- +]*\*")
"""In a pattern of the ``%`` operator: a width or precision that isn't written there."""
_NESTED_FIELD = re.compile(r"\{[^{}]+\{")
_PADDING_METHODS = frozenset({"center", "ljust", "rjust", "zfill"})
_METHODS: Mapping[type, frozenset[str]] = {
    str: _PADDING_METHODS
    | frozenset(name for name in dir(str) if name.startswith("is"))
    | {"capitalize", "casefold", "count", "endswith", "find", "index", "join", "lower", "lstrip"}
    | {"partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit"}
    | {"rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper"},
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    LoopContext: frozenset({"changed", "cycle"}),
    Cycler: frozenset({"next", "reset"}),
    Joiner: frozenset(),
}
"""Methods that a template may call, by the type of their object: none whose cost isn't known."""


class TemplateRefusal(TemplateError):
    """The template itself called ``raise_exception``: it doesn't take these messages."""


def render_template(
    source: str, variables: Mapping[str, Any], *, now: datetime, limits: TemplateLimits | None = None
) -> str:
    """The text that a template gives; ``now`` is what its ``strftime_now`` tells.

    Raises:
        TemplateRefusal: the template called ``raise_exception``; the message is the template's own.
        TemplateLimitExceeded: it takes too long or makes too much text.
        TemplateError: it has a mistake, or does what the sandbox forbids.
    """
    budget = Budget(limits or TemplateLimits(), variables)

    def strftime_now(pattern: str) -> str:
        if len(pattern) > 100 or _LONG_NUMBER.search(pattern):
            raise TemplateLimitExceeded("a date format is too long")
        return now.strftime(pattern)

    pieces: list[str] = []
    length = 0
    try:
        template = _compile(source)
        context = {**variables, "strftime_now": strftime_now, BUDGET: budget}
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
        texts = [node.data for node in tree.find_all(nodes.TemplateData)]
        texts += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
    except (TemplateError, RecursionError):
        return ""
    return "\0".join(texts)


@lru_cache(maxsize=16)
def _compile(source: str) -> Template:
    if len(source) > _MAX_SOURCE_CHARACTERS:
        raise TemplateLimitExceeded("it is longer than a chat template can be")
    environment = _environment()
    tree = _Instrumentation().visit(environment.parse(source))
    return Template.from_code(environment, environment.compile(tree), environment.make_globals(None))


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox, with a look at the budget wherever a template makes, repeats or compares something."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def spend(self, context: Context) -> bool:
        """Called once for each turn of a loop, each macro call and each tested loop item."""
        budget_of(context).spend()
        return True

    def accept(self, context: Context, value: Any) -> Any:
        """A list, tuple or dict as written, a slice, or what is about to be compared."""
        return budget_of(context).accept(value)

    def emit(self, context: Context, value: Any) -> str:
        """A value on its way out of the template, a macro or a block."""
        return budget_of(context).accept(value if isinstance(value, str) else str(value))

    def emit_literal(self, context: Context, length: int) -> None:
        """So many characters of the template's own text go the same way."""
        budget_of(context).spend()
        budget_of(context).charge(length)

    def join_text(self, context: Context, *parts: object) -> str:
        """The ``~`` operator."""
        return budget_of(context).accept("".join(self.emit(context, part) for part in parts))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = budget_of(context)
        if operator in ("*", "**"):
            _check_product(budget, operator, left, right)
        elif operator == "%" and isinstance(left, str):
            if _WIDTH_ARGUMENT.search(left):
                raise TemplateLimitExceeded("a format is too wide")
            _check_pattern(budget, left, left.count("%"), right)
        return budget.accept(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        owner = getattr(__obj, "__self__", None)
        if owner is __self:  # one of the checks that instrumentation put in: no template can name it
            return __obj(*args)
        budget = budget_of(__context)
        budget.spend()
        if isinstance(__obj, _Format):
            __obj.check(budget, args, kwargs)
        elif owner is not None:
            args = _check_method(budget, owner, __obj.__name__, args)
        return budget.accept(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatted = super().wrap_str_format(value)
        return None if formatted is None else _Format(value.__self__, formatted)


class _Format:
    """The ``format`` method of a text in the sandbox."""

    def __init__(self, pattern: str, formatted: Callable[..., str]) -> None:
        self._pattern = pattern
        self._formatted = formatted

    def check(self, budget: Budget, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _NESTED_FIELD.search(self._pattern):
            raise TemplateLimitExceeded("a format is too wide")
        _check_pattern(budget, self._pattern, self._pattern.count("{"), (args, kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        return self._formatted(*args, **kwargs)


def _check_product(budget: Budget, operator: str, left: Any, right: Any) -> None:
    for sequence, count in ((left, right), (right, left)):
        if operator == "*" and isinstance(sequence, (str, list, tuple)) and isinstance(count, int):
            budget.check_size(len(sequence) * max(count, 0))
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() + right.bit_length() if operator == "*" else left.bit_length() * abs(right)
        if bits > MAX_INTEGER_BITS:
            raise TemplateLimitExceeded("a number is too large")


def _check_pattern(budget: Budget, pattern: str, fields: int, values: Any) -> None:
    """Each field may bring all the values, at a width of four digits."""
    if _LONG_NUMBER.search(pattern):
        raise TemplateLimitExceeded("a format is too wide")
    budget.check_size(len(pattern) + fields * (budget.weigh(values) + MAX_PADDING))


def _check_method(budget: Budget, owner: Any, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Refuse a call that isn't known, or whose result would be out of proportion; returns its arguments."""
    kind = next((kind for kind in _METHODS if isinstance(owner, kind)), None)
    if kind is None or name not in _METHODS[kind]:
        raise SecurityError(f"{name} isn't available to chat templates")
    if kind is not str:
        return args
    if name in _PADDING_METHODS and any(isinstance(value, int) and value > MAX_PADDING for value in args):
        raise TemplateLimitExceeded("a padding is too wide")
    if name == "replace" and len(args) >= 2:
        budget.check_replacement(owner, *args[:2])
    if name == "join" and args:
        items = list(args[0])
        budget.check_size(len(owner) * len(items) + budget.weigh(items))
        return (items, *args[1:])
    return args


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

    def visit_Output(self, node: nodes.Output) -> list[nodes.Node]:  # noqa: N802
        self.generic_visit(node)
        literals = [child for child in node.nodes if isinstance(child, nodes.TemplateData)]
        length = nodes.Const(sum(len(literal.data) for literal in literals))
        node.nodes = [child if child in literals else _call("emit", child) for child in node.nodes]
        return [nodes.ExprStmt(_call("emit_literal", length), lineno=node.lineno), node]

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return node if node.ctx == "store" else _call("accept", node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("accept", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.expr = _call("accept", node.expr)
        return node

    def _accepted(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return _call("accept", node)

    visit_List = visit_Dict = _accepted  # noqa: N815


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

    def __repr__(self) -> str:  # what it holds may hold it in turn
        return "<Namespace>"


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace can't hold the name {name!r}")


def _raise_exception(message: object = "") -> None:
    raise TemplateRefusal(str(message))


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


@lru_cache(maxsize=1)
def _environment() -> Environment:
    # Folding constants would run a template's expressions before any limit holds.
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters = limited_filters(environment.filters)
    del environment.globals["lipsum"]
    environment.globals.update(raise_exception=_raise_exception, dict=_make_dict, namespace=_Namespace)
    return environment
