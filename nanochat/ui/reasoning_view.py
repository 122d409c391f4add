"""An answer's reasoning: one line until it is unfolded, then a text laid out as it grows, like the answer."""

from __future__ import annotations

from textual.containers import Vertical
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Static

from nanochat.ui import formatting as fmt
from nanochat.ui.markdown_view import MarkdownView
from nanochat.ui.pace import Pace


class ReasoningView(Static):
    """The line that folds and unfolds the reasoning. What is unfolded stands below it, in the same parent."""

    def __init__(self, pace: Pace) -> None:
        super().__init__("", classes="reasoning", markup=False)
        self.display = False
        self._pace = pace
        self._text = ""
        self._summary = ""
        self._is_open = False
        self._is_unfolded = False
        self._view: MarkdownView | None = None
        """Made when the reasoning is first unfolded."""

    def show(self, text: str, num_tokens: int, is_open: bool) -> None:
        """Bring up to date; hidden as long as there is no reasoning. ``text`` must already be sanitised."""
        self.display = bool(text) or is_open
        amount = f" · {fmt.plural(num_tokens, 'token')}" if num_tokens else ""
        self._text, self._summary = text, ("Thinking…" if is_open else "Thought") + amount
        self._is_open = is_open
        self._draw()

    def toggle(self) -> None:
        """Unfold or fold."""
        self._is_unfolded = not self._is_unfolded
        if self._view is None and isinstance(self.parent, Widget):
            self._view = MarkdownView(has_time=self._pace.has_time)
            self.parent.mount(Vertical(self._view, classes="thought"), after=self)
        if self._view is not None and isinstance(self._view.parent, Widget):
            self._view.parent.display = self._is_unfolded
        self._draw()

    def _draw(self) -> None:
        head = Content(f"{'▾' if self._is_unfolded else '▸'} {self._summary}")
        if not (isinstance(self.content, Content) and self.content.is_same(head)):
            # While a model thinks, the line changes with every delta, and stays one line.
            self.update(head, layout=self.size.height != 1)
        if self._view is not None and self._is_unfolded:
            self._view.show(self._text)
            if not self._is_open:
                self._view.finish()

    def on_click(self) -> None:
        self.toggle()
