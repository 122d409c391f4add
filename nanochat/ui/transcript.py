"""A chat's messages as they are seen: only those near the place in view are widgets.

A chat of thousands of messages opens as quickly as a short one, and costs the screen no more: scrolling
towards an end of what is there brings more of it, and lets go what is far behind. The newest messages are
followed until the user scrolls up. Shows what a :class:`Chat` holds and changes nothing in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from textual.app import ComposeResult
from textual.timer import Timer
from textual.widget import Widget

from nanochat.ui.blank import BlankVertical, BlankVerticalScroll
from nanochat.ui.chat import Chat, Message, Note
from nanochat.ui.markdown_view import MarkdownView
from nanochat.ui.message import AnswerMessage, NoteView, UserMessage
from nanochat.ui.pace import Pace
from nanochat.ui.textual_private import draw_scroll_bar_seldom, follows_end

WINDOW = 16
"""Messages shown at first: enough for a large screen. More come once these are seen."""
CHUNK = 20
"""Messages that come when the view nears an end of those shown."""
MAX_WINDOW = 90
"""Messages shown at most; those farthest from the view go first."""
LAYOUT_S = 0.08
"""Long texts are laid out a slice at a time, this often."""
PLACES_S = 0.02
"""New messages are looked at this often until they have their places."""
HIDDEN_PLACES_S = 0.2
"""The same in a chat out of view, where they get none."""


class Transcript(BlankVerticalScroll):
    """The messages of one chat. Nothing is shown before :meth:`show_end` or :meth:`show_at`."""

    can_focus = False

    def __init__(self, chat: Chat, welcome: Widget | None) -> None:
        """``welcome`` is shown as long as the chat is empty."""
        super().__init__()
        self._chat = chat
        self._welcome = welcome
        self._column = BlankVertical(*([welcome] if welcome is not None else []), classes="column")
        self._first = 0
        self._groups: list[list[Widget]] = []
        """Widgets of the messages shown, from the one at ``_first`` on the path: a message's and its notes'."""
        self._first_sent = 0
        """What :attr:`Chat.first_sent` was when messages were last shown anew."""
        self._is_built = False
        self._is_moving = False
        self._target: Message | None = None
        self._pages_up = 0
        """Pages to be turned once the end that is followed is laid out."""
        self._pace = Pace()
        self._waiting_timer: Timer | None = None

    def compose(self) -> ComposeResult:
        yield self._column

    def on_mount(self) -> None:
        draw_scroll_bar_seldom(self)
        self.watch(self, "scroll_y", self._look_soon, init=False)
        self._waiting_timer = self.set_interval(LAYOUT_S, self._lay_out_more, pause=True)
        self._update_welcome()

    @property
    def is_built(self) -> bool:
        """Whether messages are shown; before, there is nothing to keep up to date."""
        return self._is_built

    # What is shown

    def show_end(self) -> None:
        """Show the path anew, its end in view, and follow it."""
        self._target = None
        self._build(len(self._chat.path) - WINDOW)
        self.anchor()

    def show_at(self, message: Message) -> None:
        """Show the path anew with a message of it at the top."""
        path = self._chat.path
        index = next((index for index, other in enumerate(path) if other is message), len(path))
        if index >= len(path) - 1:
            self.show_end()
            return
        self._target = message
        self._build(index - CHUNK // 2)
        self.release_anchor()
        self._is_moving = True
        self.call_after_refresh(self._go_to, message)

    def show_turn(self, answer: Message) -> None:
        """A question and its answer to come were added at the end, or only another answer."""
        path = self._chat.path
        is_next = answer.parent is not None and answer.branch[1] == answer.parent.branch[1] == 1
        is_same = self._is_built and self._first_sent == self._chat.first_sent
        if not is_next or not is_same or self._last != len(path) - 2:
            self.show_end()
            return
        self._update_welcome()
        for index in (len(path) - 2, len(path) - 1):
            group = self._group(path, index)
            self._groups.append(group)
            self._column.mount_all(group)
        self._trim(at_top=True)
        self._pages_up = 0
        self.anchor()

    def show_note(self, note: Note) -> None:
        """A note was added at the end."""
        self._update_welcome()
        if self._last != len(self._chat.path):
            self.show_end()
            return
        view = NoteView(note)
        if self._groups:
            self._groups[-1].append(view)
        self._column.mount(view)
        self.anchor()

    def page_up(self) -> None:
        """A page up: from the end, where that is followed, though it may not be there yet.

        A text still being laid out gets longer with every slice; the page is turned when its end is known.
        """
        self._pages_up += 1
        self._turn_pages()

    def page_down(self) -> None:
        """A page down, or one less up of those that wait."""
        if self._pages_up:
            self._pages_up -= 1
        else:
            self.scroll_page_down(animate=False)

    def _turn_pages(self) -> None:
        if not self._pages_up or (follows_end(self) and self._is_end_growing()):
            return
        if follows_end(self):
            self.scroll_end(animate=False, immediate=True)
        pages, self._pages_up = self._pages_up, 0
        lines = pages * self.scrollable_content_region.height
        self.scroll_to(y=self.scroll_y - lines, animate=False, immediate=True)

    def _is_end_growing(self) -> bool:
        """Whether a text that reaches into the last page is not yet laid out to its end."""
        unfinished = self._unfinished()
        return any(
            answer.virtual_region.bottom > self.max_scroll_y
            for answer in self.answers()
            if any(answer in view.ancestors for view in unfinished)
        )

    def _unfinished(self) -> list[MarkdownView]:
        """Texts that are not laid out to their end."""
        return [view for view in self.query(MarkdownView) if not view.is_complete and view.size.width]

    def answers(self) -> list[AnswerMessage]:
        """The answers that are shown, from oldest to newest."""
        return [widget for group in self._groups for widget in group if isinstance(widget, AnswerMessage)]

    @property
    def _last(self) -> int:
        """Index on the path of the first message beyond those shown."""
        return self._first + len(self._groups)

    def _build(self, first: int) -> None:
        path = self._chat.path
        self._is_built = True
        self._pages_up = 0
        self._first_sent = self._chat.first_sent
        self._first = max(0, first)
        last = min(len(path), self._first + WINDOW)
        with self.app.batch_update():
            self._column.query("UserMessage, AnswerMessage, NoteView").remove()
            self._groups = [self._group(path, index) for index in range(self._first, last)]
            head = [NoteView(note) for note in self._chat.notes if note.after is None]
            self._column.mount_all([*head, *(widget for group in self._groups for widget in group)])
        self._update_welcome()
        self._look_soon()

    def _group(self, path: list[Message], index: int) -> list[Widget]:
        message, first_sent = path[index], self._chat.first_sent
        group: list[Widget] = []
        if index == first_sent and index > 0:
            group.append(NoteView(Note(None, "The turns above are left out of the context.")))
        widget = (
            UserMessage(message) if message.role == "user" else AnswerMessage(self._chat, message, self._pace)
        )
        widget.set_class(index < first_sent, "-dropped")
        group.append(widget)
        group += [NoteView(note) for note in self._chat.notes if note.after is message]
        return group

    def _update_welcome(self) -> None:
        if self._welcome is not None:
            self._welcome.display = not self._chat.root.children and not self._chat.notes

    # Where the view is

    def _go_to(self, message: Message) -> None:
        if self._target is not message:  # another is wanted meanwhile, or the end
            return
        widgets = [widget for group in self._groups for widget in group]
        if not _have_places(widgets):
            self._again(partial(self._go_to, message))
            return
        self._is_moving = False
        for widget in widgets:
            if isinstance(widget, (UserMessage, AnswerMessage)) and widget.message is message:
                self.scroll_to(y=widget.virtual_region.y - 1, animate=False, immediate=True)
                if self._last < len(self._chat.path):
                    self.release_anchor()  # the end in view is only that of what is shown yet
                widget.add_class("-found")
        self._look_soon()

    def _again(self, look: Callable[[], None]) -> None:
        """Look once more whether new messages have their places."""
        if self.is_attached:
            self.set_timer(PLACES_S if self.size.height else HIDDEN_PLACES_S, look)

    def _look_soon(self) -> None:
        if self._is_built and not self._is_moving:
            self.call_after_refresh(self._look)

    def _look(self) -> None:
        """Bring more messages if the view is near an end of those shown."""
        if self._is_moving or not self.is_attached or not self.size.height:
            return
        path, margin = self._chat.path, self.size.height
        if self._first > 0 and self.scroll_y < margin:
            start = max(0, self._first - CHUNK)
            groups = [self._group(path, index) for index in range(start, self._first)]
            self._move(groups, at_top=True)
        elif self._last < len(path) and self.max_scroll_y - self.scroll_y < margin:
            end = min(len(path), self._last + CHUNK)
            self._move([self._group(path, index) for index in range(self._last, end)], at_top=False)

    def _move(self, groups: list[list[Widget]], *, at_top: bool) -> None:
        """Add messages at one end; what is in view stays where it is."""
        widgets = [widget for group in groups for widget in group]
        self._keep_place(widgets)
        if at_top:
            self._column.mount_all(widgets, before=self._groups[0][0])
            self._groups = groups + self._groups
            self._first -= len(groups)
        else:
            self.release_anchor()  # the end in view was only that of what had been shown
            self._column.mount_all(widgets)
            self._groups += groups
        self._trim(at_top=not at_top)

    def _keep_place(self, new: Sequence[Widget] = ()) -> None:
        """To be called before a change above or below the view: unless the end is followed, what is in view stays.

        ``new`` are widgets that the change brings; there is nothing to keep before they have their places.
        """
        fixed, scroll_y = self._first_in_view(), self.scroll_y
        before = fixed.virtual_region.y
        self._is_moving = True

        def settle() -> None:
            if not _have_places(new):
                self._again(settle)
                return
            self._is_moving = False
            moved = fixed.virtual_region.y - before if fixed.is_attached else 0
            # Else the user has scrolled, and that holds.
            is_cut = self.scroll_y == self.max_scroll_y < scroll_y
            # An anchor at the end of what is shown follows nothing as long as more messages come below.
            if moved and not (follows_end(self) and self._last == len(self._chat.path)):
                start = scroll_y if is_cut else self.scroll_y
                self.scroll_to(y=start + moved, animate=False, immediate=True)
            self._turn_pages()
            if new:
                self._look_soon()

        self.call_after_refresh(settle)

    def on_markdown_view_waiting(self) -> None:
        if self._waiting_timer is not None:
            self._waiting_timer.resume()

    def _lay_out_more(self) -> None:
        """Go on with the texts for which there was no time, the newest first; what is in view stays there."""
        views = self._unfinished()
        if not views and self._waiting_timer is not None:
            self._waiting_timer.pause()
            self._turn_pages()  # what was waited for may have come otherwise, as an answer's next text
        if not views or self._is_moving:
            return
        self._keep_place()
        self._pace.begin()
        for view in reversed(views):
            view.lay_out_more()
            if not self._pace.has_time():
                break

    def _first_in_view(self) -> Widget:
        for group in self._groups:
            for widget in group:
                if widget.virtual_region.bottom > self.scroll_y:
                    return widget
        return self._groups[-1][-1]

    def _trim(self, *, at_top: bool) -> None:
        excess = len(self._groups) - MAX_WINDOW
        if excess <= 0:
            return
        if at_top:
            gone, self._groups = self._groups[:excess], self._groups[excess:]
            self._first += excess
        else:
            gone, self._groups = self._groups[-excess:], self._groups[:-excess]
        self._column.remove_children([widget for group in gone for widget in group])


def _have_places(widgets: Iterable[Widget]) -> bool:
    """Whether all that still stand in the transcript are laid out, with all their parts."""
    return all(
        widget.has_place if isinstance(widget, AnswerMessage) else widget.virtual_region.width > 0
        for widget in widgets
        if widget.is_attached
    )
