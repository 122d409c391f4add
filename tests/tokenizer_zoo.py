"""Small tokenizers of each kind that models use, and chat templates in the manner of well-known models.

The vocabularies are trained here on a few lines, so every tokenizer has real merges; the pipelines around
them (normalizer, pre-tokenizer, decoder) are those of the families they are named after.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The capital of France is Paris, and the capital of Japan is Tokyo.",
    "What is the weather like today? It is sunny, with 23 degrees in the shade.",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))\n",
    "You are a helpful assistant. Answer the question of the user in one sentence.",
    "你好，世界。今天天气很好。 مرحبا بالعالم Привет, мир! Grüße aus Köln, naïve café",
    "Emoji: 😀 👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 and the words around them.",
    "user assistant system think answer question hello hello hello yes no maybe",
] * 4

TEXTS = [
    "Hello",
    " leading and trailing \n",
    "The capital of France is Paris.",
    "line one\nline two\n\n\n  indented\tand\ttabbed",
    "👩‍👩‍👧‍👦 and 🏳️‍🌈 and 👍🏽",
    "你好，世界 مرحبا بالعالم Привет",
    "e\u0301 and \u00e9, zero\u200bwidth, \u202eright to left",
    "1234567890 + 3.14 = x",
    "a",
    "",
    "   ",
]
"""Texts that tokenizers are known to stumble over."""

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UNK = ["<unk>", "<s>", "</s>"]


@cache
def _trained(byte_level: bool) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Tokens in the order of their ids, and merges."""
    tokenizer = Tokenizer(models.BPE())
    alphabet = []
    if byte_level:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("▁?[^▁]+"), "isolated")
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, show_progress=False, limit_alphabet=300
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return tuple(sorted(model["vocab"], key=model["vocab"].get)), tuple(map(tuple, model["merges"]))


def _byte_level() -> Tokenizer:
    """Qwen, Llama 3, SmolLM2: bytes as characters, so any text can be written."""
    tokens, merges = _trained(byte_level=True)
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece() -> Tokenizer:
    """Llama 2, Mistral, Gemma: words with a visible space, and bytes for what the vocabulary lacks."""
    learned, merges = _trained(byte_level=False)
    tokens = dict.fromkeys([*_UNK, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *learned])
    model = models.BPE(
        vocab={t: i for i, t in enumerate(tokens)},
        merges=list(merges),
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def _add(tokenizer: Tokenizer, special: list[str], plain: tuple[str, ...] = ()) -> None:
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])


def _begin_with(tokenizer: Tokenizer, bos: str) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )


def _qwen3() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = _byte_level()
    tokenizer.normalizer = normalizers.NFC()
    _add(
        tokenizer,
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        ("<think>", "</think>", "<|fim_prefix|>", "<tool_call>"),
    )
    return tokenizer, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": QWEN3}


def _smollm2() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = _byte_level()
    _add(tokenizer, ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"])
    return tokenizer, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHATML}


def _llama3() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = _byte_level()
    _add(
        tokenizer,
        ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    )
    _begin_with(tokenizer, "<|begin_of_text|>")
    settings = {"clean_up_tokenization_spaces": True, "chat_template": LLAMA3}
    return tokenizer, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", **settings}


def _llama2() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = _sentencepiece()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    _add(tokenizer, _UNK)
    _begin_with(tokenizer, "<s>")
    return tokenizer, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": LLAMA2}


def _mistral() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = _sentencepiece()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    _add(tokenizer, [*_UNK, "[INST]", "[/INST]"])
    _begin_with(tokenizer, "<s>")
    return tokenizer, {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "chat_template": MISTRAL,
    }


def _gemma() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = _sentencepiece()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    _add(tokenizer, [*_UNK, "<start_of_turn>", "<end_of_turn>"], ("\n\n", "\n\n\n", "▁▁", "<table>"))
    _begin_with(tokenizer, "<s>")
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": GEMMA}
    return tokenizer, settings


def _metaspace() -> tuple[Tokenizer, dict[str, Any]]:
    """A decoder of its own kind, and no chat template."""
    tokenizer = _sentencepiece()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    _add(tokenizer, _UNK)
    return tokenizer, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


_ZOO: dict[str, Callable[[], tuple[Tokenizer, dict[str, Any]]]] = {
    "qwen3": _qwen3,
    "smollm2": _smollm2,
    "llama3": _llama3,
    "llama2": _llama2,
    "mistral": _mistral,
    "gemma": _gemma,
    "metaspace": _metaspace,
}
NAMES = tuple(_ZOO)
CHAT_NAMES = tuple(name for name in NAMES if name != "metaspace")


def make_tokenizer(name: str, **overrides: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of the zoo as ``transformers`` gives it; keyword arguments replace its settings."""
    tokenizer, settings = _ZOO[name]()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **(settings | overrides))


def write_tokenizer(folder: Path, name: str, **overrides: Any) -> Path:
    """The files of a tokenizer of the zoo in a model folder; keyword arguments replace its settings."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, settings = _ZOO[name]()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | overrides))
    return folder


CHATML = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\\nYou are a helpful assistant made for tests.<|im_end|>\\n' }}{% endif %}\
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""SmolLM2 and Qwen2.5: a default system prompt, contents as they are."""

QWEN3 = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_question=messages|length - 1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set ns.last_question = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- set thoughts = '' %}
        {%- if '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_question and thoughts %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thoughts + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
"""Leaves out the reasoning of earlier answers; can open and close an empty one in the prompt."""

LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{{- 'Today Date: ' + date_string + '\\n\\n' }}
{{- system_message + '<|eot_id|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim }}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
"""Writes the date, and trims contents."""

LLAMA2 = """\
{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}\
{% else %}{% set system = false %}{% set rest = messages %}{% endif %}\
{% for message in rest %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if loop.first and system %}{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}\
{% else %}{% set content = message['content'] %}{% endif %}\
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}\
{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""
"""The system message lies in the first question; markers that are no tokens; roles must alternate."""

MISTRAL = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}{%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After the optional system message, roles must alternate') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.last and system is defined %}
            {{- '[INST] ' + system + '\\n\\n' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + message['content'] + '[/INST]' }}
        {%- endif %}
    {%- else %}
        {{- ' ' + message['content'] + eos_token }}
    {%- endif %}
{%- endfor %}
"""
"""The system message moves along with the last question."""

GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}\
{% endif %}{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}\
{% endif %}{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
"""No system role, another name for the assistant, trimmed contents."""
