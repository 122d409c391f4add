"""How a long text is cut into windows that a model can see, and which tokens each window scores.

Arithmetic alone: knows no model and no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nanochat.errors import InvalidOption, WrongUsage

USUAL_DECODE_TOKENS = 1024
MIN_DECODED_PER_WINDOW = 64
"""Decoding fewer tokens a window would pay for more contexts than it gains in variety."""


class Window(NamedTuple):
    """Tokens ``begin .. end - 1`` of a text. Those from ``first_scored`` on count, the others are context."""

    begin: int
    end: int
    first_scored: int


class DecodeSpans(NamedTuple):
    """The last ``length`` tokens of each of some windows."""

    windows: tuple[Window, ...]
    length: int

    @property
    def num_tokens(self) -> int:
        return len(self.windows) * self.length


def sliding_windows(num_tokens: int, ctx: int, stride: int) -> list[Window]:
    """Windows of ``ctx`` tokens, each ``stride`` after the one before, as far as the text goes.

    A window scores what no earlier one has, so every token counts once, with at least ``ctx - stride``
    tokens before it except in the first window. A window's first token has nothing to be predicted from: the
    text's first one never counts, and with ``stride == ctx`` neither does that of any window. The last window
    ends with the text and may be shorter. This is the convention of
    https://huggingface.co/docs/transformers/perplexity.

    Raises:
        InvalidOption: no window fits, or the stride would leave tokens out.
    """
    if ctx < 2:
        raise WrongUsage(f"--ctx {ctx} is too short; a window needs two tokens at least.")
    if not 1 <= stride <= ctx:
        raise WrongUsage(f"--stride must be between 1 and the window's {ctx:,} tokens, not {stride:,}.")
    if num_tokens < ctx:
        raise InvalidOption(
            f"The text has {num_tokens:,} tokens, fewer than one window of {ctx:,}; "
            "use a longer text, or ask for shorter windows with --ctx."
        )
    windows: list[Window] = []
    scored = 0
    while scored < num_tokens:
        begin = len(windows) * stride
        end = min(begin + ctx, num_tokens)
        windows.append(Window(begin, end, max(scored, begin + 1)))
        scored = end
    if windows[-1].first_scored == num_tokens:  # a single token, and nothing to predict it from
        windows.pop()
    return windows


def decode_spans(windows: Sequence[Window], num_tokens: int | None = None) -> DecodeSpans:
    """The ends of evenly spread windows of full length: tokens to decode that their windows score as well.

    ``num_tokens``: how many in all; a few more, if that makes the windows equal. None: the usual number, or
    as many as there are.

    Raises:
        InvalidOption: the windows score fewer tokens than that.
    """
    ctx = windows[0].end - windows[0].begin
    full = [window for window in windows if window.end - window.begin == ctx]
    longest = min(window.end - window.first_scored for window in full)
    available = len(full) * longest
    wanted = min(USUAL_DECODE_TOKENS, available) if num_tokens is None else num_tokens
    if not 1 <= wanted <= available:
        raise InvalidOption(
            f"--decode-tokens must be between 1 and {available:,} for this text and these windows, "
            f"not {wanted:,}; or 0 for none."
        )
    count = min(len(full), max(1, wanted // MIN_DECODED_PER_WINDOW, -(-wanted // longest)))
    chosen = tuple(full[index * len(full) // count] for index in range(count))
    return DecodeSpans(chosen, -(-wanted // count))
