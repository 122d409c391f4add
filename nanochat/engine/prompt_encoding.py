"""Encode a rendered prompt so that nobody but the template can write a control token.

A user who types ``<|im_end|>`` means those ten characters. Encoding the rendered text as a whole would make
them the model's end-of-turn token, and let a pasted text speak in another role. So control tokens inside
message contents are *guarded* before the template sees them, and guarded ones are encoded as plain text.
Knows tokenizers; nothing of templates or messages.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from nanochat.engine.panics import panics_refused
from nanochat.errors import InvalidOption, UnsupportedModel
from nanochat.sanitize import SURROGATES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Noncharacters: Unicode keeps them for a program's own use, so no message has a reason to contain one.
GUARD = "\ufdd0"
"""Stands inside a guarded control token."""
PLACEHOLDER = "\ufdd1"
"""Encloses the number of a message whose token ids stand for its text."""
MAX_TOKEN_CHARACTERS = 1024
"""Of an added token. Real ones have some dozen; the work below grows with the square of it."""
_NOTHING = "(?!)"  # a pattern that never matches
_RESERVED = re.compile(f"[{GUARD}{PLACEHOLDER}]|{SURROGATES.pattern}")


class PromptEncoder:
    """Guards control tokens in contents, and encodes rendered text.

    Control tokens are the tokenizer's special tokens, and those of its other added tokens that look like
    ``<|...|>`` or that the template writes itself (``<think>``, ``[INST]``). Added tokens that merely stand
    for frequent text, such as runs of spaces, are left alone.

    Args:
        tokenizer: a ``transformers`` tokenizer with a fast backend.
        template_text: the texts that the chat template writes.

    Raises:
        UnsupportedModel: an added token is absurdly long.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_text: str) -> None:
        self._backend = tokenizer.backend_tokenizer
        added = self._backend.get_added_tokens_decoder()
        longest = max((len(token.content) for token in added.values()), default=0)
        if longest > MAX_TOKEN_CHARACTERS:
            raise UnsupportedModel(
                f"The model's tokenizer has an added token of {longest:,} characters, which no real one has; "
                "choose another model."
            )
        self.special_tokens = frozenset(
            token.content for token in added.values() if token.special and token.content
        )
        soft = {
            token.content
            for token in added.values()
            if not token.special and _is_control(token.content, template_text)
        }
        self.control_tokens = self.special_tokens | soft
        self._control_ids = {
            token_id for token_id, token in added.items() if token.content in self.control_tokens
        }
        self._any_control = _alternatives(self.control_tokens)
        self._any_special = _alternatives(self.special_tokens)
        self._beginnings = {
            token[:length] for token in self.control_tokens for length in range(1, len(token))
        }
        self._longest = max(map(len, self.control_tokens), default=0)
        self._scanner = _Scanner(added, self.control_tokens)

    def guard(self, content: str, *, keep_template_tokens: bool = False) -> str:
        """A message's content as the template may see it.

        Args:
            content: any text.
            keep_template_tokens: leave control tokens that aren't special as they are. It is meant for the
                assistant's own text, where ``<think>`` is markup.
        """
        content = _RESERVED.sub("\ufffd", content)
        pattern = self._any_special if keep_template_tokens else self._any_control
        content = pattern.sub(lambda match: _guarded(match[0]), content)
        # The text that the template puts after it must not complete a control token either.
        if any(content[-length:] in self._beginnings for length in range(1, self._longest)):
            content += GUARD
        return content

    def encode(self, text: str, before: str = "") -> list[int]:
        """Token ids of rendered text, without tokens that the tokenizer would add at the ends.

        Args:
            text: as rendered, with guarded control tokens.
            before: the text before it, already encoded, in which no token may reach from one into the
                other. It matters to tokenizers that treat the beginning of a text in a special way.

        Raises:
            InvalidOption: the tokenizer can't write a guarded control token as plain text.
            UnsupportedModel: the tokenizer fails on the text.
        """
        if not text:
            return []
        with panics_refused():
            return self._encode_after(before, text)

    def _encode_after(self, before: str, text: str) -> list[int]:
        context = self._scanner.context(before)
        ids, offsets = self._encode(context + text)
        if not context:
            return ids
        first = bisect_left(offsets, len(context), key=lambda offset: offset[0])
        if first and offsets[first - 1][1] > len(context):  # a token reaches across
            return self._encode(text)[0]
        return ids[first:]

    def _encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids, and the characters from which to which each reaches in the text without guards."""
        if GUARD not in text:
            encoding = self._backend.encode(text, add_special_tokens=False)
            # A normalizer may make a control token of something that isn't written as one.
            found = sum(token_id in self._control_ids for token_id in encoding.ids)
            if found == len(self._any_control.findall(text)):
                return encoding.ids, encoding.offsets
        return self._encode_guarded(text)

    def _encode_guarded(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokenizer's own pipeline, step by step, with our choice of which added tokens count."""
        plain, spans = self._scanner.scan(text)
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        remaining = iter(spans)
        span = next(remaining, None)
        for piece, (start, end) in self._pre_tokenize(plain, spans):
            while span is not None and start >= span.end:
                span = next(remaining, None)
            if span is None or start < span.start:
                tokens = self._plain_ids(piece)
                ids += tokens
                offsets += [(start, end)] * len(tokens)
            elif not offsets or offsets[-1] != (span.start, span.end):
                ids.append(span.token_id)
                offsets.append((span.start, span.end))
        return ids, offsets

    def _pre_tokenize(self, plain: str, spans: Sequence[_Span]) -> Iterator[tuple[str, tuple[int, int]]]:
        """Normalized pieces with their characters in ``plain``; none reaches across the edge of a span."""
        from tokenizers import NormalizedString, PreTokenizedString

        cuts = [0, *(edge for span in spans for edge in (span.start, span.end)), len(plain)]

        def split(_: int, whole: NormalizedString) -> list[NormalizedString]:
            parts = (whole.slice((start, end)) for start, end in pairwise(cuts) if start < end)
            return [part for part in parts if part is not None]

        pieces = PreTokenizedString(plain)
        pieces.split(split)
        if self._backend.normalizer is not None:
            pieces.normalize(self._backend.normalizer.normalize)
        if self._backend.pre_tokenizer is not None:
            self._backend.pre_tokenizer.pre_tokenize(pieces)
        for piece, offsets, _ in pieces.get_splits("original", "char"):
            yield piece, offsets

    def _plain_ids(self, piece: str) -> list[int]:
        """Ids of one pre-tokenized piece; never a control token's."""
        model: Any = self._backend.model
        ids = [token.id for token in model.tokenize(piece)]
        if self._control_ids.isdisjoint(ids):
            return ids
        ids = [token.id for character in piece for token in model.tokenize(character)]
        if self._control_ids.isdisjoint(ids):
            return ids
        raise InvalidOption(f"The model reserves {piece!r} for itself; take it out of the message.")


@dataclass(frozen=True, slots=True)
class _Span:
    """Characters of a text that are one added token."""

    start: int
    end: int
    token_id: int


class _Scanner:
    """Finds added tokens in rendered text, the way the backend does: leftmost, then longest."""

    def __init__(self, added: Mapping[int, Any], control_tokens: frozenset[str]) -> None:
        self._tokens = {token.content: token for token in added.values() if token.content}
        self._id_of = {token.content: token_id for token_id, token in added.items() if token.content}
        self._control_tokens = control_tokens

    def scan(self, text: str) -> tuple[str, list[_Span]]:
        """The text without guards, and the added tokens in it."""
        parts: list[str] = []
        spans: list[_Span] = []
        length = position = 0
        for match in self._pattern.finditer(text):
            parts.append(text[position : match.start()].replace(GUARD, ""))
            parts.append(match[0].replace(GUARD, ""))
            start = length + len(parts[-2])
            length = start + len(parts[-1])
            if match.lastgroup == "written":
                content = match[0] if match[0] in self._id_of else match[0].strip()
                spans.append(_Span(start, length, self._id_of[content]))
            position = match.end()
        parts.append(text[position:].replace(GUARD, ""))
        return "".join(parts), spans

    def context(self, text: str) -> str:
        """What of a text matters to the encoding of the text after it: its last token or character."""
        ending = max((token for token in self._control_tokens if text.endswith(token)), key=len, default="")
        return ending or text[-1:].replace(GUARD, "")

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self._tokens, key=len, reverse=True)
        guarded = "|".join(
            re.escape(_guarded(text)) for text in longest_first if text in self._control_tokens
        )
        written = "|".join(_written(self._tokens[text]) for text in longest_first)
        return re.compile(f"(?P<guarded>{guarded or _NOTHING})|(?P<written>{written or _NOTHING})")


def _written(token: Any) -> str:
    """The pattern of an added token, with the neighbouring space that it swallows."""
    word = r"\b" if token.single_word else ""
    # Space before it is taken from its first character on, or each of a long run would be a new attempt.
    before, after = (r"(?:(?<!\s)\s++)?" if token.lstrip else ""), (r"\s*" if token.rstrip else "")
    return f"{before}{word}{re.escape(token.content)}{word}{after}"


def _is_control(content: str, template_text: str) -> bool:
    if not any(character.isalnum() for character in content):
        return False
    return bool(re.fullmatch(r"<[|｜].*[|｜]>", content)) or content in template_text


def _guarded(token: str) -> str:
    return GUARD + token if len(token) == 1 else token[0] + GUARD + token[1:]


def _alternatives(tokens: Collection[str]) -> re.Pattern[str]:
    """A pattern for any of the tokens, the longest first; it matches nothing when there is none."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or _NOTHING)


def placeholders(rendered: str) -> Iterator[str | int]:
    """Rendered text and the numbers of placeholders in it, in turn; texts may be empty."""
    for index, piece in enumerate(re.split(f"{PLACEHOLDER}([0-9]+){PLACEHOLDER}", rendered)):
        yield int(piece) if index % 2 else piece
