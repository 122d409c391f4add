"""Copying an answer, one of its code blocks, a question or the whole chat."""

from __future__ import annotations

from nanochat.ui.chat import Chat
from nanochat.ui.chat_screen import ChatScreen
from nanochat.ui.markdown_parser import block_parser

WHAT = "/copy takes the last answer; /copy code 2 its second code block, /copy question, /copy all."


def code_blocks(markdown: str) -> list[str]:
    """The code blocks of a text in order as they are shown, without their fences."""
    return [
        token.content for token in block_parser().parse(markdown) if token.type in ("fence", "code_block")
    ]


def answer_text(chat: Chat) -> str:
    """The last answer's text without its reasoning, as shown; empty before there is one."""
    return chat.last_answer.answer.answer if chat.last_answer is not None else ""


def whole_text(chat: Chat) -> str:
    """All messages of the path under their speakers."""
    parts = [
        f"{'You' if message.role == 'user' else 'Assistant'}:\n"
        f"{message.text if message.role == 'user' else message.answer.answer}"
        for message in chat.path
    ]
    return "\n\n".join(parts)


class CopyActions(ChatScreen):
    """The actions that copy, for the chat in view."""

    def action_copy(self, argument: str = "") -> None:
        chat, (what, _, which) = self.workspace.active, argument.lower().partition(" ")
        if what == "code":
            self._copy_code(chat, which.strip())
        elif which or what not in ("", "answer", "question", "all"):
            self.notify(WHAT, severity="warning")
        elif what == "question":
            questions = [message.text for message in chat.path if message.role == "user"]
            self._copy("question", questions[-1] if questions else "")
        elif what == "all":
            self._copy("chat", whole_text(chat))
        else:
            self._copy("answer", answer_text(chat))

    def action_copy_code(self) -> None:
        """The last code block of the last answer."""
        self._copy_code(self.workspace.active, "")

    def _copy_code(self, chat: Chat, which: str) -> None:
        blocks = code_blocks(answer_text(chat))
        if which and not (which.isdecimal() and 1 <= int(which[:9]) <= len(blocks)):
            self.notify(f"The last answer has {len(blocks)} code blocks; {WHAT}", severity="warning")
        else:
            self._copy("code block", blocks[int(which) - 1 if which else -1] if blocks else "")

    def _copy(self, what: str, text: str) -> None:
        if text:
            self.app.copy_to_clipboard(text)
            self.notify(f"Copied the {what}: {len(text):,} characters.", timeout=2)
        else:
            self.notify(f"There is no {what} to copy yet.", severity="warning")
