"""Which addresses mean this machine: a server is careful with others, and so is a client with its key."""

from __future__ import annotations

import ipaddress


def is_loopback(name: str) -> bool:
    """Whether a host's name or address can only mean this machine."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
