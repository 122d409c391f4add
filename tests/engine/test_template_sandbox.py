"""The template language, and what a hostile template can't do with it."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from jinja2 import TemplateError

from nanochat.engine.template_budget import TemplateLimitExceeded, TemplateLimits
from nanochat.engine.template_sandbox import TemplateRefusal, literal_text, render_template
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
            ("{{ '**%s**' % 'x' }}{{ '{:*>3}*'.format(7) }}", "**x****7*"),
            ("{{ [3, 1] | sort | sum }}{{ (1, 2)[1:] }}{{ [1, 2] == [1, 2] }}{{ 'a' in 'abc' }}", "4(2,)TrueTrue"),
            ("{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{% for x in [1] %}{{ loop.cycle('c') }}{% endfor %}", "abc"),
            ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}{{ {'a': 1}.get('b', 2) }}", "a12"),
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
    "{{ '%-*d' % (1000000000, 1) }}",
    "{{ '%(a)*d' % {'a': 1} }}",
    "{{ '%.*f' % (1000000000, 1.5) }}",
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
    "{{ ('{0:9999}' * 9999).format('a') }}",
    "{{ '{0}{0}{0}{0}{0}{0}{0}{0}{0}{0}{0}{0}'.format('a' * 90000) }}",
    "{{ ('%(a)9999d' * 9999) % {'a': 1} }}",
    "{{ ('\n' * 90000) | indent(90000, blank=true) }}",
    "{{ ('a' * 90000).join(range(99999) | map('string')) }}",
    "{{ ('f' * 90000) | int(0, 16) // 3 }}",
    "{{ ([[0] * 1000] * 1000) | sum(start=[]) }}",
    "{% macro m() %}{% for a in range(99999) %}{{ 'a' * 90000 }}{% endfor %}{% endmacro %}{{ m() | length }}",
    "{% set x %}{% for a in range(99999) %}{{ 'a' * 90000 }}{% endfor %}{% endset %}{{ x | length }}",
    "{% set x %}{% for a in range(99999) %}" + "a" * 9000 + "{% endfor %}{% endset %}{{ x | length }}",
    "{{ ('&' * 90000)" + " | forceescape" * 50 + " | length }}",
    "".join("{% set a" + str(n) + " = 'a' * 90000 %}" for n in range(50)),
    "{% set b = [0] * 5000 %}" + "".join("{% set a" + str(n) + " = b[1:] %}" for n in range(50)),
    "{{ 'a'.encode() }}",
    "{{ (5).to_bytes(10 ** 10, 'big') }}",
    "{{ ('\t' * 9999).expandtabs(9999) }}",
    "{{ ('<!---->' * 9999) | striptags }}",
    "{{ (('<!---->' * 9999) | safe).striptags() }}",
]  # fmt: skip
LAUGHS = "{% set ns = namespace(x=[0] * 50) %}{% for n in range(60) %}{% set ns.x = WRAPPED %}{% endfor %}"
HOSTILE_SHARING = [
    LAUGHS.replace("WRAPPED", wrapped) + "{{ ns.x " + used + " }}"
    for wrapped, used in [
        ("[ns.x, ns.x]", ""),
        ("(ns.x, ns.x)", "~ 'a'"),
        ("{'a': ns.x, 'b': ns.x}", "| tojson"),
        ("dict(a=ns.x, b=ns.x)", "| string"),
        ("[ns.x] * 2", "== ns.x | list"),
        ("[ns.x] + [ns.x]", "| join"),
        ("[ns.x] | map('list') | list + [ns.x]", "| length"),
        ("{'a': ns.x.items(), 'b': ns.x.values()} if ns.x is mapping else {'a': ns.x}", "| string"),
        ("range(2) | map(attribute='none', default=ns.x) | list", "| string"),
    ]
]
"""A few lines that hold a list of lists of lists: written out, it would fill any memory."""
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

    @pytest.mark.parametrize("source", HOSTILE_SHARING)
    def test_a_value_is_as_large_as_it_would_be_written_out(self, source: str) -> None:
        with pytest.raises(TemplateLimitExceeded):
            render(source, TemplateLimits(seconds=20, characters=100_000))

    def test_a_namespace_that_holds_itself_is_not_written_out(self) -> None:
        assert render("{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}") == "<Namespace>"

    def test_what_is_given_is_not_held_against_the_template(self) -> None:
        """A long chat joined up message by message, by a template that was given little else."""
        source = "{% set ns = namespace(t='') %}{% for m in messages %}{% set ns.t = ns.t ~ m.content %}{% endfor %}{{ ns.t }}"
        messages = [{"role": "user", "content": "0123456789" * 50}] * 1000
        assert len(render(source, SMALL, messages=messages)) == 500_000

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
