"""The filters that chat templates may use, each held to the budget of its rendering.

Filters take a value, so that what goes in has been weighed; what comes out is weighed like all else that a
template makes. Those that can blow a value up in between have forms of their own here.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jinja2 import TemplateError, filters, pass_context
from jinja2.runtime import Context

from nanochat.engine.template_budget import TemplateLimitExceeded, budget_of

_REMOVED = frozenset(
    {"batch", "center", "filesizeformat", "format", "pprint", "random", "round", "slice", "striptags"}
    | {"urlize", "wordwrap", "xmlattr"}
)
"""They make long texts out of short ones, or take long; chat templates have no use for them."""


def limited_filters(known: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """What is left of Jinja's own filters."""
    own: dict[str, Callable[..., Any]] = {
        "replace": _replace,
        "join": _join,
        "indent": _indent,
        "sum": _sum,
        "tojson": _to_json,
    }
    return {name: _limited(own.get(name, found)) for name, found in known.items() if name not in _REMOVED}


def _limited(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose results are looked at like all else that a template makes."""
    passed = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    @pass_context
    @functools.wraps(function, assigned=("__name__",), updated=())
    def looked_at(context: Context, *args: Any, **kwargs: Any) -> Any:
        budget = budget_of(context)
        budget.spend()
        first = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        if passed is not None:
            args = (first[passed], *args)
        return budget.accept(function(*args, **kwargs))

    return looked_at


@pass_context
def _replace(context: Context, text: Any, old: str, new: str, count: int | None = None) -> str:
    budget_of(context).check_replacement(str(text), old, new)
    return filters.do_replace(context.eval_ctx, text, old, new, count)


@pass_context
def _join(context: Context, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    items = list(value)
    budget_of(context).check_size(len(str(d)) * len(items) + budget_of(context).weigh(items))
    return filters.sync_do_join(context.eval_ctx, items, d, attribute)


@pass_context
def _indent(
    context: Context, text: str, width: int | str = 4, first: bool = False, blank: bool = False
) -> str:
    length = width if isinstance(width, int) else len(width)
    budget_of(context).check_size(len(text) + (1 + text.count("\n")) * max(0, length))
    return filters.do_indent(text, width, first, blank)


@pass_context
def _sum(
    context: Context, iterable: Iterable[Any], attribute: str | int | None = None, start: float = 0
) -> float:
    if not isinstance(start, (int, float)):  # adding up lists copies each one again and again
        raise TemplateError("only numbers can be added up")
    total: float = filters.sync_do_sum(context.environment, iterable, attribute, start)
    return total


@pass_context
def _to_json(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if not (indent is None or (isinstance(indent, int) and indent <= 16)):
        raise TemplateLimitExceeded("an indent is too wide")
    budget = budget_of(context)
    pieces: list[str] = []
    length = 0
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    for piece in encoder.iterencode(value):
        length += len(piece)
        budget.spend()
        budget.check_size(length)
        pieces.append(piece)
    return "".join(pieces)
