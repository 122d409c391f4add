"""What the user can set for one chat: the system prompt, sampling, a preset; and what the model is."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from nanochat.engine.config import SamplingParams
from nanochat.errors import InvalidOption
from nanochat.sanitize import sanitize_line
from nanochat.ui import formatting as fmt
from nanochat.ui.chat import Chat
from nanochat.ui.chat_screen import ChatScreen
from nanochat.ui.chrome import is_over_server
from nanochat.ui.sampling_commands import describe, parse_setting, shortened
from nanochat.ui.settings_dialog import ChatSettings, SettingsDialog

if TYPE_CHECKING:
    from nanochat.settings import Preset
    from nanochat.ui.app import NanochatApp

THINKING: dict[str, bool | None] = {"on": True, "off": False, "default": None}


class SettingsActions(ChatScreen):
    """The actions of the group Settings, for the chat in view."""

    @property
    def presets(self) -> Mapping[str, Preset]:
        """By name, from the settings file."""
        app: NanochatApp = self.app  # type: ignore[assignment]
        return app.presets

    def configure(self, chat: Chat, system: str | None, sampling: dict[str, Any]) -> None:
        """Give a chat these settings and say so in it; the one place where that happens.

        Raises:
            InvalidOption: a value can't work; nothing has changed.
        """
        described = self._described(sampling)
        told = (
            "" if chat.system == system else " The system prompt is set." if system else " No system prompt."
        )
        chat.system, chat.sampling = system, sampling
        self.archive.configure(chat)
        self.tell(chat, f"From the next message on: {described}.{told}")

    def sampling_params(self, sampling: Mapping[str, Any]) -> SamplingParams:
        """A chat's settings over the user's and, once it is there, the model's.

        Raises:
            InvalidOption: a value can't work.
        """
        if self.bridge is not None:
            return self.bridge.sampling_params(sampling)
        return SamplingParams(**{**self._user_sampling, **sampling})

    def _known_settings(self, sampling: Mapping[str, Any]) -> Collection[str] | None:
        """Names of the settings whose value is known yet; None: all."""
        if self.bridge is not None:
            return self.bridge.known_settings(sampling)
        return {**self._user_sampling, **sampling}

    @property
    def _user_sampling(self) -> Mapping[str, Any]:
        app: NanochatApp = self.app  # type: ignore[assignment]
        return app.sampling

    def _described(self, sampling: Mapping[str, Any]) -> str:
        """All settings on one line; raises as :meth:`sampling_params`."""
        params, known = self.sampling_params(sampling), self._known_settings(sampling)
        return describe(params, sampling, known, self._whose_defaults)

    @property
    def _whose_defaults(self) -> str:
        return "the server" if is_over_server(self) else "the model"

    def action_system(self, argument: str = "") -> None:
        chat = self.workspace.active
        if argument:
            chat.system = None if argument == "none" else argument
            self.archive.configure(chat)
            self.tell(chat, "The system prompt is set; it holds from the next message on.")
        else:
            shown = sanitize_line(chat.system, 1_000) if chat.system else "none of its own"
            self.tell(
                chat,
                f"System prompt: {shown}. /system followed by a text sets it, /system none takes it away.",
            )

    def action_set(self, argument: str = "") -> None:
        chat = self.workspace.active
        try:
            changed = dict(chat.sampling)
            if not argument:
                self.tell(chat, self._described(changed))
                return
            name, value = parse_setting(argument)
            changed.pop(name, None)
            if value is not None:
                changed[name] = value
            self.configure(chat, chat.system, changed)
        except InvalidOption as error:
            self.tell(chat, sanitize_line(str(error), 400), "error")

    def action_think(self, argument: str = "") -> None:
        """Whether the model is asked to reason, and whether earlier reasoning stays in the context."""
        chat, wanted = self.workspace.active, argument.lower()
        if wanted in THINKING:
            chat.enable_thinking = THINKING[wanted]
        elif wanted in ("keep", "drop"):
            chat.keep_reasoning = wanted == "keep"
        elif wanted:
            self.notify("/think takes on, off, default, keep or drop.", severity="warning")
            return
        self.archive.configure(chat)
        if self.bridge is not None and self.bridge.backend.about.reasoning_tags is None:
            self.tell(chat, "This model has no reasoning of its own; /think changes nothing for it.")
            return
        asked = {True: "on", False: "off", None: "as the model's template has it"}[chat.enable_thinking]
        kept = "stays in the context" if chat.keep_reasoning else "is left out where the template does so"
        self.tell(chat, f"From the next message on: reasoning {asked}; earlier reasoning {kept}.")

    def action_preset(self, argument: str = "") -> None:
        """Take a preset's settings, and nothing of the chat's own; without a name, say which there are."""
        chat = self.workspace.active
        names = ", ".join(map(sanitize_line, self.presets)) or "none"
        preset = self.presets.get(argument)
        if not argument:
            self.tell(chat, f"Presets: {names}. They stand in the settings file under [presets.NAME].")
        elif preset is None:
            asked = sanitize_line(shortened(argument))
            self.tell(chat, f'There is no preset "{asked}"; the settings file has: {names}.', "error")
        else:
            system = preset.system if preset.system is not None else chat.system
            try:
                self.configure(chat, system, dict(preset.sampling))
            except InvalidOption as error:
                self.tell(chat, sanitize_line(str(error), 400), "error")

    def action_settings(self) -> None:
        """All settings of the chat in view, in a dialog."""
        chat = self.workspace.active

        def take(settings: ChatSettings | None) -> None:
            if settings is None or chat not in self.workspace.chats:
                return
            if settings == ChatSettings(chat.system, chat.sampling):
                self.notify("The settings are as they were.", timeout=3)
            else:
                self.configure(chat, settings.system, settings.sampling)

        now = ChatSettings(chat.system, dict(chat.sampling))
        dialog = SettingsDialog(
            now,
            self.sampling_params({}),
            self.presets,
            self.sampling_params,
            self._known_settings({}),
            f"{self._whose_defaults}'s",
        )
        self.app.push_screen(dialog, take)

    def action_model(self, argument: str = "") -> None:
        """Load the named model instead; without a name, say what runs, or try again what could not be loaded."""
        nanochat: NanochatApp = self.app  # type: ignore[assignment]
        if self.bridge is None and self.load_state.error is None:
            self.notify("The model isn't ready yet.")
        elif not argument:
            if self.bridge is not None:
                self.tell(self.workspace.active, self.bridge.backend.about.description)
            else:
                nanochat.switch_model(None)
        elif self.workspace.busy:
            busy = fmt.plural(len(self.workspace.busy), "chat")
            self.notify(f"{busy} still answering; stop that first (Esc), then choose another model.")
        else:
            nanochat.switch_model("" if argument == "default" else argument)
