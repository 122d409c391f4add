"""Panics of the native tokenizer, which reach Python as a ``BaseException`` of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nanochat.errors import UnsupportedModel, one_line


def is_panic(error: BaseException) -> bool:
    """Whether native code written in Rust has given up."""
    return type(error).__name__ == "PanicException"


@contextmanager
def panics_refused() -> Iterator[None]:
    """Around whatever a tokenizer does: one from a damaged file may load, and fail on some text.

    Raises:
        UnsupportedModel: it has panicked.
    """
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise UnsupportedModel(
            f"This model's tokenizer fails on the text ({one_line(error)}); "
            "fetch the model again or choose another."
        ) from error
