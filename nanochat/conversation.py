"""Messages of one chat into prompt token ids, with the model's own tokens kept as it wrote them.

The prompt of a turn is the prompt of the turn before, the ids generated then, and only the template's new
text, so that the engine finds all but the new part in its prefix cache. Where the template rewrites an
earlier answer (Qwen3 leaves out old reasoning), what it leaves alone is kept and the rest is encoded anew.
Knows tokenizers and templates; nothing of engines, threads, screens or storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from nanochat.engine.chat_template import ChatTemplate
from nanochat.engine.detokenizer import Detokenizer
from nanochat.engine.prompt_encoding import placeholders
from nanochat.errors import InvalidOption, UnsupportedModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nanochat.engine.outputs import RequestOutput

Role = Literal["user", "assistant"]
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
    def template_kwargs(self) -> Mapping[str, Any]:
        """Variables for the template; assign a new mapping to change them."""
        return MappingProxyType(self._template_kwargs)

    @template_kwargs.setter
    def template_kwargs(self, value: Mapping[str, Any]) -> None:
        self._template_kwargs = dict(value)
        self._seam: _Seam | None = None

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages but the system prompt, oldest first."""
        return tuple(self._messages)

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template; without one, it goes on with the text as it stands."""
        return not self._template.is_plain

    @property
    def reasoning_tags(self) -> tuple[str, str] | None:
        """What encloses the model's reasoning in its answers; None without any."""
        return self._template.reasoning_tags

    @property
    def opens_reasoning(self) -> bool:
        """Whether the prompt itself opens the reasoning, so that the next answer begins inside it."""
        return self._template.opens_reasoning(now=self.started, **self._template_kwargs)

    def add_user(self, text: str) -> None:
        """Append what the user says."""
        self._messages.append(Message("user", text))

    def add_assistant(self, output: RequestOutput | str) -> None:
        """Append an answer: an output with its token ids, whatever ended it, or a bare text.

        All of the output's ids stay in the context, also those of a stop string that isn't in its text. Ids
        that don't spell the text, because another model with another tokenizer wrote them, are left out.
        """
        if isinstance(output, str):
            self._messages.append(Message("assistant", output))
            return
        token_ids = self._own_ids(output.token_ids, output.text)
        opener = self._find_seam().in_prompt if token_ids else ""
        self._messages.append(Message("assistant", output.text, token_ids, opener))

    def continued(self, output: RequestOutput) -> tuple[list[int], str]:
        """What follows :meth:`prompt_ids` to go on with an answer that ended early: its ids, and their text.

        A character that was cut short is left out of both, for the model to write anew. Ids that aren't of
        this tokenizer are made from the text.
        """
        ids = self._own_ids(output.token_ids, output.text)
        if ids is None:
            ids = tuple(self._template.encode(output.text, "")) if output.text else ()
        decoder, pieces = Detokenizer(self._tokenizer), [""]
        kept, text = 0, ""
        for number, token_id in enumerate(ids, start=1):
            pieces.append(decoder.push((token_id,)))
            if not decoder.is_waiting:
                kept, text = number, text + "".join(pieces)
                pieces.clear()
        return list(ids[:kept]), text

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
                before = self._tokenizer.decode(list(piece[-8:]), clean_up_tokenization_spaces=False)
        self._encoded = encoded
        return prompt

    def _own_ids(self, token_ids: Iterable[int], text: str) -> tuple[int, ...] | None:
        """The ids, if in this tokenizer they spell the text; it may be shorter, for a stop string's sake."""
        ids = [int(token_id) for token_id in token_ids]
        spelled = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return tuple(ids) if ids and spelled.startswith(text) else None

    def _pieces(self) -> Iterator[_Piece]:
        """The prompt as texts to encode and ids to take over; a text never follows another one."""
        kept = [index for index, message in enumerate(self._messages) if message.token_ids is not None]
        texts, indices = self._split(kept)
        answers = self._answers(texts, kept) if indices == kept else None
        if answers is None:  # the template leaves answers out, or moves them
            yield self._render()
            return
        text = texts[0]
        for answer, following in zip(answers, texts[1:], strict=True):
            if answer.token_ids:
                text = text.removesuffix(answer.replaced) + answer.opener
                if text:
                    yield text
                yield answer.token_ids
                text = ""
            text += answer.rest + self._without_repeated_end(answer, following)
        if text:
            yield text

    def _answers(self, texts: Sequence[str], kept: Sequence[int]) -> list[_Answer] | None:
        """What stands for the answers between ``texts``; None if the rendering isn't made that way."""
        if not kept:
            return []
        seam = self._find_seam()
        if self.keep_reasoning:
            messages = [self._messages[index] for index in kept]
            return [
                _Answer(message.token_ids or (), replaced=seam.in_history, opener=message.opener)
                for message in messages
            ]
        # A space that the template puts before an earlier answer is part of the answer's first token.
        space = seam.in_history if seam.in_history.isspace() and not seam.in_prompt else ""
        return self._align(texts, kept, self._render(), space)

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
            **self._template_kwargs,
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

    def _align(
        self, texts: Sequence[str], kept: Sequence[int], rendered: str, space: str
    ) -> list[_Answer] | None:
        """How the template renders each answer, found by walking along the real rendering.

        ``texts`` surround the answers. An answer that stands between its neighbours unchanged keeps its ids;
        of a changed one, the ids of the part it begins with are kept. None: the texts aren't there.
        """
        if not rendered.startswith(texts[0]):
            return None
        position = len(texts[0])
        answers = []
        for index, following in zip(kept, texts[1:], strict=True):
            message = self._messages[index]
            content = self._template.guard(message.content, "assistant")
            end = position + len(content)
            if rendered.startswith(content, position) and rendered.startswith(following, end):
                answers.append(_Answer(message.token_ids or (), replaced=space))
            else:
                end = rendered.find(following, position)
                if end < 0:
                    return None
                rewritten = rendered[position:end]
                count, length = self._common_part(message, content, rewritten)
                ids = (message.token_ids or ())[:count]
                answers.append(_Answer(ids, replaced=space, rest=rewritten[length:]))
            position = end + len(following)
        return answers if position == len(rendered) else None

    def _common_part(self, message: Message, content: str, rewritten: str) -> tuple[int, int]:
        """How many of an answer's ids, and their characters, are the beginning of what it became."""
        common = _common_length(content, rewritten)
        decoder = Detokenizer(self._tokenizer)
        count = length = position = 0
        for number, token_id in enumerate((message.token_ids or ()) if common else (), start=1):
            piece = decoder.push((token_id,))
            if position + len(piece) > common or not content.startswith(piece, position):
                break
            position += len(piece)
            if piece and not decoder.is_waiting:
                count, length = number, position
        return count, length

    def _find_seam(self) -> _Seam:
        """Where an answer begins: in the prompt that it answers, and in a later one."""
        if self._seam is None:
            question: dict[str, str] = {"role": "user", "content": "Hi"}
            answer: dict[str, str] = {"role": "assistant", "content": "Hi"}
            options: dict[str, Any] = {"now": self.started, **self._template_kwargs}
            try:
                prompt = self._template.render([question], **options)
                history = self._template.render([question, answer, question], verbatim={1}, **options)
            except (InvalidOption, UnsupportedModel):  # then the messages themselves will say so
                prompt = history = ""
            beginning = str(next(placeholders(history)))
            common = _common_length(prompt, beginning)
            self._seam = _Seam(prompt[common:], beginning[common:])
        return self._seam

    def _without_repeated_end(self, answer: _Answer, following: str) -> str:
        """The text after an answer without the end-of-turn token that the answer already ends with."""
        if not answer.token_ids or answer.rest:
            return following
        last = self._tokenizer.convert_ids_to_tokens(answer.token_ids[-1])
        if last in self._template.control_tokens:
            stripped = following.lstrip()
            if stripped.startswith(last):
                return stripped[len(last) :]
        return following


@dataclass(frozen=True, slots=True)
class _Seam:
    """How the text before an answer ends, from where its two forms differ."""

    in_prompt: str
    """In the prompt that it answers: ``<think>`` where the template opens the reasoning itself."""
    in_history: str
    """In the prompts of later turns: a space in the manner of Llama 2."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What stands for an earlier answer in a prompt: ids, then text."""

    token_ids: tuple[int, ...]
    replaced: str = ""
    """The ids take the place of this end of the text before them."""
    opener: str = ""
    """Text ahead of the ids."""
    rest: str = ""


def _common_length(first: str, second: str) -> int:
    """Characters that two texts have in common at their beginnings."""
    for length, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return length
    return min(len(first), len(second))
