"""nanochat: a terminal chat over an in-process continuous-batching engine.

The public names load on first use, so that ``import nanochat`` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanochat.engine.config import EngineConfig, SamplingParams
    from nanochat.engine.engine import Engine
    from nanochat.engine.outputs import Event, RequestMetrics, RequestOutput
    from nanochat.engine.stats import EngineStats

_HOMES = {
    "Engine": "nanochat.engine.engine",
    "EngineConfig": "nanochat.engine.config",
    "EngineStats": "nanochat.engine.stats",
    "Event": "nanochat.engine.outputs",
    "RequestMetrics": "nanochat.engine.outputs",
    "RequestOutput": "nanochat.engine.outputs",
    "SamplingParams": "nanochat.engine.config",
}

__all__ = [
    "Engine",
    "EngineConfig",
    "EngineStats",
    "Event",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'nanochat' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
