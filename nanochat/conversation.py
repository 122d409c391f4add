"""Messages of one chat into prompt token ids, with the model's own tokens kept as it wrote them.

The prompt of a turn is the prompt of the turn before, the ids generated then, and only the template's new
text, so that the engine finds all but the new part in its prefix cache. Where the template rewrites an
earlier answer (Qwen3 leaves out old reasoning), what it leaves alone is kept and the rest is encoded anew.
Knows tokenizers and templates; nothing of engines, threads, screens or storage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from nanochat.engine.chat_template import ChatTemplate
from nanochat.engine.detokenizer import Detokenizer
from nanochat.engine.prompt_encoding import placeholders
from nanochat.errors import InvalidOption

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nanochat.engine.outputs import RequestOutput

Role = Literal["system", "user", "assistant"]
_Piece = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Message:
    """One message as the user sees it."""

    role: Role
    content: str
    token_ids: tuple[int, ...] | None = None
    """The ids that the model generated, with its end-of-turn token if it wrote one; None for other texts."""
    opener: str = ""
    """What the generation prompt had already written of the answer, such as ``<think>``."""


class Conversation:
    """The messages of one chat and their prompt.

    Args:
        tokenizer: the model's, from ``engine.tokenizer``.
        system: instructions ahead of all messages; None leaves it to the template.
        keep_reasoning: keep earlier answers exactly as generated, also where the template would leave out
            their reasoning. It costs context and saves computing.
        template_kwargs: variables for the template, such as ``{"enable_thinking": False}``.
        started: the time that the template is told (Llama 3 writes the date into its system message). It
            stays, or the whole prompt would change at midnight.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        system: str | None = None,
        *,
        keep_reasoning: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        started: datetime | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        self._messages: list[Message] = []
        self._encoded: dict[tuple[str, str], list[int]] = {}  # texts of the last prompt
        self.system = system
        self.keep_reasoning = keep_reasoning
        self.template_kwargs = dict(template_kwargs or {})
        self.started = started or datetime.now().astimezone()

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages but the system prompt, oldest first."""
        return tuple(self._messages)

    @property
    def reasoning_tags(self) -> tuple[str, str] | None:
        """What encloses the model's reasoning in its answers; None without any."""
        return self._template.reasoning_tags

    def add_user(self, text: str) -> None:
        """Append what the user says."""
        self._messages.append(Message("user", text))

    def add_assistant(self, output: RequestOutput | str) -> None:
        """Append an answer: an output with its token ids, whatever ended it, or a bare text."""
        if isinstance(output, str):
            self._messages.append(Message("assistant", output))
        else:
            self._messages.append(Message("assistant", output.text, tuple(output.token_ids), self._opener()))

    def truncate(self, num_messages: int) -> None:
        """Keep the first messages only, to answer again or to send another text instead.

        Raises:
            InvalidOption: there are fewer messages than that.
        """
        if not 0 <= num_messages <= len(self._messages):
            raise InvalidOption(f"The chat has {len(self._messages)} messages; it can't keep {num_messages}.")
        del self._messages[num_messages:]

    def fork(self) -> Conversation:
        """A second conversation with the same history; neither sees what is added to the other."""
        other = Conversation(
            self._tokenizer,
            self.system,
            keep_reasoning=self.keep_reasoning,
            template_kwargs=self.template_kwargs,
            started=self.started,
        )
        other._messages = list(self._messages)
        other._encoded = dict(self._encoded)
        return other

    def to_dict(self) -> dict[str, Any]:
        """Everything but the tokenizer, in plain types that JSON can hold."""
        return {
            "system": self.system,
            "keep_reasoning": self.keep_reasoning,
            "template_kwargs": dict(self.template_kwargs),
            "started": self.started.isoformat(),
            "messages": [
                {
                    "role": message.role,
                    "content": message.content,
                    "token_ids": None if message.token_ids is None else list(message.token_ids),
                    "opener": message.opener,
                }
                for message in self._messages
            ],
        }

    @classmethod
    def from_dict(cls, tokenizer: PreTrainedTokenizerBase, stored: Mapping[str, Any]) -> Conversation:
        """The conversation that :meth:`to_dict` described.

        Raises:
            InvalidOption: it isn't such a description.
        """
        try:
            chat = cls(
                tokenizer,
                stored["system"],
                keep_reasoning=bool(stored["keep_reasoning"]),
                template_kwargs=stored["template_kwargs"],
                started=datetime.fromisoformat(stored["started"]),
            )
            for message in stored["messages"]:
                ids = message["token_ids"]
                token_ids = None if ids is None else tuple(map(int, ids))
                if message["role"] not in ("user", "assistant"):
                    raise ValueError(f"role {message['role']!r}")
                chat._messages.append(
                    Message(message["role"], str(message["content"]), token_ids, str(message["opener"]))
                )
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidOption(f"The stored chat is damaged ({error!r}).") from error
        return chat

    def prompt_ids(self) -> list[int]:
        """Token ids of the prompt for the next answer.

        Raises:
            InvalidOption: the last message isn't a user's, or the template refuses the messages.
            UnsupportedModel: the template is broken.
        """
        if not self._messages or self._messages[-1].role != "user":
            raise InvalidOption("There is no message to answer; add a user message first.")
        encoded: dict[tuple[str, str], list[int]] = {}
        prompt: list[int] = []
        before = ""
        for piece in self._pieces():
            if isinstance(piece, str):
                key = (before, piece)
                encoded[key] = self._encoded.get(key) or self._template.encode(piece, before)
                prompt += encoded[key]
                before = piece
            else:
                prompt += piece
                before = self._tokenizer.decode(piece[-8:], clean_up_tokenization_spaces=False)
        self._encoded = encoded
        return prompt

    def _pieces(self) -> Iterator[_Piece]:
        """The prompt as texts to encode and ids to take over; a text never follows another one."""
        kept = [index for index, message in enumerate(self._messages) if message.token_ids is not None]
        texts, indices = self._split(kept)
        if indices != kept:  # the template left an answer out, or moved it
            yield self._render()
            return
        answers: list[_Answer] | None
        if self.keep_reasoning:
            messages = (self._messages[index] for index in kept)
            answers = [_Answer(message.opener, message.token_ids or (), "") for message in messages]
        else:
            answers = self._align(texts, kept, self._render()) if kept else []
        if answers is None:
            yield self._render()
            return
        text = texts[0]
        for answer, following in zip(answers, texts[1:], strict=True):
            text += answer.before
            if answer.token_ids:
                if text:
                    yield text
                yield answer.token_ids
                text = ""
            text += answer.after + self._without_repeated_end(answer, following)
        if text:
            yield text

    def _render(self, verbatim: Sequence[int] = ()) -> str:
        messages: list[dict[str, str]] = []
        if self.system is not None:
            messages.append({"role": "system", "content": self.system})
        shift = len(messages)
        messages += [{"role": message.role, "content": message.content} for message in self._messages]
        return self._template.render(
            messages,
            verbatim={index + shift for index in verbatim},
            now=self.started,
            **self.template_kwargs,
        )

    def _split(self, kept: Sequence[int]) -> tuple[list[str], list[int]]:
        """The rendered texts around the answers in ``kept``, and the answers in their order there."""
        shift = 0 if self.system is None else 1
        texts: list[str] = []
        indices: list[int] = []
        for piece in placeholders(self._render(kept)):
            if isinstance(piece, str):
                texts.append(piece)
            else:
                indices.append(piece - shift)
        return texts, indices

    def _ids(self, index: int) -> tuple[int, ...]:
        return self._messages[index].token_ids or ()

    def _align(self, texts: Sequence[str], kept: Sequence[int], rendered: str) -> list[_Answer] | None:
        """How the template renders each answer, found by walking along the real rendering.

        ``texts`` surround the answers. An answer that stands between its neighbours unchanged keeps its ids;
        of a changed one, the ids of the part it begins with are kept. None: the texts aren't there.
        """
        if not rendered.startswith(texts[0]):
            return None
        position = len(texts[0])
        answers = []
        for number, index in enumerate(kept):
            following = texts[number + 1]
            content = self._template.guard(self._messages[index].content, "assistant")
            end = position + len(content)
            if rendered.startswith(content, position) and rendered.startswith(following, end):
                answers.append(_Answer("", self._ids(index), ""))
            else:
                end = rendered.find(following, position)
                if end < 0:
                    return None
                answers.append(self._common_part(index, content, rendered[position:end]))
            position = end + len(following)
        return answers if position == len(rendered) else None

    def _common_part(self, index: int, content: str, rewritten: str) -> _Answer:
        """The ids of an answer up to where the template's form of it differs, and the rest as text."""
        common = _common_length(content, rewritten)
        ids, decoder = self._ids(index), Detokenizer(self._tokenizer)
        count = length = 0
        if common:
            for number, token_id in enumerate(ids, start=1):
                decoder.push((token_id,))
                if len(decoder.text) > common:
                    break
                if decoder.text == content[: len(decoder.text)]:
                    count, length = number, len(decoder.text)
        return _Answer("", ids[:count], rewritten[length:])

    def _opener(self) -> str:
        """What the generation prompt has beyond the beginning of an earlier answer, such as ``<think>``."""
        question: dict[str, str] = {"role": "user", "content": "Hi"}
        answer: dict[str, str] = {"role": "assistant", "content": ""}
        options: dict[str, Any] = {"now": self.started, **self.template_kwargs}
        prompt = self._template.render([question], **options)
        history = self._template.render([question, answer, question], verbatim={1}, **options)
        beginning = str(next(placeholders(history)))
        return prompt[len(beginning) :] if prompt.startswith(beginning) else ""

    def _without_repeated_end(self, answer: _Answer, following: str) -> str:
        """The text after an answer without the end-of-turn token that the answer already ends with."""
        if not answer.token_ids or answer.after:
            return following
        last = self._tokenizer.convert_ids_to_tokens(answer.token_ids[-1])
        if isinstance(last, str) and last in self._template.control_tokens:
            stripped = following.lstrip()
            if stripped.startswith(last):
                return stripped[len(last) :]
        return following


@dataclass(frozen=True, slots=True)
class _Answer:
    """An earlier answer within a prompt."""

    before: str
    token_ids: tuple[int, ...]
    after: str


def _common_length(first: str, second: str) -> int:
    """Characters that two texts have in common at their beginnings."""
    for length, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return length
    return min(len(first), len(second))
