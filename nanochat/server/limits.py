"""What the command line and the server agree on. Imports nothing, so that help is shown at once."""

from __future__ import annotations

MAX_REQUESTS = 256
"""Answers under way at once, running or waiting, unless the server is told."""
