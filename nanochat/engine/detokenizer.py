"""Token ids of one request into text, as they come: exact, linear, and never a piece too early.

The concatenated pieces are what ``tokenizer.decode(ids, skip_special_tokens=...,
clean_up_tokenization_spaces=False)`` gives for all generated ids at once, cut before the first stop string;
for an answer that goes on, what it gives for all ids beyond the text before.
Knows tokenizers; nothing of requests, engines or screens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nanochat.engine.token_decoders import decoder_for

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Detokenizer:
    """The text of one request, piece by piece.

    Args:
        tokenizer: a ``transformers`` tokenizer with a fast backend.
        stop: texts that end the answer. The one completed first wins, the longest when several end at the
            same character; neither it nor any part of it is ever given out.
        skip_special_tokens: leave out special tokens such as an end-of-turn marker.
        after: ids of the text that this one goes on from. A text's first word loses the space that
            SentencePiece writes before it; here that word is not the first.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        after: Sequence[int] = (),
    ) -> None:
        self._decoder = decoder_for(tokenizer, skip_special_tokens)
        self._decoder.follow(after)
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
        self._decoder = decoder_for(tokenizer, skip_special_tokens=False)

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
