"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tiny_model import write_tiny_llama


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes minutes is slow, too: no choice of the quick tests takes it."""
    for item in items:
        if item.get_closest_marker("long") is not None:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Side by side, but the tests of the default model on one worker: two would each load it, and its peer."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if file.endswith("test_default_model.py") else nodeid

    return Scheduling(config, log)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a two-layer random Llama with a byte-level tokenizer."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture(scope="session")
def long_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with so long a context that an endless answer outlasts any test."""
    return write_tiny_llama(tmp_path_factory.mktemp("long") / "long-llama", max_position_embeddings=65_536)
