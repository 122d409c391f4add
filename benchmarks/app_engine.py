"""The engine of an app that is being driven."""

from __future__ import annotations

from nanochat.backend.local import LocalBackend
from nanochat.engine.engine import Engine
from nanochat.ui.stage import Stage


def engine_of(stage: Stage) -> Engine:
    """What answers the app's chats.

    Raises:
        RuntimeError: the model isn't loaded, or a server answers.
    """
    bridge = stage.main.bridge
    if bridge is None or not isinstance(bridge.backend, LocalBackend):
        raise RuntimeError("no model is loaded")
    return bridge.backend.engine
