"""The template language, and what a hostile template can't do with it."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from jinja2 import TemplateError

from nanochat.engine.template_sandbox import (
    TemplateLimitExceeded,
    TemplateLimits,
    TemplateRefusal,
    literal_text,
    render_template,
)
from tests.tokenizer_zoo import CHATML, LLAMA3

NOW = datetime(2024, 2, 3, 4, 5)
SMALL = TemplateLimits(seconds=0.5, characters=100_000)


def render(source: str, limits: TemplateLimits | None = None, **variables: Any) -> str:
    return render_template(source, variables, now=NOW, limits=limits)


class TestLanguage:
    """What ``transformers`` gives to chat templates."""

    @pytest.mark.parametrize(
        ("source", "expected"),
        [
            ("{% if true %}\n  a\n{% endif %}\nb", "  a\nb"),  # trimmed blocks
            ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", "1"),
            ("{% for x in [1, 2] %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% endfor %}", "2"),
            ("{% for x in range(4) if x % 2 %}{{ x }}{% else %}none{% endfor %}", "13"),
            ("{% set ns = namespace(a=1) %}{% for x in [1, 2] %}{% set ns.a = ns.a + x %}{% endfor %}{{ ns.a }}", "4"),
            ("{{ {'b': 'é<', 'a': 1} | tojson }}", '{"b": "é<", "a": 1}'),
            ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
            ("{{ strftime_now('%d %b %Y') }}", "03 Feb 2024"),
            ("{% macro m(a) %}<{{ a }}{{ caller() if caller }}>{% endmacro %}{{ m('x') }}", "<x>"),
            ("{% macro m(a) %}<{{ caller(a) }}>{% endmacro %}{% call(b) m(1) %}{{ b }}!{% endcall %}", "<1!>"),
            ("{% set x %}a{{ 1 }}{% endset %}{{ x ~ 'b' ~ 2 }}", "a1b2"),
            ("{% set x | upper %}a{% endset %}{{ x }}", "A"),
            ("{% generation %}answer{% endgeneration %}", "answer"),
            ("{{ 'a-b'.split('-')[1] ~ 'xax'.replace('x', 'yy') ~ 'z' | replace('z', '') }}", "byyayy"),
            ("{{ ['a', 'b'] | join(', ') }}{{ ','.join(['c', 'd']) }}", "a, bc,d"),
            ("{{ [{'k': 1}, {'k': 2}] | map(attribute='k') | join('+') }}", "1+2"),
            ("{{ 'a\nb' | indent(2) }}{{ '%s-%d' % ('x', 3) }}{{ '{:>3}'.format(7) }}", "a\n  bx-3  7"),
            ("{{ 2 * 'ab' }}{{ [0] * 2 }}{{ 2 ** 10 }}{{ 7 // 2 }}", "abab[0, 0]10243"),
            ("{{ missing }}{{ missing is defined }}", "False"),
            ("{% for a in [[1, [2]]] recursive %}{{ a if a is number else loop(a) }}{% endfor %}", "12"),
        ],
    )  # fmt: skip
    def test_renders(self, source: str, expected: str) -> None:
        assert render(source) == expected

    def test_a_refusal_carries_its_words(self) -> None:
        with pytest.raises(TemplateRefusal, match="no system role"):
            render("{{ raise_exception('no system role') }}")

    @pytest.mark.parametrize("source", ["{{", "{% for %}", "{{ 1/0 }}", "{{ none.x.y }}", "{{ 'a' + 1 }}"])
    def test_a_mistake_is_a_template_error(self, source: str) -> None:
        with pytest.raises(TemplateError):
            render(source)

    def test_texts_that_a_template_writes(self) -> None:
        assert "<|im_start|>" in literal_text(CHATML)
        assert "<|eot_id|>" in literal_text(LLAMA3)
        assert literal_text("{% broken") == ""


HOSTILE_LOOPS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "{% macro f() %}{{ caller() }}{% endmacro %}{% macro m(n) %}{% if n %}{% call f() %}{{ m(n - 1) }}{{ m(n - 1) }}"
    "{% endcall %}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "{% block a %}{{ self.a() }}{% endblock %}",
]
HOSTILE_GROWTH = [
    "{{ 'a' * 10 ** 9 }}",
    "{{ 1000000000 * 'a' }}",
    "{{ [0] * 10 ** 9 }}",
    "{{ 9 ** (9 ** 9) }}",
    "{% set ns = namespace(n=3) %}{% for a in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "{% set ns = namespace(s='aa') %}{% for a in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s='aa') %}{% for a in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s='aa') %}{% for a in range(99) %}{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}"
    "{% set ns.s = x %}{% endfor %}",
    "{% set ns = namespace(s='aa') %}{% for a in range(99) %}{% set x | upper %}{{ ns.s }}{{ ns.s }}{% endset %}"
    "{% set ns.s = x %}{% endfor %}",
    "{% set ns = namespace(s='aa') %}{% for a in range(99) %}{% set ns.s = ns.s.replace('a', 'aa') %}{% endfor %}",
    "{% set ns = namespace(s='aa') %}{% for a in range(99) %}{% set ns.s = ns.s | replace('a', 'aa') %}{% endfor %}",
    "{% set ns = namespace(s='aa') %}{% for a in range(99) %}{% set ns.s = [ns.s, ns.s] | join %}{% endfor %}",
    "{% set ns = namespace(s='aa') %}{% for a in range(99) %}{% set ns.s = ns.s.join([ns.s] * 9) %}{% endfor %}",
    "{% macro m(s) %}{{ s }}{{ s }}{% endmacro %}{% set ns = namespace(s='aa') %}"
    "{% for a in range(99) %}{% set ns.s = m(ns.s) %}{% endfor %}",
    "{% for a in range(99999) %}aaaaaaaaaa{% endfor %}",
    "{{ 'a'.center(10 ** 9) }}",
    "{{ 'a'.ljust(10 ** 9) }}",
    "{{ 'a'.ljust(width=10 ** 9) }}",
    "{{ '\t'.expandtabs(10 ** 9) }}",
    "{{ 'a' | center(10 ** 9) }}",
    "{{ 'a\nb' | indent(10 ** 9) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%*d' | format(1000000000, 1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=1000000000) }}",
    "{{ '{:{w[0]}}'.format(1, w=['1000000000']) }}",
    "{{ '{:{w}}'.format_map({'w': 1000000000}) }}",
    "{{ [1] | tojson(indent=1000000000) }}",
    "{{ strftime_now('%1000000000Y') }}",
    "{{ 'a'.translate({97: 'a' * 90000}) }}",
    "{{ range(10 ** 9) | list }}",
    "{{ lipsum(n=100000) }}",
    "{{ 'a' | wordwrap(1, wrapstring='a' * 90000) }}",
    "{{ 1.5 | round(10 ** 9, 'floor') }}",
]  # fmt: skip
HOSTILE_REACH = [
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__closure__ }}",
    "{{ (1).__class__.__base__.__subclasses__() }}",
    "{{ namespace(__class__=1) }}",
    "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'system'}) }}",
    "{{ self._TemplateReference__context }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends 'x' %}",
    "{{ cycler.__init__.__globals__.os.popen('id') }}",
]


class TestHostileTemplates:
    """None runs for long, fills the memory, or reaches Python."""

    @pytest.mark.parametrize("source", HOSTILE_LOOPS)
    def test_endless_work_ends(self, source: str) -> None:
        with pytest.raises(TemplateLimitExceeded):
            render(source, SMALL)

    @pytest.mark.parametrize("source", HOSTILE_GROWTH)
    def test_texts_do_not_grow_without_end(self, source: str) -> None:
        with pytest.raises(TemplateError):
            render(source, SMALL)

    @pytest.mark.parametrize("source", HOSTILE_REACH)
    def test_nothing_beyond_the_template_is_reached(self, source: str) -> None:
        messages = [{"role": "user", "content": "x"}]
        try:
            text = render(source, SMALL, messages=messages)
        except TemplateError:
            pass
        else:
            assert text == ""  # an undefined attribute is nothing
        assert messages == [{"role": "user", "content": "x"}]

    def test_a_template_that_is_far_too_long(self) -> None:
        with pytest.raises(TemplateLimitExceeded):
            render("a" * (1 << 21))

    def test_one_that_nests_too_deeply(self) -> None:
        with pytest.raises(TemplateError):
            render("{{ " + "(" * 50_000 + ")" * 50_000 + " }}")
        with pytest.raises(TemplateError):
            render("{% if 1 %}" * 5000 + "{% endif %}" * 5000)

    def test_the_budget_is_out_of_its_reach(self) -> None:
        source = "{% set spend = 1 %}{% set environment = 1 %}{% set context = 1 %}" + HOSTILE_LOOPS[0]
        with pytest.raises(TemplateLimitExceeded):
            render(source, SMALL)
