"""Ways to the clipboard: the terminal's own sequence (OSC 52), wrapped for tmux, and a tool where there is one.

The sequence travels over ssh to the terminal in front of the user; a tool reaches the clipboard of the
machine it runs on. Only what the user asks to copy comes here. Knows nothing of widgets.
"""

from __future__ import annotations

import asyncio
import base64
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

TOOL_WAIT_S = 2.0
MAX_SEQUENCE = 100_000
"""Characters of a sequence that terminals are known to take; xterm and others drop longer ones."""


def osc52(text: str) -> str:
    """What asks a terminal to put a text on its clipboard."""
    return f"\x1b]52;c;{base64.b64encode(text.encode('utf-8', 'replace')).decode('ascii')}\a"


def through_tmux(sequence: str) -> str:
    """A sequence that tmux hands on to the terminal it runs in; each escape in it is doubled."""
    return "\x1bPtmux;" + sequence.replace("\x1b", "\x1b\x1b") + "\x1b\\"


def sequences(text: str, environment: Mapping[str, str]) -> list[str]:
    """What to send besides the plain sequence.

    tmux takes the plain one only with ``set-clipboard on``, and hands on a wrapped one only with
    ``allow-passthrough on``: it gets both, and its own tool.
    """
    return [through_tmux(osc52(text))] if environment.get("TMUX") else []


def tool(
    environment: Mapping[str, str],
    find: Callable[[str], str | None] = shutil.which,
    platform: str = sys.platform,
) -> Sequence[str] | None:
    """The command that takes the text on its standard input; None where there is none.

    Over ssh it would fill the wrong machine's clipboard, so only tmux's own is used there.
    """
    is_remote = bool(environment.get("SSH_CONNECTION") or environment.get("SSH_TTY"))
    candidates: list[tuple[bool, list[str]]] = [
        (bool(environment.get("TMUX")), ["tmux", "load-buffer", "-w", "-"]),
        (platform == "darwin" and not is_remote, ["pbcopy"]),
        (bool(environment.get("WSL_DISTRO_NAME")) and not is_remote, ["clip.exe"]),
        (bool(environment.get("WAYLAND_DISPLAY")) and not is_remote, ["wl-copy"]),
        (bool(environment.get("DISPLAY")) and not is_remote, ["xclip", "-selection", "clipboard"]),
        (bool(environment.get("DISPLAY")) and not is_remote, ["xsel", "--clipboard", "--input"]),
    ]
    return next((command for fits, command in candidates if fits and find(command[0])), None)


async def give_to(command: Sequence[str], text: str) -> bool:
    """Run a tool with the text as input; False if it fails or hangs. None is left behind when this is cancelled.

    It has a session of its own: what stays to own the clipboard (xclip, xsel, wl-copy) would be stopped with the app
    (^Z), and every program that pastes would wait for it.
    """
    # clip.exe takes UTF-16; all others take what the locale says, which is UTF-8 wherever they are used.
    data = text.encode("utf-16" if command[0] == "clip.exe" else "utf-8", "replace")
    quiet = asyncio.subprocess.DEVNULL
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True
        )
    except OSError:
        return False
    try:
        async with asyncio.timeout(TOOL_WAIT_S):
            await process.communicate(data)
    except TimeoutError:
        return False
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
    return process.returncode == 0
