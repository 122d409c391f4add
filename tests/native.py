"""Makes sure that the native kernels are there to be tested, where they can be."""

from __future__ import annotations

import functools

import pytest

from nanochat.kernels.native import build, library


@functools.cache
def _build() -> str:
    """Why there are none; empty if there are."""
    if library.find() is not None:
        return ""
    try:
        build.build()
    except (RuntimeError, OSError) as error:
        return str(error)
    library.find.cache_clear()
    library._load.cache_clear()
    return ""


def require_native() -> None:
    """Build them if the installation did not; skip the test where there is no compiler."""
    if reason := _build():
        pytest.skip(f"no native kernels: {reason}")
