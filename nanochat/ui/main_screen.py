"""What the user can do with the chats: one ``action_…`` method for each entry of the actions table."""

from __future__ import annotations

import inspect
from typing import ClassVar

from nanochat.errors import InvalidOption
from nanochat.sanitize import sanitize_line
from nanochat.ui import formatting as fmt
from nanochat.ui.actions import Action, bindings, find, parse_slash
from nanochat.ui.chat import Chat, Message, Phase
from nanochat.ui.chat_pane import ChatPane
from nanochat.ui.chat_screen import ChatScreen, offer_text
from nanochat.ui.copy_actions import CopyActions
from nanochat.ui.dialogs import Confirm, Help
from nanochat.ui.file_actions import FileActions
from nanochat.ui.group_actions import GroupActions
from nanochat.ui.tab_screen import TabScreen
from nanochat.ui.theme import THEMES, theme_named


class MainScreen(CopyActions, FileActions, GroupActions, TabScreen):
    """The chats, and everything that can be done with them."""

    BINDINGS: ClassVar = [*bindings("screen")]

    # Ways to an action: a key (by Textual), a click, the palette, a slash command

    async def action_do(self, action_id: str) -> None:
        await self.run_named(find(action_id))

    async def run_from_palette(self, action: Action) -> None:
        """What needs an argument is written into the prompt as a slash command to complete."""
        if action.needs_argument and not self.pane(self.chat).has_draft:
            self.pane(self.chat).take_prompt(f"/{action.slash} ")
        else:
            await self.run_named(action)

    async def run_named(self, action: Action, argument: str = "") -> None:
        """Do it, on the app or here."""
        method = getattr(self.app if action.place == "app" else self, f"action_{action.id}")
        result = method(argument) if action.argument else method()
        if inspect.isawaitable(result):
            await result

    async def on_chat_pane_prompted(self, event: ChatPane.Prompted) -> None:
        if not self.is_open(event.pane.chat):  # its tab was closed while this was on its way
            return
        event.pane.take_sent()
        call = parse_slash(event.text)
        if call is None:
            text = event.text
            if not self.ask(event.pane.chat, text[1:] if text.startswith("//") else text):
                event.pane.restore_prompt(text)
            return
        if call.action is None:
            self.notify(
                f"There is no command /{sanitize_line(call.name, 30)}; /help lists them.",
                severity="warning",
                markup=False,
            )
            event.pane.restore_prompt(event.text)
        elif call.argument and not call.action.argument:
            self.notify(f"/{call.name} takes nothing after it.", severity="warning", markup=False)
            event.pane.restore_prompt(event.text)
        else:
            if event.pane.chat is not self.chat:  # another tab was chosen while this was on its way
                self._show(event.pane.chat)
            await self.run_named(call.action, call.argument)

    # Asking

    def ask(self, chat: Chat, text: str) -> bool:
        """Send a message; False, and the user is told, where an answer is under way or no model is there."""
        if self.has_no_model(chat):
            return False
        if chat.is_busy:
            self.notify("This chat is still answering; Esc stops it. Your message stays in the prompt.")
            return False
        self._ask(chat, text)
        self.pane(chat).end_edit()
        self.echo(chat, text)
        return True

    def _ask(self, chat: Chat, text: str) -> None:
        self.pane(chat).show_turn(chat.ask(text))
        self.send(chat)

    def action_stop(self) -> None:
        chat = self.chat
        if chat.phase is Phase.LOADING:
            self.withdraw(chat)
            self.show_stats()
        elif chat.is_busy and self.bridge is not None:
            self.bridge.stop(chat.id)
            self.poll_soon()
        elif chat.editing is not None:
            chat.editing = None
            self.pane(chat).end_edit(is_given_up=True)

    def action_again(self) -> None:
        chat = self.chat
        question = next((message for message in reversed(chat.path) if message.role == "user"), None)
        if chat.is_busy:
            self.notify("Stop the answer first (Esc), then ask for another one.")
        elif question is None:
            self.notify("There is no answer yet to give again.")
        elif not self.has_no_model(chat):
            self.pane(chat).show_turn(chat.begin_answer(question))
            self.send(chat)

    def action_continue(self) -> None:
        """Go on with an answer that was stopped, interrupted or cut off."""
        chat, last = self.chat, self.chat.last_answer
        if chat.is_busy:
            self.notify("This chat is still answering.")
        elif last is None or not last.can_continue:
            self.notify("The last answer is complete; there is nothing to continue.")
        elif not self.has_no_model(chat):
            chat.continue_answer(last)
            self.pane(chat).show_path()
            self.send(chat)

    def action_edit(self) -> None:
        """Edit the last question; once more: the one before it, and so on."""
        questions = [message for message in self.chat.path if message.role == "user"]
        if self.chat.editing in questions:
            questions = questions[: questions.index(self.chat.editing)] or questions
        if questions:
            self._edit(questions[-1])
        else:
            self.notify("There is no message to edit yet.")

    def on_chat_pane_edit_wanted(self, event: ChatPane.EditWanted) -> None:
        if self.is_open(event.pane.chat):
            if event.pane.chat is not self.chat:  # of two compared chats, the other one
                self._show(event.pane.chat)
            self._edit(event.message)

    def _edit(self, message: Message) -> None:
        if self.chat.is_busy:
            self.notify("Stop the answer first (Esc), then edit a message.")
            return
        self.forget_refusal(self.chat)
        self.chat.editing = message
        self.pane(self.chat).begin_edit(message.text)

    def action_drop_oldest(self, argument: str = "") -> None:
        """Leave out the given number of turns, or what the last refusal offered, and send what it refused."""
        chat, refusal = self.chat, self.refusals.get(self.chat.id)
        if chat.is_busy:
            self.notify("Stop the answer first (Esc), then leave out turns.")
            return
        if refusal is not None and self.has_no_model(chat):
            return
        if argument:
            refusal = None
            turns = int(argument) if argument.isdecimal() and len(argument) < 7 else 0
        else:
            turns = refusal.offer.turns if refusal is not None else 0
        left = chat.droppable_turns if refusal is None else turns
        if not 1 <= turns <= left:
            can_go = f"/drop 1 leaves out the oldest turn; {fmt.plural(left, 'turn')} can go."
            self.notify(
                can_go if left else "The last turn always stays; ^N opens a new chat.", severity="warning"
            )
            return
        chat.leave_out(turns)
        self.archive.configure(chat)
        chat.warned_context = False
        self.forget_refusal(chat)
        pane = self.pane(chat)
        pane.show_path()
        if refusal is None:
            self.tell(chat, f"{fmt.plural(turns, 'turn')} left out; the model no longer sees them.")
            if self.bridge is not None:
                self.bridge.count(chat)
        elif refusal.text:
            pane.withdraw_draft(refusal.text)
            self._ask(chat, refusal.text)
            pane.end_edit()
        elif refusal.continues:
            self.action_continue()
        else:
            self.action_again()

    def on_chat_screen_refused(self, event: ChatScreen.Refused) -> None:
        """Offer at once to leave out turns, if the chat is in view."""
        refusal = self.refusals.get(event.chat.id)
        if refusal is None or event.chat is not self.chat or self.app.screen is not self:
            return

        def answer(agreed: bool | None) -> None:
            if agreed and self.chat is event.chat and self.refusals.get(event.chat.id) is refusal:
                self.action_drop_oldest()

        question = f"The context is full. {offer_text(refusal.offer)}. The turns stay on the screen."
        self.app.push_screen(Confirm(question, "Leave out and send", "Keep"), answer)

    # Branches

    def action_previous_branch(self) -> None:
        self._step_branch(self.chat, self._last_branching, -1)

    def action_next_branch(self) -> None:
        self._step_branch(self.chat, self._last_branching, 1)

    @property
    def _last_branching(self) -> Message | None:
        """The newest message of the path that has other branches beside it."""
        return next((message for message in reversed(self.chat.path) if message.branch[1] > 1), None)

    def on_chat_pane_branch_wanted(self, event: ChatPane.BranchWanted) -> None:
        if self.is_open(event.pane.chat):
            self._step_branch(event.pane.chat, event.message, event.step)

    def _step_branch(self, chat: Chat, message: Message | None, step: int) -> None:
        if message is None:
            return
        if chat.is_busy:
            self.notify("Stop the answer first (Esc), then look at another one.")
        elif chat.choose_branch(message, step) and message.parent is not None:
            chosen = message.parent.children[message.parent.chosen]
            self.forget_refusal(chat)
            self.archive.chose(chosen)
            self.pane(chat).show_path(chosen)
            self.show_stats()

    def action_clear_chat(self) -> None:
        chat = self.chat
        if self._must_stop_first(chat, "clear"):
            return

        def clear(agreed: bool | None) -> None:
            if agreed and chat in self.workspace.chats and not self._must_stop_first(chat, "clear"):
                chat.clear()
                self.archive.cleared(chat)
                self.forget_refusal(chat)
                self.pane(chat).end_edit(is_given_up=True)
                self.pane(chat).show_path()
                self.show_stats()

        if chat.root.children:
            question = "Forget all messages of this chat, with all its branches?"
            self.app.push_screen(Confirm(question, "Clear", is_final=True), clear)

    # The view

    def action_toggle_stats(self) -> None:
        modes = self.fitting_panel_modes
        now = self.panel_mode if self.panel_mode in modes else modes[0]
        self.show_panel(modes[(modes.index(now) + 1) % len(modes)])

    def action_toggle_reasoning(self) -> None:
        self.pane(self.chat).toggle_reasoning()

    def action_toggle_theme(self, argument: str = "") -> None:
        """The named theme, or the next one."""
        names = [theme.name for theme in THEMES]
        try:
            name = theme_named(argument.lower()).name if argument else None
        except InvalidOption as error:
            self.notify(sanitize_line(str(error)), severity="warning", markup=False)
        else:
            self.app.theme = name or names[(names.index(self.app.theme) + 1) % len(names)]

    def action_scroll_back(self) -> None:
        self.pane(self.chat).scroll_page(-1)

    def action_scroll_forward(self) -> None:
        self.pane(self.chat).scroll_page(1)

    def action_help(self) -> None:
        self.app.push_screen(Help())

    def action_command_palette(self) -> None:
        self.app.action_command_palette()
