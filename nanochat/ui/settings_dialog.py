"""The settings of one chat in a dialog: a field for each, empty where the default holds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from textual.app import ComposeResult
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import Button, Label, Select, Static

from nanochat.engine.config import SamplingParams
from nanochat.errors import InvalidOption
from nanochat.sanitize import sanitize_line
from nanochat.ui.actions import dialog_binding, find
from nanochat.ui.chrome import actions_of
from nanochat.ui.dialog import Dialog
from nanochat.ui.line_input import LineInput, TextInput
from nanochat.ui.sampling_commands import HIDDEN, parse_value, setting_names, show_value

if TYPE_CHECKING:
    from nanochat.settings import Preset

HELP = {
    "temperature": "0: the likeliest token; up to 2",
    "top_p": "keep the likeliest to this share",
    "top_k": "keep this many; 0 keeps all",
    "min_p": "drop below this part of the best",
    "repetition_penalty": "above 1, up to 2: repeat less",
    "max_tokens": "longest answer, in tokens",
    "stop": "ends it there; two: END | ###",
    "seed": "the same seed, the same answer",
}
"""What a setting does, in 32 characters: all that is left beside its field in 80 columns."""


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """What a chat has of its own."""

    system: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)


class SettingsDialog(Dialog[ChatSettings | None]):
    """Gives the new settings, or None when the user leaves without taking them."""

    BINDINGS: ClassVar = [
        dialog_binding("dialog_close", "leave"),
        dialog_binding("dialog_apply", "take", priority=True),
        dialog_binding("list_down", "app.focus_next"),
        dialog_binding("list_up", "app.focus_previous"),
    ]

    def __init__(
        self,
        now: ChatSettings,
        defaults: SamplingParams,
        presets: Mapping[str, Preset],
        check: Callable[[Mapping[str, Any]], object],
        known: Collection[str] | None = None,
        unknown: str = "the server's",
    ) -> None:
        """``check`` raises :class:`InvalidOption` for settings that can't work.

        Args:
            known: settings whose default is known; None: all.
            unknown: what an empty field says of the others.
        """
        super().__init__()
        self._presets, self._check = presets, check
        self._now = now
        self._hidden = _hidden(now.sampling)
        """Settings without a field, which a preset may have brought; they stay."""
        self._system = TextInput(now.system or "", placeholder="the model's own, if it has one", id="system")
        self._fields = {
            name: LineInput(
                show_value(name, now.sampling[name]) if name in now.sampling else "",
                placeholder=show_value(name, getattr(defaults, name))
                if known is None or name in known
                else unknown,
                id=name,
                compact=True,
            )
            for name in setting_names()
        }
        self._shown = {name: field_.value for name, field_ in self._fields.items()}
        self._shown_system = self._system.text
        """As the dialog opened. What stands there unchanged is taken as it was, not as it could be shown."""
        self._problem = Static("", classes="problem", markup=False)

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog settings", can_focus=False):
            yield Label("Settings of this chat", classes="title")
            yield Label("An empty field takes the default that it shows.", classes="hint")
            if self._presets:
                with Horizontal(classes="field"):
                    yield Label("preset", classes="name")
                    yield Select(
                        [(sanitize_line(name), name) for name in self._presets],
                        prompt="choose one to fill in its values",
                        compact=True,
                    )
            with Horizontal(classes="field system"):
                yield Label("system prompt", classes="name")
                yield self._system
            for name, field_ in self._fields.items():
                with Horizontal(classes="field"):
                    yield Label(name.replace("_", " "), classes="name")
                    yield field_
                    yield Label(HELP[name], classes="about", markup=False)
            yield self._problem
            with Horizontal(classes="buttons"):
                yield Button(
                    f"Apply ({find('dialog_apply', actions_of(self)).key_label})",
                    id="take",
                    variant="primary",
                    compact=True,
                )
                yield Button("Cancel", id="cancel", compact=True)

    def on_mount(self) -> None:
        self._fields["temperature"].focus()

    def on_select_changed(self, event: Select.Changed) -> None:
        preset = self._presets.get(str(event.value))
        if preset is None:
            return
        if preset.system is not None:
            self._system.text = preset.system
        self._hidden = _hidden(preset.sampling)
        for name, field_ in self._fields.items():
            field_.value = show_value(name, preset.sampling[name]) if name in preset.sampling else ""

    def on_input_submitted(self) -> None:
        self.action_take()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        if event.button.id == "take":
            self.action_take()
        else:
            self.dismiss(None)

    def action_leave(self) -> None:
        self.dismiss(None)

    def action_take(self) -> None:
        """Check every field; the first that can't work keeps the dialog open and is named."""
        sampling = dict(self._hidden)
        for name, field_ in self._fields.items():
            written = field_.value.strip() if name != "stop" else field_.value
            if not written:
                continue
            if name in self._now.sampling and field_.value == self._shown[name]:
                sampling[name] = self._now.sampling[name]
                continue
            try:
                if (value := parse_value(name, written)) is not None:
                    self._check({name: value})
                    sampling[name] = value
            except InvalidOption as error:
                self._problem.update(sanitize_line(str(error), 200))
                field_.focus()
                return
        text = self._system.text
        system = self._now.system if text == self._shown_system else text.strip() or None
        self.dismiss(ChatSettings(system, sampling))


def _hidden(sampling: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sampling.items() if name in HIDDEN}
