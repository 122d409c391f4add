"""Chats to files and back: Markdown to read, JSON to keep, on a thread of its own."""

from __future__ import annotations

import errno
import itertools
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from textual.message import Message

from nanochat.errors import HistoryError
from nanochat.history import History
from nanochat.history.transfer import MAX_FILE_BYTES
from nanochat.sanitize import sanitize_line
from nanochat.settings import user_path
from nanochat.ui.chat import Chat
from nanochat.ui.chat_screen import ChatScreen
from nanochat.ui.restoring import restored_chat

if TYPE_CHECKING:
    from nanochat.ui.app import NanochatApp

Format = Literal["md", "json"]
HOW = "/export writes Markdown, /export json JSON; a file's name may follow, such as /export trip.json."
_FORMATS: dict[str, Format] = {"md": "md", "markdown": "md", "json": "json"}


@dataclass(frozen=True, slots=True)
class Target:
    """What to write, and where; ``file`` None: under the chat's title in the usual folder."""

    format: Format
    file: Path | None


def parse_target(argument: str) -> Target | None:
    """``json``, ``trip.md``, ``json ~/trip`` or nothing as a target; None if it isn't one."""
    first, _, rest = argument.strip().partition(" ")
    format = _FORMATS.get(first.lower())
    written = rest.strip() if format is not None else argument.strip()
    if not written:
        return Target(format or "md", None)
    file = user_path(written)
    by_name = _FORMATS.get(file.suffix.lower().removeprefix("."))
    if format is None and by_name is None:
        return None
    return Target(format or by_name or "md", file)


def file_stem(title: str, now: datetime) -> str:
    """A name for the file that any file system takes: ``travel-post-2026-11-30``."""
    words = re.findall(r"\w+", title.lower())
    return "-".join([*words, f"{now:%Y-%m-%d}"])[:80]


def candidates(folder: Path, stem: str, suffix: str) -> Iterator[Path]:
    """Files to write to, if they aren't there yet: ``stem.md``, ``stem-2.md``, …"""
    yield folder / f"{stem}{suffix}"
    yield from (folder / f"{stem}-{number}{suffix}" for number in itertools.count(2))


def documents_folder() -> Path:
    """The user's documents, or the home folder where there are none."""
    from platformdirs import user_documents_path

    documents = user_documents_path()
    return documents if documents.is_dir() else Path.home()


def export(history: History, store_id: int, format: Format, files: Iterable[Path]) -> Path:
    """Write a saved chat to the first of these files that isn't there yet; returns which.

    Raises:
        HistoryError: it can't be read or written, or its latest messages wait because they can't be saved.
    """
    history.flush()
    text = history.export_markdown(store_id) if format == "md" else history.export_json(store_id)
    for file in files:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            _write_new(file, text)
        except OSError as error:
            if isinstance(error, FileExistsError) and file.parent.is_dir():
                continue
            raise HistoryError(f"The chat can't be written to {file}: {error.strerror or error}.") from None
        return file
    raise HistoryError(f"{file} is already there; give another name.")


def _write_new(file: Path, text: str) -> None:
    """Make a file that has its name only once it is whole.

    Raises:
        FileExistsError: the name is taken.
        OSError: it can't be written; nothing is left of it.
    """
    if os.path.lexists(file):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    unfinished = file.with_name(f".nanochat-{secrets.token_hex(8)}.part")
    try:
        with unfinished.open("x", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        _give_name(unfinished, file)
    finally:
        unfinished.unlink(missing_ok=True)


def _give_name(unfinished: Path, file: Path) -> None:
    try:
        file.hardlink_to(unfinished)  # unlike renaming, it takes no name that another has
    except FileExistsError:
        raise
    except OSError:  # a file system without links, or a name that can't be: this says which
        file.open("x").close()
        try:
            unfinished.replace(file)
        except BaseException:
            file.unlink(missing_ok=True)
            raise


def import_from(history: History, file: Path) -> Chat:
    """Add an exported chat to the history.

    Raises:
        HistoryError: the file can't be read, or isn't an exported chat; nothing was added.
    """
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)  # one more than is allowed, so that it is refused
    except OSError as error:
        raise HistoryError(f"{file} can't be read: {error.strerror or error}.") from None
    store_id = history.import_json(data)
    return restored_chat(history.chat(store_id), history.tree(store_id))


class FileActions(ChatScreen):
    """The actions that write and read files."""

    @dataclass
    class Exported(Message):
        """A chat was written, or could not be."""

        result: Path | HistoryError

    @dataclass
    class Imported(Message):
        """A chat was read, or could not be."""

        result: Chat | HistoryError

    def action_export(self, argument: str = "") -> None:
        chat, target = self.workspace.active, parse_target(argument)
        store_id = chat.store_id
        if target is None:
            self.notify(HOW, severity="warning", markup=False)
        elif store_id is None or not chat.root.children:
            self.notify("There is nothing to export yet.", severity="warning")
        else:
            app: NanochatApp = self.app  # type: ignore[assignment]
            chosen = app.look.export_folder
            folder = user_path(chosen) if chosen else documents_folder()
            stem = file_stem(chat.title, datetime.now())
            named = [target.file] if target.file is not None else None
            files = named or candidates(folder, stem, f".{target.format}")
            self.archive.read(
                lambda history: export(history, store_id, target.format, (file.absolute() for file in files)),
                lambda result: self.post_message(self.Exported(result)),
            )

    def on_file_actions_exported(self, event: Exported) -> None:
        if isinstance(event.result, HistoryError):
            self.notify(sanitize_line(str(event.result), 600), severity="error", markup=False)
        else:
            self.notify(sanitize_line(str(event.result), 600), title="Chat exported", markup=False)

    def action_import(self, argument: str = "") -> None:
        """Open a chat that was exported as JSON in a new tab."""
        if not argument:
            self.notify("/import followed by a file opens a chat that was exported as JSON.")
            return
        file = user_path(argument).absolute()
        self.archive.read(
            lambda history: import_from(history, file),
            lambda result: self.post_message(self.Imported(result)),
        )

    async def on_file_actions_imported(self, event: Imported) -> None:
        if isinstance(event.result, HistoryError):
            self.notify(sanitize_line(str(event.result), 600), severity="error", markup=False)
        else:
            await self.open_restored(event.result)
