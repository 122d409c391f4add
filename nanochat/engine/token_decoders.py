"""One token after another into text, by each kind of decoder that tokenizers have.

Given all at once or one by one, tokens make the same text. Knows tokenizers; nothing of requests or stop texts.
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


class Decoder(Protocol):
    @property
    def is_waiting(self) -> bool:
        """Whether a token's text isn't certain yet."""

    def follow(self, token_ids: Sequence[int]) -> None:
        """Go on after these, before the first push. Of a character that they leave unfinished nothing is kept."""

    def push(self, token_id: int) -> str:
        """Text that this token makes certain."""

    def finish(self) -> str:
        """The text that was waiting for another token."""

    def spell(self, token_id: int) -> bytes:
        """The bytes of a token, whatever came before it."""


def decoder_for(tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool) -> Decoder:
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

    def follow(self, token_ids: Sequence[int]) -> None:
        """Bytes are the same after whatever."""

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

    def follow(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if not (self._is_first or self._to_strip):  # after a token or two
                break
            self.push(token_id)
        run = bytearray()
        for token_id in reversed(token_ids):
            if (token := self._token(token_id)) is None:
                continue
            if (byte := self._byte(self._replaced(token))) is None:
                break
            run.append(byte)
        self._end_run()
        for byte in reversed(run):
            self._push_byte(byte)
        self._run.clear()  # but it may be beyond repair
        self._utf8.reset()

    def push(self, token_id: int) -> str:
        if (token := self._token(token_id)) is None:
            return ""
        if self._is_first:
            token = (
                token.replace(self._rules.first_token_loses, "") if self._rules.first_token_loses else token
            )
            self._is_first = False
        token = self._replaced(token)
        if (byte := self._byte(token)) is not None:
            return self._strip(self._push_byte(byte))
        return self._strip(self._end_run() + token)

    def finish(self) -> str:
        return self._strip(self._end_run())

    def spell(self, token_id: int) -> bytes:
        token = self._replaced(self._token_of(token_id) or "")
        byte = self._byte(token)
        return token.encode("utf-8") if byte is None else bytes((byte,))

    def _token(self, token_id: int) -> str | None:
        """None for one that makes no text."""
        token = self._token_of(token_id)
        return None if token in self._skipped else token

    def _byte(self, token: str) -> int | None:
        """The byte that it stands for, if it is such a token."""
        match = _FALLBACK_BYTE.fullmatch(token) if self._rules.byte_fallback else None
        return int(match[1], 16) if match else None

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

    def follow(self, token_ids: Sequence[int]) -> None:
        tail = token_ids[-self._LONGEST_CHARACTER :]
        self._given = [token_id for token_id in tail if self._makes_text(token_id)]

    def push(self, token_id: int) -> str:
        if not self._makes_text(token_id):
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

    def _makes_text(self, token_id: int) -> bool:
        token = self._backend.id_to_token(token_id)
        return token is not None and token not in self._skipped

    def _new_text(self) -> str:
        return self._decode(self._given + self._waiting)[len(self._decode(self._given)) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def _give(self, new: str) -> str:
        self._given, self._waiting = self._waiting, []
        return new
