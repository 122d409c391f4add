"""Builds tokenizer.json, tokenizer_config.json and generation_config.json from a GGUF file's metadata.

GGUF stores a vocabulary, merges or scores, and the *name* of the rule that splits text before merging;
the rules themselves are those of the models' own tokenizer.json files. A name that isn't known is an
error, because a guess would give answers that are subtly wrong. Knows nothing of tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from nanochat.engine.models.config_reader import ConfigReader
from nanochat.engine.prompt_encoding import MAX_TOKEN_CHARACTERS

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""What SentencePiece writes for a space."""

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class _Splitting:
    """How a byte-level tokenizer cuts text into the pieces within which it merges."""

    pattern: str | None = None
    """None: GPT-2's."""
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    """A piece that is a token as a whole is taken as it is."""
    adds_bos: bool = False
    """When the file doesn't say."""


_GPT2 = _Splitting()
_LLAMA3_SPLITTING = _Splitting(_LLAMA3, ignore_merges=True, adds_bos=True)
_SPLITTINGS: Mapping[str, _Splitting] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _Splitting(single_digits=True),
    "qwen2": _Splitting(_QWEN2, nfc=True),
    "llama-bpe": _LLAMA3_SPLITTING,
    "llama3": _LLAMA3_SPLITTING,
    "llama-v3": _LLAMA3_SPLITTING,
    # The same rule in models that add no BOS, SmolLM3 among them.
    "smaug-bpe": _Splitting(_LLAMA3, ignore_merges=True),
    "tekken": _Splitting(_TEKKEN, ignore_merges=True, adds_bos=True),
}

_END_OF_TURN_TEXTS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>")
"""Tokens that end an answer in chat models whose file names another one as its end of sequence."""


def write_tokenizer(metadata: ConfigReader, target: Path) -> None:
    """Write the three files to the folder ``target``.

    Raises:
        UnsupportedModel: the kind of tokenizer or its splitting rule isn't known, or its parts don't fit.
    """
    vocabulary = _Vocabulary(metadata)
    kind = metadata.text("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer, adds_bos = _byte_level(metadata, vocabulary)
    elif kind == "llama":
        tokenizer, adds_bos = _sentencepiece(metadata, vocabulary)
    else:
        raise metadata.error(f"its tokenizer is of the kind {kind[:40]!r}; supported: gpt2, llama")
    vocabulary.add_special_tokens(tokenizer, spaces_as_blocks=kind == "llama")
    bos, eos = vocabulary.special("bos"), vocabulary.special("eos")
    unknown, padding = vocabulary.special("unknown"), vocabulary.special("padding") or eos
    adds_bos = metadata.flag("tokenizer.ggml.add_bos_token", default=adds_bos) and bos is not None
    adds_eos = metadata.flag("tokenizer.ggml.add_eos_token") and eos is not None
    if adds_bos or adds_eos:
        tokenizer.post_processor = _surround(bos if adds_bos else None, eos if adds_eos else None)
    tokenizer.save(str(target / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos and bos.text,
        "eos_token": eos and eos.text,
        "unk_token": unknown and unknown.text,
        "pad_token": padding and padding.text,
        "add_bos_token": adds_bos,
        "add_eos_token": adds_eos,
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata.text("tokenizer.chat_template", default="") or None,
    }
    _write_json(target / "tokenizer_config.json", settings)
    generation = {
        "bos_token_id": bos and bos.index,
        "eos_token_id": vocabulary.end_ids(),
        "pad_token_id": padding and padding.index,
    }
    _write_json(target / "generation_config.json", generation)


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    present = {name: value for name, value in values.items() if value is not None}
    path.write_text(json.dumps(present, indent=2, ensure_ascii=False), encoding="utf-8")


@dataclass(frozen=True, slots=True)
class _Special:
    text: str
    index: int


class _Vocabulary:
    """Tokens by id, their types and the special ones."""

    def __init__(self, metadata: ConfigReader) -> None:
        self._metadata = metadata
        self.tokens = metadata.texts("tokenizer.ggml.tokens") or ()
        types = metadata.integers("tokenizer.ggml.token_type")
        self.types = types or (_TokenType.NORMAL,) * len(self.tokens)
        if not self.tokens or len(self.types) != len(self.tokens):
            raise metadata.error("its vocabulary is incomplete")
        if (longest := max(map(len, self.tokens))) > MAX_TOKEN_CHARACTERS:
            raise metadata.error(f"its vocabulary holds a token of {longest:,} characters")

    def ids(self, *, spaces_as_blocks: bool) -> dict[str, int]:
        """Each token's id; with ``spaces_as_blocks``, written as SentencePiece does."""
        tokens = (token.replace(" ", _SPACE) if spaces_as_blocks else token for token in self.tokens)
        ids = {token: index for index, token in enumerate(tokens)}
        if len(ids) != len(self.tokens):
            raise self._metadata.error("its vocabulary holds a token twice")
        return ids

    def add_special_tokens(self, tokenizer: Tokenizer, *, spaces_as_blocks: bool) -> None:
        """Make control and user-defined tokens indivisible; only the former are left out of decoded text."""
        added = []
        for token, kind in zip(self.tokens, self.types, strict=True):
            if kind not in (_TokenType.CONTROL, _TokenType.UNKNOWN, _TokenType.USER_DEFINED) or not token:
                continue
            text = token.replace(" ", _SPACE) if spaces_as_blocks else token
            added.append(AddedToken(text, special=kind != _TokenType.USER_DEFINED, normalized=False))
        tokenizer.add_tokens(added)

    def special(self, name: str) -> _Special | None:
        """The token that ``tokenizer.ggml.<name>_token_id`` names."""
        key = f"tokenizer.ggml.{name}_token_id"
        if self._metadata.get(key) is None:
            return None
        index = self._metadata.integer(key, 0, len(self.tokens) - 1)
        return _Special(self.tokens[index], index)

    def end_ids(self) -> list[int]:
        """Every token that ends an answer."""
        named = [token.index for name in ("eos", "eot", "eom") if (token := self.special(name))]
        known = [
            index
            for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind == _TokenType.CONTROL and token in _END_OF_TURN_TEXTS
        ]
        return list(dict.fromkeys([*named, *known]))


def _byte_level(metadata: ConfigReader, vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    name = metadata.text("tokenizer.ggml.pre", default="")
    if name not in _SPLITTINGS:
        raise metadata.error(
            f"it splits text by the rule {name[:40]!r}, which isn't known; supported: {', '.join(_SPLITTINGS)}. "
            "Use the model's safetensors version"
        )
    splitting = _SPLITTINGS[name]
    listed = metadata.texts("tokenizer.ggml.merges") or ()
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in listed)]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids(spaces_as_blocks=False),
            merges=merges,
            ignore_merges=splitting.ignore_merges,
        )
    )
    if splitting.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if splitting.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if splitting.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(splitting.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, splitting.adds_bos


def _sentencepiece(metadata: ConfigReader, vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    scores = metadata.numbers("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(vocabulary.tokens):
        raise metadata.error("its vocabulary has no scores")
    ids = vocabulary.ids(spaces_as_blocks=True)
    unknown = vocabulary.special("unknown")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=_merges(ids, scores, vocabulary.types),
            unk_token=unknown and unknown.text,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = metadata.flag("tokenizer.ggml.add_space_prefix", default=True)
    to_block = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), to_block]) if prefixed else to_block
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixed:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer, True


def _merges(ids: dict[str, int], scores: tuple[float, ...], types: tuple[int, ...]) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose joint token scores best; as a ranked list of all such pairs.

    User-defined tokens (Gemma's runs of spaces) come before any merge there, the longest first.
    """
    unmergeable = (_TokenType.UNKNOWN, _TokenType.CONTROL, _TokenType.UNUSED, _TokenType.BYTE)
    ranked: list[tuple[float, float, int, int]] = []
    tokens = list(ids)
    for token, index in ids.items():
        if types[index] in unmergeable:
            continue
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is None or right is None:
                continue
            if types[index] == _TokenType.USER_DEFINED:
                ranked.append((float("-inf"), -cut, left, right))
            else:
                ranked.append((-scores[index], index, left, right))
    return [(tokens[left], tokens[right]) for _, _, left, right in sorted(ranked)]


def _surround(bos: _Special | None, eos: _Special | None) -> processors.TemplateProcessing:
    """Put ``bos`` before and ``eos`` after a text, and after each of a pair."""
    before, after = [bos.text] if bos else [], [eos.text] if eos else []
    return processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *before, "$B:1", *after],
        special_tokens=[(token.text, token.index) for token in (bos, eos) if token],
    )
