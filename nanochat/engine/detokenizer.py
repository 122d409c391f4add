"""Token ids of one request into text, as they come: exact, linear, and never a piece too early.

The concatenated pieces are what ``tokenizer.decode(ids, skip_special_tokens=...,
clean_up_tokenization_spaces=False)`` gives for all generated ids at once, cut before the first stop string.
Knows tokenizers; nothing of requests, engines or screens.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"
_FALLBACK_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class Detokenizer:
    """The text of one request, piece by piece.

    Args:
        tokenizer: a ``transformers`` tokenizer with a fast backend.
        stop: texts that end the answer. The one completed first wins, the longest when several end at the
            same character; neither it nor any part of it is ever given out.
        skip_special_tokens: leave out special tokens such as an end-of-turn marker.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._decoder = _decoder_for(tokenizer, skip_special_tokens)
        self._stops = [_StopString(text) for text in stop]
        self._held = ""  # decoded, but it may be the beginning of a stop string
        self._pieces: list[str] = []
        self.stopped = False
        """Whether a stop string was found; tokens pushed later are ignored."""
        self.num_tokens = 0
        """Tokens taken in, up to and including the one that completed a stop string."""

    @property
    def text(self) -> str:
        """All text given out so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    @property
    def is_waiting(self) -> bool:
        """Whether the last token left a character unfinished."""
        return self._decoder.is_waiting

    def push(self, token_ids: Sequence[int]) -> str:
        """Take generated ids and return the new text that is certain.

        Held back are an unfinished character and whatever may be the beginning of a stop string.
        """
        pieces = []
        for token_id in token_ids:
            if self.stopped:
                break
            self.num_tokens += 1
            pieces.append(self._release(self._decoder.push(token_id)))
        return self._emit("".join(pieces))

    def flush(self) -> str:
        """What is held back, once no more tokens will come; empty after a stop string."""
        if self.stopped:
            return ""
        piece = self._release(self._decoder.finish())
        if not self.stopped:
            piece, self._held = piece + self._held, ""
        return self._emit(piece)

    def _emit(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece

    def _release(self, decoded: str) -> str:
        """The part of held and new text that can't belong to a stop string; sets ``stopped``."""
        if not self._stops or not decoded:
            return decoded
        text = self._held + decoded
        for end in range(len(self._held), len(text)):
            character = text[end]
            completed = [stop.length for stop in self._stops if stop.push(character)]
            if completed:
                self.stopped, self._held = True, ""
                return text[: end + 1 - max(completed)]
        keep = max(stop.matched for stop in self._stops)
        certain = len(text) - keep
        self._held = text[certain:]
        return text[:certain]


class TokenSpeller:
    """The bytes that single tokens stand for, wherever in a text: a token may be a part of a character."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._decoder = _decoder_for(tokenizer, skip_special_tokens=False)

    def spell(self, token_id: int) -> bytes:
        """Empty for an id that is no token."""
        return self._decoder.spell(token_id)


class _StopString:
    """Knuth-Morris-Pratt: how much of one stop string the text ends with, in constant time a character."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.length = len(text)
        self.matched = 0
        self._fallback = [0] * len(text)  # length of the longest border of each prefix
        border = 0
        for index in range(1, len(text)):
            while border and text[index] != text[border]:
                border = self._fallback[border - 1]
            if text[index] == text[border]:
                border += 1
            self._fallback[index] = border

    def push(self, character: str) -> bool:
        """Advance by one character; True when the stop string is complete."""
        while self.matched and self._text[self.matched] != character:
            self.matched = self._fallback[self.matched - 1]
        if self._text[self.matched] == character:
            self.matched += 1
        return self.matched == self.length


class _Decoder(Protocol):
    @property
    def is_waiting(self) -> bool:
        """Whether a token's text isn't certain yet."""

    def push(self, token_id: int) -> str:
        """Text that this token makes certain."""

    def finish(self) -> str:
        """The text that was waiting for another token."""

    def spell(self, token_id: int) -> bytes:
        """The bytes of a token, whatever came before it."""


def _decoder_for(tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool) -> _Decoder:
    backend = tokenizer.backend_tokenizer
    added = backend.get_added_tokens_decoder().values() if skip_special_tokens else ()
    skipped = frozenset(token.content for token in added if token.special)
    steps = _decoder_steps(backend)
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return _ByteLevelDecoder(backend, skipped)
    if (rules := _SentencePieceRules.of(steps)) is not None:
        return _SentencePieceDecoder(backend, skipped, rules)
    return _WindowDecoder(backend, skipped)


def _decoder_steps(backend: Any) -> list[dict[str, Any]]:
    """The backend's decoder as a flat list of its serialised steps."""
    if backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


@cache
def _byte_of_character() -> dict[str, int]:
    """The byte that each character stands for in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


class _ByteLevelDecoder:
    """Every token is a run of bytes; only an unfinished UTF-8 character has to wait (3 bytes at most).

    Invalid bytes become U+FFFD by the same rule as in the backend: one for each maximal invalid run.
    """

    def __init__(self, backend: Any, skipped: frozenset[str]) -> None:
        self._token_of = backend.id_to_token
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._byte_of = _byte_of_character()

    @property
    def is_waiting(self) -> bool:
        return self._utf8.getstate()[0] != b""

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self.spell(token_id))

    def spell(self, token_id: int) -> bytes:
        token = self._token_of(token_id)
        if token is None or token in self._skipped:
            return b""
        try:
            return bytes(map(self._byte_of.__getitem__, token))
        except KeyError:  # an added token is its own text when it has characters outside the table
            return token.encode("utf-8")

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _SentencePieceRules:
    """What a sentencepiece-like decoder does to each token, read from its serialised steps."""

    def __init__(self) -> None:
        self.replacements: list[tuple[str, str]] = []
        self.byte_fallback = False
        self.strip_start: tuple[str, int] = ("", 0)
        """A character, and how many of it the whole text loses at its beginning."""
        self.first_token_loses = ""
        """A character that the first token loses wherever it stands (``Metaspace``)."""

    @classmethod
    def of(cls, steps: Sequence[dict[str, Any]]) -> _SentencePieceRules | None:
        """The rules, or None if a step is of another kind."""
        rules, fused = cls(), False
        for step in steps:
            match step:
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not (
                    fused or rules.byte_fallback
                ):
                    rules.replacements.append((old, new))
                case {"type": "ByteFallback"} if not fused:
                    rules.byte_fallback = True
                case {"type": "Fuse"}:
                    fused = True
                case {"type": "Strip", "content": str(character), "start": int(count), "stop": 0} if fused:
                    rules.strip_start = (character, count)
                case {"type": "Metaspace", "replacement": str(mark)} if len(steps) == 1:
                    rules.replacements.append((mark, " "))
                    rules.first_token_loses = "" if step.get("prepend_scheme") == "never" else mark
                case _:
                    return None
        return rules if steps else None


class _SentencePieceDecoder:
    """Tokens are texts, and ``<0x41>`` is a byte.

    The backend reads a run of byte tokens as a whole: valid UTF-8 is its text, anything else is one U+FFFD
    a byte. So a run is certain only once it has ended, or once it is beyond repair.
    """

    def __init__(self, backend: Any, skipped: frozenset[str], rules: _SentencePieceRules) -> None:
        self._token_of = backend.id_to_token
        self._skipped = skipped
        self._rules = rules
        self._to_strip = rules.strip_start[1]
        self._is_first = True
        self._run = bytearray()
        self._run_is_invalid = False
        self._utf8 = codecs.getincrementaldecoder("utf-8")()

    @property
    def is_waiting(self) -> bool:
        return bool(self._run)

    def push(self, token_id: int) -> str:
        token = self._token_of(token_id)
        if token is None or token in self._skipped:
            return ""
        if self._is_first:
            token = (
                token.replace(self._rules.first_token_loses, "") if self._rules.first_token_loses else token
            )
            self._is_first = False
        token = self._replaced(token)
        if self._rules.byte_fallback and (byte := _fallback_byte(token)) is not None:
            return self._strip(self._push_byte(byte))
        return self._strip(self._end_run() + token)

    def finish(self) -> str:
        return self._strip(self._end_run())

    def spell(self, token_id: int) -> bytes:
        token = self._replaced(self._token_of(token_id) or "")
        byte = _fallback_byte(token) if self._rules.byte_fallback else None
        return token.encode("utf-8") if byte is None else bytes((byte,))

    def _replaced(self, token: str) -> str:
        for old, new in self._rules.replacements:
            token = token.replace(old, new)
        return token

    def _push_byte(self, byte: int) -> str:
        if self._run_is_invalid:
            return _REPLACEMENT
        self._run.append(byte)
        try:
            self._utf8.decode(bytes((byte,)))
        except UnicodeDecodeError:
            self._run_is_invalid = True
            invalid, self._run = len(self._run), bytearray()
            return _REPLACEMENT * invalid
        return ""

    def _end_run(self) -> str:
        run, self._run, self._run_is_invalid = bytes(self._run), bytearray(), False
        self._utf8.reset()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return _REPLACEMENT * len(run)

    def _strip(self, text: str) -> str:
        """Take off the characters that the whole text loses at its beginning."""
        if not self._to_strip or not text:
            return text
        character = self._rules.strip_start[0]
        while self._to_strip and text.startswith(character):
            text, self._to_strip = text[len(character) :], self._to_strip - 1
        if text:
            self._to_strip = 0
        return text


def _fallback_byte(token: str) -> int | None:
    match = _FALLBACK_BYTE.fullmatch(token)
    return int(match[1], 16) if match else None


class _WindowDecoder:
    """Any other decoder: decode a short window of ids and give out what follows the part already given.

    The window begins with the tokens of the last piece, so that what depends on the token before (a space
    between words) comes out right. A text that ends in U+FFFD waits for the rest of its character, but not
    for more than ``_LONGEST_CHARACTER`` tokens.
    """

    _LONGEST_CHARACTER = 8

    def __init__(self, backend: Any, skipped: frozenset[str]) -> None:
        self._backend = backend
        self._skipped = skipped
        self._given: list[int] = []
        self._waiting: list[int] = []

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    def push(self, token_id: int) -> str:
        token = self._backend.id_to_token(token_id)
        if token is None or token in self._skipped:
            return ""
        self._waiting.append(token_id)
        new = self._new_text()
        if len(self._waiting) < self._LONGEST_CHARACTER and (not new or new.endswith(_REPLACEMENT)):
            return ""
        return self._give(new)

    def finish(self) -> str:
        return self._give(self._new_text())

    def spell(self, token_id: int) -> bytes:
        return self._decode([token_id]).encode("utf-8")

    def _new_text(self) -> str:
        return self._decode(self._given + self._waiting)[len(self._decode(self._given)) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def _give(self, new: str) -> str:
        self._given, self._waiting = self._waiting, []
        return new
