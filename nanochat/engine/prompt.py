"""What a prompt may be, and its token ids. Knows tokenizers; nothing of requests."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from nanochat.engine.chat_template import encode_messages
from nanochat.engine.panics import panics_refused
from nanochat.errors import InvalidOption
from nanochat.sanitize import encodable

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or chat messages of ``role`` and ``content``."""


def encode_prompt(tokenizer: Any, prompt: Prompt, vocab_size: int) -> list[int]:
    """A prompt's token ids.

    Args:
        vocab_size: ids that the model knows are below it.

    Raises:
        InvalidOption: it is empty, holds an unknown id, or is no prompt.
    """
    if isinstance(prompt, str):
        with panics_refused():
            token_ids = list(tokenizer.encode(encodable(prompt)))
    else:
        token_ids = _encode_items(tokenizer, prompt)
    if not token_ids:
        raise InvalidOption("The prompt is empty; give at least one token.")
    if not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise InvalidOption(f"Token ids must lie between 0 and {vocab_size - 1} for this model.")
    return token_ids


def _encode_items(tokenizer: Any, prompt: Any) -> list[int]:
    """Token ids of a prompt that isn't text: of messages by the chat template, of token ids themselves.

    Raises:
        InvalidOption: it is neither.
    """
    try:
        if isinstance(prompt, (bytes, Mapping)):
            raise TypeError("a sequence, but of nothing that a prompt is made of")
        items = list(prompt)
        if items and isinstance(items[0], Mapping):
            return encode_messages(tokenizer, items)
        return [operator.index(token) for token in items]
    except TypeError as error:
        raise InvalidOption(
            "A prompt must be text, a list of token ids, or a list of messages with role and content."
        ) from error
