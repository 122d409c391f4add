"""The chat app: paints first, loads the model behind the screen, and leaves the terminal as it found it.

Imports neither torch nor transformers; the loader does, on its own thread, once the screen is up.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from textual.app import App, SuspendNotSupported
from textual.binding import BindingType
from textual.driver import Driver
from textual.filter import ANSIToTruecolor, LineFilter
from textual.screen import Screen
from textual.widgets import TextArea

from nanochat.backend.opening import BackendConfig
from nanochat.backend.remote.config import RemoteConfig
from nanochat.history import default_history_file
from nanochat.sanitize import sanitize_line
from nanochat.settings import AppSettings, Preset, Settings, user_path
from nanochat.stray_output import log_file
from nanochat.ui import clipboard
from nanochat.ui import formatting as fmt
from nanochat.ui.actions import ACTIONS, Action, bindings, chosen_actions, find
from nanochat.ui.archive import Archive, HistoryTroubled
from nanochat.ui.bridge import Bridge
from nanochat.ui.chrome import LoadState
from nanochat.ui.history_opening import HistoryOpened
from nanochat.ui.loader import BackendReady, Loader, LoadFailed, LoadProgressed
from nanochat.ui.main_screen import MainScreen
from nanochat.ui.palette import ActionsProvider
from nanochat.ui.screenshots import file_name, pictures_folder, save, widget_svg
from nanochat.ui.signals import EndingSignals
from nanochat.ui.stats_panel import StatsPanel
from nanochat.ui.terminal import UnfitTerminal, check_terminal, reserved_screen
from nanochat.ui.textual_private import (
    lasting_driver,
    let_alt_digits_through,
    let_keys_follow_escape,
    let_pastes_be_pastes,
    let_single_timers_come,
    let_text_have_no_room,
    write_to_terminal,
)
from nanochat.ui.theme import THEMES, theme_named

logger = logging.getLogger(__name__)

HISTORY_NOTE_S = 20.0
QUIT_WINDOW_S = 2.0
"""Two presses of Ctrl+C within this time quit."""
LOAD_WAIT_S = 0.3
"""On leaving while the model loads, the loader is given this long to notice."""
RELEASE_S = 3600.0
"""Another model is loaded when the last step of the one before is over, or after so long."""
CLOSE_WAIT_S = 1.0
"""On leaving, the backend and the disk are waited for this long."""
SAVE_GRACE_S = 0.5
"""And so much longer for word of what the disk has not taken by then."""


class NanochatApp(App[None]):
    """The app. It owns the backend; the chats belong to its main screen."""

    TITLE = "nanochat"
    CSS_PATH = "nanochat.tcss"
    COMMANDS: ClassVar = {ActionsProvider}
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("app")]

    def __init__(
        self,
        config: BackendConfig,
        *,
        system: str | None = None,
        sampling: Mapping[str, Any] | None = None,
        presets: Mapping[str, Preset] | None = None,
        look: AppSettings | None = None,
        actions: tuple[Action, ...] = ACTIONS,
        history_file: Path | None = None,
    ) -> None:
        """Make the app; running it loads the model.

        Args:
            system: system prompt of new chats.
            sampling: the user's settings over the model's recommendation, by parameter name.
            presets: by name, from the settings file.
            look: how the app looks.
            actions: the table with the user's keys.
            history_file: where chats are saved; None: in memory only.
        """
        super().__init__()
        let_alt_digits_through()
        let_keys_follow_escape()
        let_pastes_be_pastes()
        let_text_have_no_room()
        let_single_timers_come()
        self.actions = actions
        self.look = look or AppSettings()
        self.presets = dict(presets or {})
        self.load_error: str | None = None
        self.unsaved: str | None = None
        """A sentence if chats could not be saved in the end."""
        self._system = system
        self.sampling = dict(sampling or {})
        """The user's settings over the model's recommendation, by parameter name."""
        self._archive = Archive(history_file, self.post_message)
        self._config = config
        self._loader = Loader(config, self.post_message)
        self._config_before: BackendConfig | None = None
        """What to load again if another model, chosen by the user, can't be loaded."""
        self._bridge: Bridge | None = None
        self._interrupted_s = -QUIT_WINDOW_S
        self._main: MainScreen | None = None
        """The main screen, also once the app has ended."""
        self.signals = EndingSignals(self._save)
        for theme in THEMES:
            self.register_theme(theme)
        self.theme = theme_named(self.look.theme).name
        if self.look.reduced_motion:
            self.animation_level = "none"
        self.set_keymap({action.id: action.keys for action in actions if action != find(action.id)})

    def get_driver_class(self) -> type[Driver]:
        return lasting_driver(super().get_driver_class(), lambda: self.signals.hang_up())

    def get_default_screen(self) -> Screen[None]:
        screen = self._main = MainScreen(self._system, self._archive)
        screen.panel_mode = None if self.look.panel == "auto" else self.look.panel
        return screen

    @property
    def is_over_server(self) -> bool:
        """Whether a server answers, instead of an engine of our own."""
        return isinstance(self._config, RemoteConfig)

    @property
    def main_screen(self) -> MainScreen:
        """The screen below any dialog."""
        screen = self.screen_stack[0]
        if not isinstance(screen, MainScreen):
            raise TypeError(f"the first screen is a {type(screen).__name__}")
        return screen

    def on_mount(self) -> None:
        self.signals.attach(self.leave)
        self.call_after_refresh(self._loader.start)  # importing PyTorch would delay the first paint

    async def on_history_opened(self, event: HistoryOpened) -> None:
        await self.main_screen.restore(event)
        if event.problem is not None:
            self.main_screen.show_saved()
            self._tell_of_history(f"{event.problem} Until then, chats are kept in memory only.")

    def on_history_troubled(self, event: HistoryTroubled) -> None:
        self._archive.heard(event)
        self.main_screen.show_saved()
        if event.problem is not None:
            self._tell_of_history(event.problem)
        else:
            self.notify("Chats are being saved again.")

    def _tell_of_history(self, problem: str) -> None:
        self.notify(sanitize_line(problem, 1_000), severity="warning", timeout=HISTORY_NOTE_S, markup=False)

    def on_load_progressed(self, event: LoadProgressed) -> None:
        self.main_screen.show_load(LoadState(progress=event.progress))

    def switch_model(self, model: str | None) -> None:
        """Load another model in place of the one that runs, or could not be loaded; no chat may be answering.

        None: the one that could not be loaded, once more.
        """
        before: Callable[[], object] | None = None
        if self._bridge is not None:
            backend, self._bridge = self._bridge.release(), None
            self._config_before, before = self._config, partial(backend.close, RELEASE_S)
        elif self.load_error is None:  # one is being loaded
            return
        self.load_error = None
        self.main_screen.release()
        self._load(self._config if model is None else replace(self._config, model=model), before)

    def _load(self, config: BackendConfig, before: Callable[[], object] | None = None) -> None:
        """Load on a thread, after something else; both models at once might not fit the memory."""
        self._config, self._loader = config, Loader(config, self.post_message, before)
        self._loader.start()

    def on_load_failed(self, event: LoadFailed) -> None:
        if self._config_before is not None:
            main = self.main_screen
            error = sanitize_line(event.error, 2_000)
            again = "is asked" if self.is_over_server else "is loaded"
            main.tell(main.chat, f"{error} The model before {again} again.", "error")
            config, self._config_before = self._config_before, None
            self._load(config)
            return
        self.load_error = sanitize_line(event.error, 2_000)
        self.main_screen.fail(self.load_error)

    def on_backend_ready(self, event: BackendReady) -> None:
        self._config_before = None
        self._bridge = Bridge(
            event.backend,
            self.sampling,
            self.main_screen.post_message,
            self._archive.grew,
            self._archive.came_to_end,
        )
        self.main_screen.start(self._bridge)

    def action_interrupt(self) -> None:
        """Copy what is selected; else stop the answer in view; else quit when pressed twice."""
        focused = self.focused
        selected = focused.selected_text if isinstance(focused, TextArea) else ""
        if text := selected or self.screen.get_selected_text():
            self.copy_to_clipboard(text)
            self.screen.clear_selection()
            self.notify("Copied.", timeout=2)
            return
        main = self.main_screen
        now_s = time.monotonic()
        if main.chat.is_busy:
            main.action_stop()
        elif now_s - self._interrupted_s < QUIT_WINDOW_S:
            self.leave()
        else:
            self._interrupted_s = now_s
            busy = len(main.workspace.busy)
            note = f" {fmt.plural(busy, 'chat')} still answering." if busy else ""
            self.notify(f"Press ^C again to quit.{note}", timeout=QUIT_WINDOW_S)

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Not the one that looks at every line for the terminal's own sixteen colours: no theme here has any."""
        return [one for one in super().get_line_filters() if not isinstance(one, ANSIToTruecolor)]

    def copy_to_clipboard(self, text: str) -> None:
        """Copy by every way there is; only ever at the user's command."""
        super().copy_to_clipboard(text)
        for sequence in clipboard.sequences(text, os.environ):
            write_to_terminal(self, sequence)
        command = clipboard.tool(os.environ) if self.look.clipboard == "auto" else None
        if command is not None:
            self.run_worker(self._copy_with(command, text), group="clipboard", exclusive=True)
        elif len(text) > clipboard.MAX_SEQUENCE * 3 // 4:
            self.notify("Some terminals refuse to copy this much text.", severity="warning")

    async def _copy_with(self, command: Sequence[str], text: str) -> None:
        if not await clipboard.give_to(command, text):
            logger.warning("%s could not copy", command[0])

    def action_suspend(self) -> None:
        """Stop, as ^Z does with other programs, and give the terminal to the shell until ``fg``."""
        # Without a job of its own (started by tmux or ssh directly) no shell is there to wake it again.
        has_shell = hasattr(signal, "SIGSTOP") and os.getpgrp() != os.getsid(0)
        try:
            if not has_shell:
                raise SuspendNotSupported
            with self.suspend():
                os.kill(0, signal.SIGSTOP)  # the whole job: what has started the app would wait for it
        except SuspendNotSupported:
            self.notify(
                "The app can't be put aside here: there is no shell to go back to.", severity="warning"
            )

    async def action_quit(self) -> None:
        self.leave()

    def leave(self) -> None:
        """End the app; the exit status says whether there was a model."""
        self.exit(return_code=1 if self.load_error is not None else 0)

    def action_screenshot(self, filename: str | None = None, path: str | None = None) -> None:
        """Save the screen as SVG, or with ``panel`` the stats panel alone, and say where."""
        what = (filename or "").lower()
        panel = self.main_screen.query_one(StatsPanel)
        if what not in ("", "panel"):
            self.notify("/screenshot saves the whole screen, /screenshot panel the stats panel alone.")
            return
        if what and not panel.display:
            self.notify("The stats panel isn't shown; F2 shows it.", severity="warning")
            return
        svg = widget_svg(panel, "nanochat") if what else self.export_screenshot(title="nanochat")
        folder = path or self.look.screenshot_folder
        file = (user_path(folder) if folder else pictures_folder()) / file_name(datetime.now())
        if (problem := save(svg, file)) is not None:
            self.notify(problem, severity="error", markup=False)
        else:
            self.notify(str(file), title="Screenshot saved", markup=False)

    def close_engine(self) -> bool:
        """End loading or the engine, and save the chats; False if a thread is still busy after a moment."""

        tasks: list[Callable[[], object]] = [
            self._save,
            lambda: self._loader.abandon(LOAD_WAIT_S),
        ]
        if self._bridge is not None:
            self._bridge.stop_all()
            tasks.append(self._bridge.backend.close)
        threads = [threading.Thread(target=task, name="nanochat-close", daemon=True) for task in tasks]
        deadline_s = time.monotonic() + CLOSE_WAIT_S
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        threads[0].join(SAVE_GRACE_S)
        if threads[0].is_alive():
            self.unsaved = "Your chats may not be saved: the disk didn't answer in time."
        return self._loader.is_idle and not any(thread.is_alive() for thread in threads)

    def _save(self) -> None:
        """Save the chats and what stands in prompts, and close the history."""
        try:
            if self._main is not None:
                self._main.keep_drafts()
        except Exception:
            # The app may have failed, or hang in the midst of anything: chats are still to be saved.
            logger.exception("what stands in the prompts could not be read")
        self.unsaved = self._archive.close(CLOSE_WAIT_S) or self.unsaved


def run_app(config: BackendConfig, *, system: str | None = None, settings: Settings | None = None) -> int:
    """Run the app until the user leaves; returns the exit status.

    Args:
        config: which model to load, and how; or which server to connect with.
        system: system prompt of new chats.
        settings: what the user's file says.

    Returns:
        0; or 1 with a sentence on standard error when the terminal can't show the app, the model could
        not be loaded, or the app has failed; or 128 and the number of the signal that ended it.

    Raises:
        InvalidOption: the file gives an action a key that can't work.
    """
    settings = settings or Settings()
    actions = chosen_actions(settings)
    if os.environ.get("NO_COLOR") == "":  # no-color.org: empty means unset; Textual takes it for set
        del os.environ["NO_COLOR"]
    try:
        check_terminal()
    except UnfitTerminal as error:
        print(f"nanochat: {error}", file=sys.stderr)
        return 1
    log = log_file()
    app = NanochatApp(
        config,
        system=system,
        sampling=settings.sampling,
        presets=settings.presets,
        look=settings.app,
        actions=actions,
        history_file=default_history_file(),
    )
    with app.signals.awaited(), reserved_screen(log, app.signals.hang_up):
        logging.basicConfig(filename=log) if log.parent.is_dir() else None
        app.run()
        is_closed = app.close_engine()
    # None: it has failed, and left by no way of ours.
    status = 1 if app.return_code is None else app.return_code
    if app.unsaved is not None:
        with suppress(OSError):  # the terminal may be gone
            print(f"nanochat: {sanitize_line(app.unsaved, 2_000)}", file=sys.stderr, flush=True)
    if app.signals.status is not None:
        return _end(app.signals.status, is_closed)
    if app.load_error is not None:
        print(f"nanochat: {app.load_error}", file=sys.stderr)
    elif status:
        print(f"nanochat: The app has failed; {log} says where.", file=sys.stderr)
    return _end(status, is_closed)


def _end(status: int, is_closed: bool) -> int:
    if not is_closed:
        # A thread is deep in native code, importing PyTorch or computing a step, and can't be asked to
        # end. Python's own exit would tear the interpreter down under it and may crash; nothing is open.
        with suppress(OSError):  # the terminal may be gone
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
    return status
