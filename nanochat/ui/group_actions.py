"""Several chats at once: one message to many tabs, and two settings of a chat side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanochat.errors import InvalidOption
from nanochat.sanitize import sanitize_line
from nanochat.ui import formatting as fmt
from nanochat.ui.chat import Chat
from nanochat.ui.sampling_commands import parse_settings, shortened
from nanochat.ui.settings_actions import SettingsActions
from nanochat.ui.titles import TITLE_LENGTH, title_from

if TYPE_CHECKING:
    from nanochat.settings import Preset

LABEL_LENGTH = TITLE_LENGTH
"""Characters of what a compared chat is called; its tab shows as many of a title."""
HOW = "Write two settings or presets with | between: /compare temperature=0 | temperature=1.2 top_p=0.9"


class GroupActions(SettingsActions):
    """Broadcast and compare. Two compared chats are shown side by side and get the same messages."""

    if TYPE_CHECKING:

        def _ask(self, chat: Chat, text: str) -> None: ...

    # One message to many tabs

    def action_mark(self) -> None:
        """Mark the tab in view for broadcasts, or take its mark away."""
        self.workspace.toggle_mark(self.workspace.active)
        self.show_tabs()

    def action_broadcast(self, argument: str = "") -> None:
        """Send a message to the marked tabs, or to all when none is marked; busy ones are left out."""
        recipients = self.workspace.recipients
        if not argument:
            which = "the marked tabs" if self.workspace.marked else f"all {len(recipients)} tabs"
            self.notify(f"/broadcast followed by a text sends it to {which}.", markup=False)
        elif not self.has_no_model(self.workspace.active):
            free = [chat for chat in recipients if not chat.is_busy]
            for chat in free:
                self._ask_beside(chat, argument)
            left_out = len(recipients) - len(free)
            note = f" {fmt.plural(left_out, 'tab')} still answering got nothing." if left_out else ""
            self.notify(f"Sent to {fmt.plural(len(free), 'tab')}.{note}", markup=False)

    def _ask_beside(self, chat: Chat, text: str) -> None:
        """Ask in a chat whose prompt this didn't come from: what is written or edited there stays as it is."""
        editing, chat.editing = chat.editing, None
        self._ask(chat, text)
        chat.editing = editing

    # Two settings side by side

    async def action_compare(self, argument: str = "") -> None:
        """Ask the last question again with two settings; without an argument, end a comparison."""
        chat = self.workspace.active
        if not argument:
            if self.workspace.partner(chat) is None:
                self.notify(HOW, markup=False)
            else:
                self.workspace.unpair(chat)
                self.show_active()
            return
        parts = [part.strip() for part in argument.split("|")]
        try:
            if len(parts) != 2 or not all(parts):
                raise InvalidOption(HOW + ".")
            sides = [(part, *self._side(part)) for part in parts]
        except InvalidOption as error:
            self.tell(chat, sanitize_line(str(error), 400), "error")
        else:
            if not self.has_no_model(chat):
                await self._compare(chat, sides)

    def _side(self, written: str) -> tuple[str | None, Mapping[str, Any]]:
        """System prompt and sampling settings of a preset, or of settings as written.

        Raises:
            InvalidOption: it is neither.
        """
        preset: Preset | None = self.presets.get(written)
        if preset is None and "=" not in written:
            raise InvalidOption(
                f'"{shortened(written)}" is no preset, and settings are written like top_p=0.9.'
            )
        system, settings = (preset.system, preset.sampling) if preset else (None, parse_settings(written))
        self.sampling_params(settings)  # what can't work is refused at once, not when it is to be used
        return system, settings

    async def _compare(self, chat: Chat, sides: list[tuple[str, str | None, Mapping[str, Any]]]) -> None:
        text, forks = "", []
        one, other = (sanitize_line(written) for written, *_ in sides)
        labels = told_apart(one, other)
        for label, (_, system, settings) in zip(labels, sides, strict=True):
            fork = self.workspace.fork(chat)
            text = take_question(fork)
            self.archive.forked(chat, fork)
            fork.title = title_from(f"{label} · {chat.title}")
            if system is not None:
                fork.system = system
            fork.sampling = {**chat.sampling, **settings}
            self.archive.configure(fork)
            forks.append(fork)
        self.workspace.pair(*forks)
        await self.open_chat(*forks)
        for fork, (written, *_) in zip(forks, sides, strict=True):
            self.tell(fork, f"Compared side by side: {sanitize_line(written)}. /compare ends it.")
            if text:
                self._ask(fork, text)

    def echo(self, chat: Chat, text: str) -> None:
        """A message was sent in one of two compared chats: the other gets it too."""
        partner = self.workspace.partner(chat)
        if partner is None:
            return
        if partner.is_busy:
            self.notify(
                f"“{sanitize_line(partner.title)}” is still answering and did not get this message.",
                markup=False,
            )
        else:
            self._ask_beside(partner, text)

    def show_active(self) -> None:
        super().show_active()
        self._show_partner()

    def show_tabs(self) -> None:
        active = self.workspace.active
        if (partner := self.workspace.partner(active)) is not None:
            partner.is_unread = False  # it is in view too
            for chat in (active, partner):
                if self.is_open(chat):
                    self.pane(chat).show_label(chat.title)
        super().show_tabs()

    def on_descendant_focus(self) -> None:
        """Writing in the other one of two compared chats makes it the one that keys act on."""
        partner = self.workspace.partner(self.workspace.active)
        # What has the focus now, not what had it when the event was sent: it may have moved on.
        if partner is not None and self.is_open(partner) and self.focused is self.pane(partner).prompt:
            self.workspace.show(partner)
            self.show_active()

    def _show_partner(self) -> None:
        active = self.workspace.active
        partner = self.workspace.partner(active)
        for chat in self.workspace.chats:
            if self.is_open(chat):
                self.pane(chat).display = chat is active or chat is partner
                if partner is None:
                    self.pane(chat).show_label("")
        if partner is not None and self.is_open(partner):
            self.pane(partner).be_seen()


def told_apart(one: str, other: str, length: int = LABEL_LENGTH) -> tuple[str, str]:
    """Two settings as short labels in which what differs is seen: what both have goes first."""
    words = [text.split(" ") for text in (one, other)]
    shared = set(words[0]) & set(words[1])
    alone = [" ".join(word for word in of_one if word not in shared) for of_one in words]
    left, right = alone if all(alone) else (one, other)
    pairs = enumerate(zip(left, right, strict=False))
    common = next((place for place, (a, b) in pairs if a != b), min(len(left), len(right)))

    def cut(text: str) -> str:
        if len(text) <= length:
            return text
        # Where they differ within the first characters, the beginning says more than the end.
        start = 0 if common <= length // 2 else max(0, min(common - 2, len(text) - length + 1))
        rest = f"…{text[start:]}" if start else text
        return rest if len(rest) <= length else f"{rest[: length - 1]}…"

    return cut(left), cut(right)


def take_question(chat: Chat) -> str:
    """Take the last question of a chat out, with its answer; returns its text, or the draft's."""
    if chat.draft:
        text, chat.draft = chat.draft, ""
        return text
    questions = [message for message in chat.path if message.role == "user"]
    if not questions:
        return ""
    text = questions[-1].text
    questions[-1].remove()
    return text
