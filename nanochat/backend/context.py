"""From a chat's messages to the token ids of its next prompt, and what to leave out when they are too many.

Of the engine in this process. Runs on the submitting thread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from nanochat.backend.dropping import drop_offer
from nanochat.backend.interface import DropOffer, Said, Turn
from nanochat.conversation import Conversation
from nanochat.engine.outputs import RequestOutput


@dataclass(frozen=True, slots=True)
class Prepared:
    """What to submit, and how the answer begins."""

    token_ids: list[int]
    opens_reasoning: bool
    """Whether the answer begins inside its reasoning."""
    partial: RequestOutput | None
    """The answer that goes on, as far as its ids are in the prompt."""


@dataclass(slots=True)
class _Kept:
    conversation: Conversation
    messages: list[Said]
    """What the conversation holds, in order."""


class Contexts:
    """Keeps each chat's :class:`Conversation` in step with the chosen branch.

    What the branch shares with the last prompt stays; the rest is replaced. That is token-exact, because
    every answer keeps its ids.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._kept: dict[int, _Kept] = {}
        empty = Conversation(tokenizer)
        self.reasoning_tags = empty.reasoning_tags
        """What encloses the model's reasoning in its answers; None without any."""
        self.has_template = empty.has_template
        """Whether the model was made to chat."""

    def prepare(self, prompt: Turn) -> Prepared:
        """All that submitting needs. Errors are those of :meth:`prompt_ids`."""
        conversation = self._in_step(prompt)
        token_ids = conversation.prompt_ids()
        opens_reasoning = self.reasoning_tags is not None and conversation.opens_reasoning
        if prompt.partial is None:
            return Prepared(token_ids, opens_reasoning, None)
        ids, text = conversation.continued(prompt.partial)
        return Prepared(token_ids + ids, opens_reasoning, replace(prompt.partial, text=text, token_ids=ids))

    def prompt_ids(self, prompt: Turn) -> list[int]:
        """Token ids of a prompt.

        Raises:
            NanochatError: the model's template refuses the messages, or is broken.
        """
        return self._in_step(prompt).prompt_ids()

    def forget(self, chat_id: int) -> None:
        """The chat was closed, if need be while its prompt is being made on another thread."""
        self._kept.pop(chat_id, None)

    def _in_step(self, prompt: Turn) -> Conversation:
        """The chat's conversation, made to hold the turn's messages."""
        kept = self._kept.get(prompt.chat_id)
        if kept is None or kept.conversation.system != prompt.system:
            kept = self._kept[prompt.chat_id] = _Kept(self._conversation(prompt), [])
        common = 0
        for old, new in zip(kept.messages, prompt.messages, strict=False):
            if old is not new:
                break
            common += 1
        kept.conversation.keep_reasoning = prompt.keep_reasoning
        kept.conversation.truncate(common)
        del kept.messages[common:]
        for message in prompt.messages[common:]:
            _add(kept.conversation, message)
            kept.messages.append(message)
        _think(kept.conversation, prompt.enable_thinking)
        return kept.conversation

    def drop_offer(self, prompt: Turn, limit: int) -> DropOffer | None:
        """The fewest oldest turns to leave out so that the rest fits ``limit`` tokens with room to answer."""
        return drop_offer(prompt.messages, limit, lambda first: self._count(prompt, first))

    def _count(self, prompt: Turn, first: int) -> int:
        conversation = self._conversation(prompt)
        for message in prompt.messages[first:]:
            _add(conversation, message)
        _think(conversation, prompt.enable_thinking)
        return len(conversation.prompt_ids())

    def _conversation(self, prompt: Turn) -> Conversation:
        return Conversation(
            self._tokenizer, prompt.system, started=prompt.started, keep_reasoning=prompt.keep_reasoning
        )


def _add(conversation: Conversation, message: Said) -> None:
    if message.role == "user":
        conversation.add_user(message.text)
    elif message.output is not None:
        _think(conversation, message.enable_thinking)  # the prompt that it answered ended accordingly
        conversation.add_assistant(message.output)


def _think(conversation: Conversation, enable: bool | None) -> None:
    options = {} if enable is None else {"enable_thinking": enable}
    if dict(conversation.template_kwargs) != options:
        conversation.template_kwargs = options
