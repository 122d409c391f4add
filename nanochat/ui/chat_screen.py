"""What comes from the backend: the model as it loads, answers as they come, and what they cost.

The app hands over the bridge to it once the model is loaded or the server found; prompts sent earlier wait for that.
What the user can do lies in :mod:`nanochat.ui.main_screen`.
"""

from __future__ import annotations

import asyncio
import gc
import time
from dataclasses import dataclass

from textual.message import Message
from textual.timer import Timer

from nanochat.backend.interface import DropOffer
from nanochat.sanitize import sanitize, sanitize_line
from nanochat.ui import formatting as fmt
from nanochat.ui.archive import Archive
from nanochat.ui.bridge import AnswerEnded, AnswerRefused, AnswersGrew, AnswerStarted, Bridge, ContextCounted
from nanochat.ui.chat import Chat, Phase
from nanochat.ui.chrome import LoadState, Welcome, is_over_server, ways_out
from nanochat.ui.history_opening import HistoryOpened
from nanochat.ui.pane_screen import PaneScreen
from nanochat.ui.snapshots import busy_label, take_snapshot, update_phases
from nanochat.ui.stats_panel import CONTEXT_WARNING

MIN_POLL_S = 0.04
MIN_STATS_S = 0.15
"""New text in view takes statistics as old as this along: one drawing of the screen costs less than two."""
MAX_STATS_S = 0.22
"""Without new text, statistics are shown when they are as old as this."""
COUNT_AFTER_S = 1.0
"""A chat's context is counted once it has been in view for so long: all of a long one is encoded, and meanwhile it is
being read, or left again."""
TIDY_S = 1.0
"""Nothing has been answered for so long: time to look for garbage."""
TIDY_ROUNDS = 10
"""And so many quick rounds of the collector have come since it last looked everywhere."""
DROP_ACTION = "drop_oldest"
NO_TEMPLATE = (
    "This model has no chat template: it was not made to chat, and goes on with your text rather than answer it. "
    "A model with Instruct or Chat in its name will do better."
)
NO_TEMPLATE_S = 20.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """A question that didn't fit."""

    text: str
    """Empty when it was to be answered again, or its answer to go on."""
    offer: DropOffer
    continues: bool = False
    """Whether an answer was to go on."""


class ChatScreen(PaneScreen):
    """The workspace, its model, and what the chats' answers are doing."""

    @dataclass
    class Refused(Message):
        """A chat's question didn't fit, but would with fewer turns."""

        chat: Chat

    def __init__(self, system: str | None, archive: Archive) -> None:
        super().__init__(system, archive)
        self.refusals: dict[int, Refusal] = {}
        """By chat id: the last question that didn't fit, and what would make it fit."""
        self._next_poll: asyncio.TimerHandle | None = None
        self._to_count: Chat | None = None
        """Its context is to be counted, should it stay in view."""
        self._shown_s = 0.0
        """When statistics were last shown, by the monotonic clock."""
        self._cpu_s = 0.0
        """Processor time of this thread when text in view last grew."""
        self._idle_timer: Timer | None = None
        """For a backend whose figures change also while no chat here answers."""

    def remove_pane(self, chat: Chat) -> None:
        self.refusals.pop(chat.id, None)
        super().remove_pane(chat)

    # Loading

    def show_load(self, state: LoadState) -> None:
        """Loading has come further, or has ended."""
        self.load_state = state
        for welcome in self.query(Welcome):
            welcome.show(state)
        self._header.show(state, "")

    def fail(self, error: str) -> None:
        """There will be no model: give back what waits for it."""
        self.show_load(LoadState(error=error))
        for chat in self.workspace.busy:
            self.withdraw(chat)
        self._explain_failure()
        self.show_tabs()

    async def restore(self, opened: HistoryOpened) -> None:
        await super().restore(opened)
        self._explain_failure()

    def _explain_failure(self) -> None:
        """An empty chat says by itself why there is no model; any other one has to be told."""
        if self.workspace.active.root.children:
            self.has_no_model(self.workspace.active)

    def withdraw(self, chat: Chat) -> str:
        """Take back a question whose answer can't start, and put it into the prompt; returns it."""
        pane = self.pane(chat)
        text, gone = chat.withdraw()
        if text:
            pane.restore_prompt(text)
            self.keep_draft(chat)  # first: it is saved at any moment, as a message or as a draft
        self.archive.withdrew(chat, gone)
        pane.show_path()
        return text

    def release(self) -> None:
        """Another model is to be loaded: what is asked from now on waits for it."""
        self.bridge = None
        if self._idle_timer is not None:
            self._idle_timer.stop()
        for chat in self.workspace.chats:  # another model's context may be larger, or smaller
            self.forget_refusal(chat)
            chat.warned_context = False
        self.show_load(LoadState())
        self.show_tabs()

    def start(self, bridge: Bridge) -> None:
        """The backend is there: send what waits for it."""
        self.bridge = bridge
        about = bridge.backend.about
        self.archive.model = about.model
        if not about.has_template:
            self.notify(NO_TEMPLATE, severity="warning", timeout=NO_TEMPLATE_S, markup=False)
        for chat in self.workspace.chats:
            self._mark_reasoning(chat)
            chat.counted = None  # by the model before
        self.show_load(LoadState(model=f"{about.model} · {about.place}"))
        if about.refresh_s is not None:
            self._idle_timer = self.set_interval(about.refresh_s, self._show_idle)
        for chat in self.workspace.busy:
            self.send(chat)
        self.show_stats()

    def has_no_model(self, chat: Chat) -> bool:
        """Whether nothing will answer because no model could be loaded, or no server found.

        The chat is told so, once: who tries again reads only what can be done, in passing.
        """
        if self.load_state.error is None:
            return False
        is_remote = is_over_server(self)
        error, ways = sanitize_line(self.load_state.error, 1_000), ways_out(is_over_server=is_remote)
        sentence = f"{error} {ways}."
        if chat.has_just_noted(sentence):
            what = "server" if is_remote else "model"
            self.notify(f"There is still no {what} to answer: {ways}.", severity="warning", markup=False)
        else:
            self.tell(chat, sentence, "error")
        return True

    # Answers

    def send(self, chat: Chat) -> None:
        """Submit the chat's question, or let it wait for the model."""
        self.forget_refusal(chat)
        if chat.live is not None:
            chat.live.model = self.archive.model
        is_new = chat.store_id is None
        self.archive.keep(chat)
        self.keep_draft(chat)
        if is_new:
            self.save_tabs()
        if self.bridge is None:
            chat.phase = Phase.LOADING
        else:
            chat.phase = Phase.SUBMITTED
            self.bridge.submit(chat)
            self.poll_soon()
        self.show_tabs()
        self.pane(chat).update_live()

    def on_answer_started(self, event: AnswerStarted) -> None:
        chat = self.workspace.find(event.chat_id)
        if self.bridge is None or chat is None or chat.live is None:
            event.handle.cancel()
            return
        answer = chat.live.answer
        if event.partial is None:
            answer.tags, answer.is_opened = event.reasoning_tags, event.opens_reasoning
        else:
            chat.live.partial = event.partial
            answer.replace(sanitize(event.partial.text))
        chat.phase = Phase.QUEUED
        self.bridge.track(chat.id, event.handle, event.partial)
        self.poll_soon()
        self.show_stats()

    def on_answers_grew(self, event: AnswersGrew) -> None:
        bridge = self.bridge
        if bridge is None:
            return
        seen: list[Chat] = []
        for grown in event.grown:
            chat = self.workspace.find(grown.chat_id)
            if chat is None or chat.live is None:
                continue
            chat.live.answer.append(grown.text, grown.num_tokens)
            if self.pane(chat).grow():
                seen.append(chat)
            else:
                bridge.report_cost(chat.id, None)
        if seen and time.monotonic() - self._shown_s >= MIN_STATS_S:
            self.show_stats()
        # All that this thread has done since the last text in view: also drawing it, and what else is shown.
        cpu_s = time.thread_time()
        for chat in seen:
            bridge.report_cost(chat.id, cpu_s - self._cpu_s)
        if seen:
            self._cpu_s = cpu_s

    def on_answer_ended(self, event: AnswerEnded) -> None:
        chat = self.workspace.find(event.chat_id)
        if chat is None or chat.live is None:
            return
        answer, pane = chat.live, self.pane(chat)
        chat.end_answer(event.output)
        self.archive.ended(chat, answer)
        chat.is_unread = chat is not self.workspace.active
        pane.end_answer(answer)
        if event.output.error is not None:
            self.tell(chat, sanitize_line(event.output.error, 1_000), "error")
        self._warn_of_context(chat)
        self.show_stats()

    def on_answer_refused(self, event: AnswerRefused) -> None:
        chat = self.workspace.find(event.chat_id)
        if chat is None or chat.live is None:
            return
        continues = chat.live.partial is not None
        text, error = self.withdraw(chat), sanitize_line(event.error, 1_000)
        chat.has_failed = True
        self.forget_refusal(chat)
        if event.offer is None:
            if not chat.has_just_noted(error):  # who tries again and again needs to read it once
                self.tell(chat, error, "error")
        else:
            self.refusals[chat.id] = Refusal(text, event.offer, continues)
            self.tell(
                chat,
                f"{error} {offer_text(event.offer)}.",
                "error",
                DROP_ACTION,
                "Leave out and send (/drop)",
            )
            self.post_message(self.Refused(chat))
        self.show_stats()

    def on_context_counted(self, event: ContextCounted) -> None:
        chat = self.workspace.find(event.chat_id)
        if chat is not None:
            chat.counted = event.counted
            self.show_stats()

    def forget_refusal(self, chat: Chat) -> None:
        """The offer that came with the last refusal no longer holds, as other messages than it was about are sent."""
        self.refusals.pop(chat.id, None)
        notes = [note for note in chat.notes if note.action_id != DROP_ACTION]
        if len(notes) < len(chat.notes):
            chat.notes = notes
            if self.is_open(chat):
                self.pane(chat).show_path()

    def _warn_of_context(self, chat: Chat) -> None:
        limit = self.bridge.backend.about.context_limit if self.bridge is not None else None
        used = chat.context_tokens
        if limit and used >= CONTEXT_WARNING * limit and not chat.warned_context:
            chat.warned_context = True
            self.tell(
                chat,
                f"This chat fills {fmt.percent(used, limit)} of the context ({fmt.count(used)} of {fmt.count(limit)} "
                "tokens). /drop 1 leaves out the oldest turn, ^N opens a new chat.",
                "warning",
            )

    # What the backend is doing

    def poll_soon(self, delay_s: float = MIN_POLL_S) -> None:
        """Look for what has come from the backend after this long at most, and go on as long as any chat answers.

        By the event loop's own timer, which knows when it fires.
        """
        loop = asyncio.get_running_loop()
        if self._next_poll is not None:
            if self._next_poll.when() <= loop.time() + delay_s:
                return
            self._next_poll.cancel()
        self._next_poll = loop.call_later(delay_s, self.call_later, self._poll)

    def _poll(self) -> None:
        self._next_poll = None
        if self.bridge is None:
            return
        self.bridge.poll()
        is_over = not self.bridge.is_active and not self.workspace.busy
        if is_over or time.monotonic() - self._shown_s >= MAX_STATS_S:
            self.show_stats()
        if is_over:
            self.set_timer(TIDY_S, self._tidy)
        else:
            # No sooner than anything may be drawn: waking up costs the engine time, too.
            self.poll_soon(min(MAX_STATS_S, max(MIN_POLL_S, self.bridge.rest_s())))

    def _tidy(self) -> None:
        """Look for garbage now, as it stops everything for a moment, and is not done while chats answer."""
        if not self.workspace.busy and gc.get_count()[2] >= TIDY_ROUNDS:
            gc.collect()

    def _count(self) -> None:
        """Have the context of the chat in view be counted, if it has been in view for a while."""
        chat, self._to_count = self._to_count, None
        if self.bridge is not None and chat is self.workspace.active and chat.needs_count:
            self.bridge.count(chat)
        else:
            self._show_idle()  # which sees whether another is to be counted

    def _show_idle(self) -> None:
        if self.bridge is not None and not self.bridge.is_active:
            self.show_stats()

    def show_stats(self) -> None:
        """Take the backend's statistics and bring tabs, footers, header and panel up to date."""
        bridge, workspace = self.bridge, self.workspace
        if bridge is None:
            self.show_tabs()
            return
        self._shown_s = time.monotonic()
        if workspace.active.needs_count and self._to_count is not workspace.active:
            self._to_count = workspace.active
            self.set_timer(COUNT_AFTER_S, self._count)
        stats = bridge.backend.stats(is_shown=self._panel.display or self._stats_line.display)
        chat_ids = bridge.request_ids()
        rows = update_phases(workspace.chats, chat_ids, stats)
        if bridge.is_active or bridge.backend.about.refresh_s is not None:
            self._history.record(stats)
        snapshot = take_snapshot(
            workspace.chats,
            workspace.active,
            workspace.slots,
            chat_ids,
            rows,
            stats,
            bridge.backend.block_map() if self._panel.display else None,
            bridge.backend.about.context_limit,
        )
        (self._panel if self._panel.display else self._stats_line).show(snapshot)
        self._header.show(self.load_state, busy_label(stats))
        for pane in self._panes.values():  # two are in view when chats are compared
            pane.update_live()
        self.show_tabs()


def offer_text(offer: DropOffer) -> str:
    """What leaving out turns would do."""
    turns = "oldest turn" if offer.turns == 1 else f"{fmt.count(offer.turns)} oldest turns"
    before, after, limit = map(fmt.count, (offer.tokens_before, offer.tokens_after, offer.limit))
    about = "about " if offer.is_estimate else ""
    return f"Leaving out the {turns} brings the prompt from {before} to {about}{after} of {limit} tokens"
