"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_model import write_tiny_llama


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a two-layer random Llama with a byte-level tokenizer."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny-llama")
