"""Ways to damage a file: bytes, JSON values, chat templates, TOML lines. Knows nothing of who reads them.

Everything comes from the ``random.Random`` it is given, so that a file can be made again from its number.
"""

from __future__ import annotations

import copy
import json
import random
import struct
from typing import Any

_EDITS = (1, 1, 1, 2, 2, 3, 4)
_NUMBERS = (0, 1, 2, 3, 7, 127, 128, 255, 256, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
_FRAGMENTS = (
    b"\x00" * 9,
    b"\xff" * 9,
    b"\xed\xa0\x80",  # half a surrogate pair
    b"\xef\xbb\xbf",
    b"\x80\x80",
    b"[" * 3000,
    b'{"a":' * 3000,
    b"9" * 6000,
    b'"',
    b"\\u0000",
    b"\\ud800",
    b"NaN",
    b"1e999",
    b"\r\n",
    b"../../../../etc/passwd",
)
EVIL_CODE = "__import__('os').system('touch canary')"

_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 7, 64, 2**31, 2**32, 2**63, 2**64, 10**400),
    *(0.0, -0.0, 0.5, 1e-320, 1e308, float("nan"), float("inf"), float("-inf")),
    *("", "a", " ", "\x00", "\ud800", "\x1b[2J", "\u202e", "🐍" * 40, "x" * 100_000, "9" * 5000),
    *("../../../../etc/passwd", "/dev/zero", "/proc/self/mem", "file:///etc/passwd", "\\\\host\\share"),
    *(
        EVIL_CODE,
        "{{ " + EVIL_CODE + " }}",
        "modeling_evil.Model",
        "(a+)+$",
        "(" * 500,
        "[",
        "auto",
        "float8",
    ),
    *([], {}, [[]], [None], [0] * 2000, ["a"] * 2000, {"a": {"a": {}}}, {"": ""}, {"__class__": EVIL_CODE}),
    {"AutoConfig": "modeling_evil.Model", "AutoTokenizer": "modeling_evil.Model"},
    {"quant_method": "gptq", "bits": 4},
    {"rope_type": "yarn", "factor": 1e300, "original_max_position_embeddings": 1},
    {"type": "Sequence", "normalizers": [], "pretokenizers": [], "decoders": [], "processors": []},
    {"type": "Split", "pattern": {"Regex": "(a|a?)+$"}, "behavior": "Isolated", "invert": False},
    {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Removed", "invert": True},
    {"type": "Replace", "pattern": {"Regex": ".?"}, "content": "y" * 10_000},
    {"type": "Prepend", "prepend": "z" * 100_000},
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    {"type": "Unigram", "unk_id": 9, "vocab": [["a", -1.0], ["b", float("-1e300")]], "byte_fallback": True},
    {"type": "WordPiece", "unk_token": "?", "continuing_subword_prefix": "", "vocab": {"a": 2**32 - 1}},
    {"direction": "Left", "max_length": 0, "strategy": "LongestFirst", "stride": 9},
    {"strategy": {"Fixed": 10**9}, "direction": "Left", "pad_id": 9, "pad_type_id": 0, "pad_token": "p"},
)
_KEYS = (
    "auto_map",
    "trust_remote_code",
    "quantization_config",
    "rope_scaling",
    "text_config",
    "chat_template",
)

_TEMPLATES = (
    "{% for i in range(10**9) %}{{ i }}{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ 'a'.ljust(10**10) }}",
    "{{ '%1000000000s' % 'a' }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ 2 ** 10 ** 8 }}",
    "{% set x = 'ab' %}{% for i in range(99) %}{% set x = x + x %}{{ x }}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% macro m(x) %}{{ m([x, x]) }}{% endmacro %}{{ m([]) }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch canary') }}",
    "{{ lipsum.__globals__['os'].popen('touch canary').read() }}",
    "{{ messages.__class__.__init__.__globals__ }}",
    "{{ (messages|attr('__class__')) }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ messages.append(1) }}{{ messages.clear() }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{% extends '/etc/passwd' %}",
    "{{ messages|map('string')|join('x' * 10**8) }}",
    "{{ range(10**9)|list|length }}",
    "{{ (range(10**7)|list) + (range(10**7)|list) }}",
    "{{ messages|tojson(indent=10**9) }}",
    "{{ 'a'|indent(10**9) }}{{ 'a'|center(10**9) }}",
    "{{ ('a' * 10**6)|replace('a', 'b' * 10**6) }}",
    "{{ ('a,' * 10**6).split(',')|sort|join }}",
    "{{ strftime_now('%Y' * 10**7) }}",
    "{{ raise_exception('no') }}",
    "{{ raise_exception('x' * 10**6) }}",
    "{{ undefined.field.field }}",
    "{{ messages[10**9] }}{{ messages['a']['b'] }}",
    "{{ 1 // 0 }}",
    "{{ '\ud800\x1b[2J\x00' }}",
    "{% for",
    "{{ '" + "(" * 5000 + " }}",
    "{{ " + "(" * 300 + "1" + ")" * 300 + " }}",
    "{% if 1 %}" * 60 + "{% endif %}" * 60,
    "{{ " + "+".join(["1"] * 20_000) + " }}",
    "x" * 3_000_000,
    "{# comment #}",
    "",
)
_PIECES = (
    *(
        "{{",
        "}}",
        "{%",
        "%}",
        "{#",
        "#}",
        "{%-",
        "-%}",
        " for ",
        " in ",
        " if ",
        "endfor",
        "endif",
        "set x =",
    ),
    *(
        "messages",
        "message['role']",
        "message['content']",
        "loop.index",
        "|trim",
        "|upper",
        "|tojson",
        "range(",
    ),
    *("10**9", " * ", " ~ ", "namespace()", "x.y", "[::-1]", "[0]", "'", '"', "\\", "add_generation_prompt"),
    *(
        "raise_exception(",
        "strftime_now(",
        "|batch(9)",
        "|groupby('role')",
        "|pprint",
        "|wordwrap(1)",
        "is none",
    ),
)

_TOML_LINES = (
    "system = 3",
    'system = "a"',
    "system = '''" + "x" * 100_000 + "'''",
    "[engine]",
    "[sampling]",
    "[[engine]]",
    "[engine.model]",
    "[unknown]",
    'model = "/dev/zero"',
    "num_kv_blocks = 99999999999999999999999999",
    "num_kv_blocks = 0",
    "block_size = 1.5",
    "max_model_len = -1",
    "max_num_seqs = true",
    "temperature = nan",
    "temperature = -inf",
    "top_p = 1e999",
    "top_k = 0xffffffffffffffffffff",
    "seed = " + "9" * 5000,
    "stop = [" * 2000,
    "stop = 'a'",
    "stop = ['']",
    "stop = [1, {a = 1}]",
    "logprobs = 1979-05-27T07:32:00Z",
    "max_tokens = 07:32:00",
    'device = "\\u0000"',
    'device = "\\ud800"',
    "dtype = {a = {b = {c = 1}}}",
    "a" + ".a" * 3000 + " = 1",
    "prefix_caching = 'yes'",
    "gpu_memory_utilization = 1e308",
)


def damage_bytes(rng: random.Random, data: bytes, end: int | None = None) -> bytes:
    """One to four edits of the first ``end`` bytes, all of them by default."""
    body = bytearray(data)
    for _ in range(rng.choice(_EDITS)):
        limit = min(len(body), end if end is not None else len(body))
        at = rng.randrange(limit + 1)
        match rng.randrange(9):
            case 0 if at < len(body):
                body[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(body):
                body[at] = rng.randrange(256)
            case 2:
                body[at:at] = rng.randbytes(rng.randint(1, 40))
            case 3:
                del body[at : at + rng.randint(1, 60)]
            case 4:
                body[at:at] = body[at : at + rng.randint(1, 400)]
            case 5:
                body[at:at] = rng.choice(_FRAGMENTS)
            case 6:
                body[at : at + 8] = struct.pack("<Q", rng.choice(_NUMBERS))
            case 7:
                body[at : at + 4] = struct.pack("<I", rng.choice(_NUMBERS) & 0xFFFFFFFF)
            case 8 if rng.random() < 0.3:
                del body[at:]
    return bytes(body)


def damage_value(rng: random.Random, value: Any) -> Any:
    """A JSON value with one to four of its parts changed."""
    holder = {"": copy.deepcopy(value)}
    for _ in range(rng.choice(_EDITS)):
        container, key = _somewhere(rng, holder)
        match rng.randrange(6):
            case 0 | 1 | 2:
                container[key] = copy.deepcopy(rng.choice(_VALUES))
            case 3 if container is not holder:
                del container[key]
            case 4:
                size = 1000 // (len(json.dumps(container[key])) // 100 + 1)
                container[key] = [copy.deepcopy(container[key])] * rng.choice((1, 2, size))
            case 5 if isinstance(container[key], dict):
                container[key][rng.choice(_KEYS)] = copy.deepcopy(rng.choice(_VALUES))
    return holder[""]


def _somewhere(rng: random.Random, holder: Any) -> tuple[Any, Any]:
    """A container and one of its keys, any level equally likely."""
    container: Any = holder
    key: Any = ""
    while isinstance(container[key], (dict, list)) and container[key] and rng.random() < 0.75:
        container = container[key]
        key = rng.choice(list(container)) if isinstance(container, dict) else rng.randrange(len(container))
    return container, key


def damage_json(rng: random.Random, value: Any) -> bytes:
    """A JSON file with changed values, damaged text, or both."""
    how = rng.random()
    if how < 0.85:
        value = damage_value(rng, value)
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
    data = text.encode("utf-8", errors="surrogatepass")
    return damage_bytes(rng, data) if how > 0.75 else data


def damage_template(rng: random.Random, template: str) -> str:
    """A chat template that is hostile, or a good one with pieces put in and taken out."""
    if rng.random() < 0.4:
        hostile = rng.choice(_TEMPLATES)
        return hostile if rng.random() < 0.5 else template + hostile
    for _ in range(rng.choice(_EDITS)):
        at = rng.randrange(len(template) + 1)
        if rng.random() < 0.3:
            template = template[:at] + template[at + rng.randint(1, 20) :]
        else:
            template = template[:at] + rng.choice(_PIECES) + template[at:]
    return template


def damage_toml(rng: random.Random, data: bytes) -> bytes:
    """Settings with hostile lines put anywhere, and damaged bytes."""
    lines = data.decode().splitlines()
    for _ in range(rng.randint(0, 3)):
        lines.insert(rng.randrange(len(lines) + 1), rng.choice(_TOML_LINES))
    text = "\n".join(lines).encode()
    return damage_bytes(rng, text) if rng.random() < 0.6 else text
