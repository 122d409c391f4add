"""Where the user writes: Enter sends, Shift+Enter or Ctrl+J breaks the line, large pastes are folded."""

from __future__ import annotations

from dataclasses import dataclass

from textual import events
from textual.message import Message
from textual.widgets import TextArea

from nanochat.sanitize import sanitize
from nanochat.ui import formatting as fmt
from nanochat.ui import keys as key_names
from nanochat.ui.actions import find, slash_hints
from nanochat.ui.chrome import actions_of
from nanochat.ui.line_input import Area, editing_keys

FOLD_CHARACTERS = 2_000
FOLD_LINES = 20
"""A paste longer than either is shown as one short mark and sent whole."""
FOLD_DRAFT = 50_000
"""A draft of more characters is folded when its tab is opened; what was typed there can be edited."""
MAX_HINTS = 6


_EDITING_KEYS = editing_keys(TextArea)
"""Actions of the text area by key."""


class Prompt(Area):
    """The text to send. Its state is only what has not been sent yet."""

    @dataclass
    class Submitted(Message):
        """The user has sent this text, folded pastes unfolded."""

        text: str

    def __init__(self, text: str = "", placeholder: str = "") -> None:
        self.on_its_way: list[str] = []
        """What was sent and nobody has taken yet."""
        self._folded: dict[str, str] = {}
        self._num_folded = 0
        """Pastes folded since the prompt was last emptied: two of the same size need different marks."""
        super().__init__(
            text if len(text) <= FOLD_DRAFT else self._fold(text),
            soft_wrap=True,
            tab_behavior="focus",
            placeholder=placeholder,
            highlight_cursor_line=False,
        )
        self.cursor_blink = False  # each blink would redraw the screen while answers stream
        self._send_keys: tuple[str, ...] = ()
        self._new_line_keys: tuple[str, ...] = ()
        self._hint = ""

    def on_mount(self) -> None:
        send, new_line = (find(name, actions_of(self)) for name in ("send", "new_line"))
        self._send_keys, self._new_line_keys = key_names.split(send.keys), key_names.split(new_line.keys)
        self._hint = f"{send.key_label} sends · {new_line.key_label} new line"
        self.border_subtitle = self._hint
        self.move_cursor(self.document.end)

    def action_send(self) -> None:
        """Send what is there, unless it is nothing but blanks.

        The prompt is empty at once, so that what is typed next is a text of its own; whoever can't take
        the text gives it back.
        """
        text = self.full_text.strip()
        if text:
            self.take()
            self.on_its_way.append(text)
            self.post_message(self.Submitted(text))

    def action_new_line(self) -> None:
        """Break the line."""
        self._leave_mark()
        self.insert("\n")

    async def on_key(self, event: events.Key) -> None:
        """Every key of this widget in the order typed.

        Bindings wait until their key has gone up the tree, or overtake it when they have priority: on a
        busy machine, letters typed around them would change places with them.
        """
        if event.key in self._send_keys:
            self.action_send()
        elif event.key in self._new_line_keys:
            self.action_new_line()
        elif (action := _EDITING_KEYS.get(event.key)) is not None:
            await self.app.run_action(action, self)
        else:
            self._leave_mark()
            return
        event.prevent_default()
        event.stop()

    def take(self, text: str = "") -> None:
        """Replace the text, for example by nothing once it has been sent."""
        self._folded.clear()
        self._num_folded = 0
        self.text = self._fold_if_large(sanitize(text))  # an imported chat's text may come to be edited
        self.move_cursor(self.document.end)

    def action_delete_left(self) -> None:
        """A folded paste goes as one: what is left of its mark would be sent in its place."""
        if not self._delete_mark(-1):
            super().action_delete_left()

    def action_delete_right(self) -> None:
        """As :meth:`action_delete_left`."""
        if not self._delete_mark(0):
            super().action_delete_right()

    def _delete_mark(self, offset: int) -> bool:
        """Delete the mark that has the character so far from the cursor; False if there is none."""
        row, column = self.cursor_location
        span = self._mark_at(column + offset) if self.selection.is_empty else None
        if span is not None:
            self.delete((row, span[0]), (row, span[1]))
        return span is not None

    def _mark_at(self, column: int) -> tuple[int, int] | None:
        """Beginning and end of the mark around a character of the cursor's line."""
        line = self.document[self.cursor_location[0]]
        for mark in self._folded:
            start = line.find(mark)
            while start >= 0:
                if start <= column < start + len(mark):
                    return start, start + len(mark)
                start = line.find(mark, start + len(mark))
        return None

    def _leave_mark(self) -> None:
        """What is written inside a mark comes after it."""
        row, column = self.cursor_location
        if (span := self._mark_at(column)) is not None and span[0] < column and self.selection.is_empty:
            self.move_cursor((row, span[1]))

    def on_paste(self, event: events.Paste) -> None:
        event.prevent_default()
        event.stop()
        self._leave_mark()
        self.insert(self._fold_if_large(sanitize(event.text)))

    def _fold_if_large(self, text: str) -> str:
        is_large = len(text) > FOLD_CHARACTERS or text.count("\n") >= FOLD_LINES
        return self._fold(text) if is_large else text

    def _fold(self, text: str) -> str:
        self._num_folded += 1
        mark = f"⟦pasted text {self._num_folded}: {fmt.plural(text.count(chr(10)) + 1, 'line')}, {fmt.count(len(text))} characters⟧"
        self._folded[mark] = text
        return mark

    @property
    def full_text(self) -> str:
        """What would be sent: folded pastes unfolded."""
        text = self.text
        for mark, pasted in self._folded.items():
            text = text.replace(mark, pasted)
        return text

    def on_text_area_changed(self) -> None:
        """While a slash command is being written, say which ones there are."""
        text = self.text
        hint = self._hint
        if text.startswith("/") and not text.startswith("//") and "\n" not in text:
            found = slash_hints(text[1:].split(" ")[0])
            if len(found) == 1:
                hint = f"/{found[0].slash} {found[0].argument} · {found[0].help}".replace("  ", " ")
            elif found:
                names = " ".join(f"/{action.slash}" for action in found[:MAX_HINTS])
                hint = names + (" …" if len(found) > MAX_HINTS else "")
            else:
                hint = "no such command; /help lists them"
        if self.border_subtitle != hint:
            self.border_subtitle = hint
