"""How a message looks: a user's, an answer with its reasoning and footer, and a notice from the app."""

from __future__ import annotations

from dataclasses import dataclass

from textual.app import ComposeResult
from textual.content import Content
from textual.message import Message as TextualMessage
from textual.widgets import Static

from nanochat.engine.outputs import RequestOutput
from nanochat.sanitize import sanitize
from nanochat.ui import formatting as fmt
from nanochat.ui.blank import BlankVertical
from nanochat.ui.chat import Chat, Message, Note, Phase
from nanochat.ui.chrome import is_over_server
from nanochat.ui.markdown_view import MarkdownView
from nanochat.ui.pace import Pace
from nanochat.ui.reasoning_view import ReasoningView

SHOWN_CHARACTERS = 4_000
SHOWN_LINES = 60
"""A user's message longer than this is shown cut; it is sent whole."""

_ENDINGS = {"length": "cut off at its length limit", "cancelled": "stopped", "error": "failed"}
_SEPARATOR = Content.styled(" · ", "$faint")


def shown_text(text: str) -> Content:
    """A user's message as shown: plain text, cut when very long."""
    lines = text[:SHOWN_CHARACTERS].split("\n")[:SHOWN_LINES]
    shown = "\n".join(lines)
    content = Content(sanitize(shown).expandtabs(4))
    rest = len(text) - len(shown)
    return content + Content.styled(f"\n… {fmt.count(rest)} more characters", "$muted") if rest else content


def answer_footer(
    output: RequestOutput,
    *,
    is_interrupted: bool = False,
    is_elsewhere: bool = False,
    can_go_on: bool = True,
) -> Content:
    """What a finished answer cost, and how it ended if it didn't end by itself.

    Args:
        can_go_on: whether what answers now could go on with it.
    """
    metrics = output.metrics
    cached = f" ({fmt.count(metrics.cached_tokens)} cached)" if metrics.cached_tokens else ""
    parts = [
        f"TTFT {fmt.duration(metrics.ttft_s)}" if metrics.ttft_s is not None else "",
        f"{fmt.rate(metrics.decode_tok_s)} tok/s" if metrics.decode_tok_s else "",
        fmt.plural(metrics.completion_tokens, "token") if metrics.completion_tokens else "",
        f"prompt {fmt.count(metrics.prompt_tokens)}{cached}" if metrics.prompt_tokens else "",
        f"preempted ×{metrics.preemptions}" if metrics.preemptions else "",
    ]
    contents = [Content(part) for part in parts if part]
    has_failed = output.finish_reason == "error"
    is_cut = is_interrupted or (has_failed and bool(output.text))
    ending = "interrupted" if is_cut else _ENDINGS.get(output.finish_reason)
    if is_elsewhere:
        contents.append(Content.styled("another nanochat was still writing this", "$warning"))
    elif ending:
        contents.append(Content.styled(ending, "$error" if has_failed else "$warning"))
    if is_interrupted and can_go_on:
        contents.append(Content.from_markup("[@click=screen.do('continue')]continue (/continue)[/]"))
    elif is_interrupted or (has_failed and not is_elsewhere):
        contents.append(Content.from_markup("[@click=screen.do('again')]answer again (/again)[/]"))
    return _SEPARATOR.join(contents)


def live_footer(chat: Chat, num_tokens: int) -> Content:
    """What an answer under way is doing."""
    if chat.phase is Phase.PREFILL and chat.prefill_tokens is not None:
        done, total = chat.prefill_tokens
        return Content(f"reading the prompt: {fmt.count(done)} / {fmt.count(total)} tokens")
    if chat.phase is Phase.PREEMPTED:
        return Content.styled("preempted: waits for KV blocks, then goes on", "$warning")
    if chat.phase is Phase.DECODE:
        parts = [f"{fmt.rate(chat.live_rate)} tok/s"] if chat.live_rate else []
        return _SEPARATOR.join(Content(part) for part in [*parts, fmt.plural(num_tokens, "token")])
    words = {
        Phase.LOADING: "will be sent when the model is ready",
        Phase.QUEUED: "queued",
        Phase.PREFILL: "reading the prompt",
    }
    return Content(words.get(chat.phase, "…"))


def _num_lines(content: object, width: int) -> int:
    return content.get_height({}, width) if isinstance(content, Content) and width else 0


@dataclass
class BranchStepped(TextualMessage):
    """Another branch of this message is wanted."""

    message: Message
    step: int


def branch_arrows(message: Message) -> Content:
    """``‹ 2/3 ›``, the arrows to be clicked; nothing for a message without siblings."""
    which, total = message.branch
    if total == 1:
        return Content("")
    arrows = f"  [@click='step(-1)']‹[/] {which}/{total} [@click='step(1)']›[/]"
    return Content.from_markup(arrows).stylize("$accent")


class UserMessage(Static):
    """What the user wrote, with a bar in the tab's colour. It can be edited, and then has branches."""

    @dataclass
    class EditWanted(TextualMessage):
        """The user wants to send another text instead of this one."""

        message: Message

    def __init__(self, message: Message) -> None:
        self.message = message
        super().__init__(self._shown(), markup=False)

    def _shown(self) -> Content:
        head = Content.styled("You", "$muted") + branch_arrows(self.message)
        edit = Content.from_markup("  [@click='edit']✎[/]").stylize("$faint")
        return head + edit + "\n" + shown_text(self.message.text)

    def show_branch(self) -> None:
        """The number of branches may have changed."""
        self.update(self._shown())

    def action_step(self, step: int) -> None:
        self.post_message(BranchStepped(self.message, step))

    def action_edit(self) -> None:
        self.post_message(self.EditWanted(self.message))


class BranchLabel(Static):
    """``Assistant``, with ``‹ 2/3 ›`` when there are other answers; the arrows can be clicked."""

    def __init__(self, message: Message) -> None:
        super().__init__("", classes="speaker", markup=False)
        self._message = message

    def on_mount(self) -> None:
        self.show()

    def show(self) -> None:
        """Bring the branch count up to date."""
        self.update(Content("Assistant") + branch_arrows(self._message))

    def action_step(self, step: int) -> None:
        self.post_message(BranchStepped(self._message, step))


class AnswerMessage(BlankVertical):
    """An answer, while it comes and after."""

    def __init__(self, chat: Chat, message: Message, pace: Pace) -> None:
        super().__init__(classes="answer")
        self.message = message
        self._chat = chat
        self._label = BranchLabel(message)
        self._reasoning = ReasoningView(pace)
        self._text = MarkdownView(message.answer.answer, pace.has_time)
        self._footer = Static("", classes="answer-footer", markup=False)
        self._is_filled = False

    @property
    def has_place(self) -> bool:
        """Whether it is laid out with all its parts, which come after it."""
        return self._is_filled and self.virtual_region.width > 0

    def compose(self) -> ComposeResult:
        yield self._label
        yield self._reasoning
        yield self._text
        yield self._footer

    def on_mount(self) -> None:
        self.show_text()
        self.show_footer()
        if self.message is not self._chat.live:
            self._text.finish()
        self.call_after_refresh(self._note_filled)

    def _note_filled(self) -> None:
        self._is_filled = True

    def show_text(self) -> None:
        """Bring the text up to date with the message; cheap when it has only grown."""
        answer = self.message.answer
        wanted = answer.answer
        self._text.show(wanted)
        if answer.is_reasoning or self._reasoning.display or answer.reasoning:
            self._reasoning.show(answer.reasoning, answer.reasoning_tokens, answer.is_reasoning)
        if self._text.display != bool(wanted):
            self._text.display = bool(wanted)
        self._text.is_live = self.message is self._chat.live

    def show_footer(self) -> None:
        """Bring the line below the text up to date."""
        output = self.message.output
        if output is not None:
            footer = answer_footer(
                output,
                is_interrupted=self.message.is_interrupted,
                is_elsewhere=self.message.is_elsewhere,
                can_go_on=not is_over_server(self),
            )
        elif self.message is self._chat.live:
            footer = live_footer(self._chat, self.message.answer.num_tokens)
        else:
            footer = Content("")
        before = self._footer.content
        if not (isinstance(before, Content) and before.is_same(footer)):
            # Laying the screen out anew costs more than anything else; a line that stays one needs none.
            width = self._footer.size.width
            self._footer.update(footer, layout=_num_lines(before, width) != _num_lines(footer, width))

    def finish(self) -> None:
        """The message has its output."""
        self.show_text()
        self._text.finish()
        self.show_footer()

    def show_branch(self) -> None:
        """The number of branches may have changed."""
        self._label.show()

    def toggle_reasoning(self) -> None:
        """Unfold or fold what came before the answer."""
        self._reasoning.toggle()


class NoteView(Static):
    """A sentence from the app in the chat it concerns, with what can be done about it as a link."""

    def __init__(self, note: Note) -> None:
        content = Content(note.text)
        if note.action_id:
            link = Content.from_markup(
                f"  [@click=screen.do('{note.action_id}')]$label[/]", label=note.action_label
            )
            content += link
        super().__init__(content, classes=note.kind, markup=False)
