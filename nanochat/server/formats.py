"""The JSON of the two kinds of answer, whole and in pieces. Knows no engine and no HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from nanochat.engine.detokenizer import Detokenizer, TokenSpeller
from nanochat.engine.outputs import TokenLogprobs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON hasn't got."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of one answer, or all of it."""

    reasoning: str
    answer: str
    logprobs: Sequence[TokenLogprobs] | None
    """None: they weren't asked for."""
    finish_reason: str | None = None


class Format(Protocol):
    """How one answer is written; it may remember how far the answer has come."""

    id_prefix: str
    object_name: str
    chunk_name: str

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """An element of a chunk's ``choices``."""

    def whole(self, index: int, piece: Piece) -> dict[str, Any]:
        """An element of a whole answer's ``choices``."""


class ChatFormat:
    """``/v1/chat/completions``. The reasoning goes into ``reasoning_content``, as DeepSeek's API has it."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._has_begun = False

    @cached_property
    def _speller(self) -> TokenSpeller:
        return TokenSpeller(self._tokenizer)

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if not self._has_begun:
            delta["role"], self._has_begun = "assistant", True
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.answer or (not piece.reasoning and piece.finish_reason is None):
            delta["content"] = piece.answer
        return self._choice(index, piece, "delta", delta)

    def whole(self, index: int, piece: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": piece.answer, "refusal": None}
        if piece.reasoning:
            message["reasoning_content"] = piece.reasoning
        return self._choice(index, piece, "message", message)

    def _choice(self, index: int, piece: Piece, name: str, text: dict[str, Any]) -> dict[str, Any]:
        logprobs = None
        if piece.logprobs is not None:
            logprobs = {"content": [self._position(entry) for entry in piece.logprobs], "refusal": None}
        return {"index": index, name: text, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    def _position(self, entry: TokenLogprobs) -> dict[str, Any]:
        top = [self._token(token_id, logprob) for token_id, logprob in entry.top]
        return self._token(entry.token_id, entry.logprob) | {"top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        spelled = self._speller.spell(token_id)
        text = spelled.decode("utf-8", errors="replace")
        return {"token": text, "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(spelled)}


class TextFormat:
    """``/v1/completions``."""

    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_name = "text_completion"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> None:
        """``prompt``: the ids that the text goes on from."""
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._length = 0

    @cached_property
    def _speller(self) -> TokenSpeller:
        return TokenSpeller(self._tokenizer)

    @cached_property
    def _measure(self) -> Detokenizer:
        """How much of the text the tokens so far are."""
        return Detokenizer(self._tokenizer, after=self._prompt)

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        logprobs = None if piece.logprobs is None else self._logprobs(piece.logprobs)
        return {
            "index": index,
            "text": piece.answer,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
        }

    def whole(self, index: int, piece: Piece) -> dict[str, Any]:
        return self.chunk(index, piece)

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        offsets = []
        for entry in entries:
            offsets.append(self._length)
            self._length += len(self._measure.push([entry.token_id]))
        return {
            "tokens": [self._text(entry.token_id) for entry in entries],
            "token_logprobs": [max(entry.logprob, LOWEST_LOGPROB) for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """By text, as the API has it: of tokens spelled alike the likeliest; the chosen one is always there."""
        top: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            top.setdefault(self._text(token_id), max(logprob, LOWEST_LOGPROB))
        return top

    def _text(self, token_id: int) -> str:
        return self._speller.spell(token_id).decode("utf-8", errors="replace")
