"""Text in a dialog, one line or several, with every key in the order typed.

Textual runs a key's binding only once the key has gone up the tree, so that on a busy machine a letter
typed after Backspace would be inserted before it.
"""

from __future__ import annotations

from textual import events
from textual.binding import Binding
from textual.widget import Widget
from textual.widgets import Input, TextArea

from nanochat.sanitize import sanitize
from nanochat.ui.textual_private import let_go


def editing_keys(kind: type[Widget]) -> dict[str, str]:
    """Actions of a kind of widget by key."""
    bindings = [binding for binding in kind.BINDINGS if isinstance(binding, Binding)]
    keys = {key: binding.action for binding in bindings for key in binding.key.split(",")}
    if "ctrl+z" in keys:  # which suspends the app; this is undo in shells, too
        keys["ctrl+underscore"] = keys["ctrl+z"]
    return keys


_LINE_KEYS = editing_keys(Input)
_TEXT_KEYS = editing_keys(TextArea)


class LineInput(Input):
    """An input without a blinking cursor: each blink would redraw the screen while answers stream."""

    def on_mount(self) -> None:
        self.cursor_blink = False

    def validate_value(self, value: str) -> str:
        """Whatever it comes from, a paste or a chat that was imported, it is fit to be shown."""
        return sanitize(value)

    async def on_key(self, event: events.Key) -> None:
        """Run the key's editing action at once."""
        if (action := _LINE_KEYS.get(event.key)) is not None:
            event.prevent_default()
            event.stop()
            await self.app.run_action(action, self)


class Area(TextArea):
    """A text area of which nothing is left once it is gone."""

    def on_mount(self) -> None:
        self._mounted_on = self.screen

    def on_unmount(self) -> None:
        let_go(self, self._mounted_on)


class TextInput(Area):
    """Several lines; Tab leaves it."""

    def __init__(self, text: str, placeholder: str, id: str) -> None:
        super().__init__(
            sanitize(text),
            soft_wrap=True,
            tab_behavior="focus",
            placeholder=placeholder,
            highlight_cursor_line=False,
            compact=True,
            id=id,
        )
        self.cursor_blink = False

    def load_text(self, text: str) -> None:
        """Replace the text; whatever it comes from, it is fit to be shown."""
        super().load_text(sanitize(text))

    def on_paste(self, event: events.Paste) -> None:
        event.prevent_default()
        event.stop()
        self.insert(sanitize(event.text))

    async def on_key(self, event: events.Key) -> None:
        """Run the key's editing action at once."""
        if (action := _TEXT_KEYS.get(event.key)) is not None:
            event.prevent_default()
            event.stop()
            await self.app.run_action(action, self)
