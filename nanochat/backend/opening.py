"""From what the user asks for to a backend that answers. Slow parts are imported when they are needed."""

from __future__ import annotations

from nanochat.backend.interface import Backend
from nanochat.backend.remote.config import RemoteConfig
from nanochat.engine.config import EngineConfig
from nanochat.engine.progress import Progress, ProgressCallback, ignore_progress
from nanochat.errors import NanochatError, install_hint

BackendConfig = EngineConfig | RemoteConfig
"""An engine to load, or a server to connect with. Both have a ``model``."""
_EXTRA = ("openai", "prometheus_client", "httpx2")
"""What the optional extra ``connect`` brings."""


def open_backend(config: BackendConfig, progress: ProgressCallback = ignore_progress) -> Backend:
    """Load the model or connect with the server; blocks until one can ask.

    Args:
        progress: told of each stage, on the calling thread; what it raises ends the opening.

    Raises:
        NanochatError: with a sentence that says what to do.
    """
    if isinstance(config, RemoteConfig):
        progress(Progress(f"Connecting to {config.place}"))
        try:
            from nanochat.backend.remote.backend import RemoteBackend
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] not in _EXTRA:
                raise
            raise NanochatError(
                "To connect with a server takes two more packages; " + install_hint("connect")
            ) from error
        return RemoteBackend(config, progress)
    progress(Progress("Starting PyTorch"))
    from nanochat.backend.local import LocalBackend
    from nanochat.engine.engine import Engine

    return LocalBackend(Engine(config, progress=progress))
