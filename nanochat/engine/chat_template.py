"""Messages into a prompt: render the model's chat template, and tell what the template can do.

Knows tokenizers and Jinja templates; nothing of requests, conversations or screens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from nanochat.engine.prompt_encoding import PLACEHOLDER, PromptEncoder, placeholders
from nanochat.engine.template_budget import TemplateLimitExceeded
from nanochat.engine.template_sandbox import TemplateRefusal, literal_text, render_template
from nanochat.errors import InvalidOption, UnsupportedModel, one_line
from nanochat.sanitize import encodable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES = ("system", "user", "assistant")

PLAIN_TEMPLATE = (
    "{{ bos }}{% for message in messages %}{{ message.content }}"
    "{% if not loop.last and not (message.role == 'user' and loop.nextitem.role == 'assistant') %}"
    "{{ '\\n\\n' }}{% endif %}{% endfor %}"
)
"""For a base model, which has no chat template: it continues the last message's text as it stands."""

_REASONING_TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
)
_PROBE = "nanochatprobe"


class ChatTemplate:
    """The chat template of one tokenizer.

    Attributes:
        source: the Jinja source in use.
        is_plain: the model has no template of its own, and :data:`PLAIN_TEMPLATE` stands in.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        own = _own_source(tokenizer)
        self.is_plain = own is None
        self.source = PLAIN_TEMPLATE if own is None else own
        self._literals = literal_text(self.source)
        self._encoder = PromptEncoder(tokenizer, self._literals)
        self._variables = dict(tokenizer.special_tokens_map)
        if self.is_plain:
            bos, bos_id = tokenizer.bos_token, tokenizer.bos_token_id
            self._variables["bos"] = bos if bos and tokenizer.encode("")[:1] == [bos_id] else ""

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        verbatim: Collection[int] = (),
        now: datetime | None = None,
        **template_kwargs: Any,
    ) -> str:
        """The prompt as text, with control tokens in contents guarded (see ``prompt_encoding``).

        A system message goes into the first user message when the template has no place for it, and
        messages of one role in a row are joined when the template wants the roles to alternate.

        Args:
            messages: ``{"role", "content"}`` each.
            add_generation_prompt: end with the beginning of an answer.
            verbatim: indices of messages for which a placeholder is rendered instead of the content.
            now: the time that the template is told; the present one by default.
            template_kwargs: variables for the template, such as ``enable_thinking``.

        Raises:
            InvalidOption: no messages, an unknown role, a content that is no text, or messages that the
                template refuses.
            UnsupportedModel: the template is broken or goes beyond its limits.
        """
        guarded = self._guarded(messages, verbatim)
        if guarded[0]["role"] == "system" and not self.supports_system:
            guarded = _merge_system(guarded)
        variables = template_kwargs | {"add_generation_prompt": add_generation_prompt}
        try:
            return self._render_alternating(guarded, now, variables)
        except TemplateRefusal as error:
            raise InvalidOption(
                f"The model's chat template doesn't take these messages: {one_line(error)}"
            ) from error

    def encode(self, text: str, before: str = "") -> list[int]:
        """Token ids of rendered text; see :meth:`PromptEncoder.encode`."""
        return self._encoder.encode(text, before)

    def guard(self, content: str, role: str) -> str:
        """A content as :meth:`render` puts it into the template."""
        return self._encoder.guard(content, keep_template_tokens=role == "assistant")

    @property
    def control_tokens(self) -> frozenset[str]:
        """Tokens that only the template and the model may write."""
        return self._encoder.control_tokens

    @cached_property
    def supports_system(self) -> bool:
        """Whether a system message comes out of the template."""
        probe = [{"role": "system", "content": _PROBE}, {"role": "user", "content": "Hi"}]
        try:
            return _PROBE in self._render(probe, None, {"add_generation_prompt": True})
        except (TemplateRefusal, UnsupportedModel):
            return False

    @cached_property
    def reasoning_tags(self) -> tuple[str, str] | None:
        """What encloses the model's reasoning, such as ``("<think>", "</think>")``; None without any."""
        for opening, closing in _REASONING_TAGS:
            if closing in self._literals or {opening, closing} <= self._encoder.control_tokens:
                return opening, closing
        return None

    @cached_property
    def end_of_turn(self) -> str | None:
        """The special token that ends an answer in this template, such as ``<|im_end|>``; None without one."""
        if self.is_plain:
            return None
        question, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi"}
        try:
            rendered = self.render([question, answer, question], verbatim={1})
        except (InvalidOption, UnsupportedModel):
            return None
        _, *after = placeholders(rendered)
        following = str(after[1]).lstrip() if len(after) == 2 else ""
        ends = self._encoder.special_tokens - {self._variables.get("bos_token")}
        return max((token for token in ends if following.startswith(token)), key=len, default=None)

    def opens_reasoning(self, **template_kwargs: Any) -> bool:
        """Whether the generation prompt itself ends with the opening tag, so that answers begin inside."""
        if self.reasoning_tags is None:
            return False
        prompt = self.render([{"role": "user", "content": "Hi"}], **template_kwargs)
        return prompt.rstrip().endswith(self.reasoning_tags[0])

    def _guarded(
        self, messages: Sequence[Mapping[str, str]], verbatim: Collection[int]
    ) -> list[dict[str, str]]:
        if not messages:
            raise InvalidOption("There are no messages; give at least one.")
        guarded = []
        for index, message in enumerate(messages):
            role, content = _checked(index, message)
            text = f"{PLACEHOLDER}{index}{PLACEHOLDER}" if index in verbatim else self.guard(content, role)
            guarded.append({"role": role, "content": text})
        return guarded

    def _render_alternating(
        self, messages: list[dict[str, str]], now: datetime | None, variables: Mapping[str, Any]
    ) -> str:
        """Joins messages of one role in a row only if the template refuses them."""
        try:
            return self._render(messages, now, variables)
        except TemplateRefusal:
            joined = _join_runs(messages)
            if len(joined) == len(messages):
                raise
            return self._render(joined, now, variables)

    def _render(
        self, messages: list[dict[str, str]], now: datetime | None, variables: Mapping[str, Any]
    ) -> str:
        context = {"tools": None, "documents": None} | self._variables | dict(variables)
        try:
            rendered = render_template(
                self.source, context | {"messages": messages}, now=now or datetime.now().astimezone()
            )
            return encodable(rendered)  # the messages are so already, but not what the template writes
        except TemplateRefusal:
            raise
        except TemplateLimitExceeded as error:
            raise UnsupportedModel(
                f"The model's chat template was stopped because {one_line(error)}; use another model."
            ) from error
        except TemplateError as error:
            raise UnsupportedModel(
                f"The model's chat template doesn't work ({one_line(error)}); use another model."
            ) from error


def encode_messages(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, str]],
    *,
    add_generation_prompt: bool = True,
    **template_kwargs: Any,
) -> list[int]:
    """Token ids of a list of ``{"role", "content"}``, by the model's chat template.

    Equal to ``tokenizer.apply_chat_template`` except that control tokens inside contents stay text. For a
    model without a template see :data:`PLAIN_TEMPLATE`. Errors are those of :meth:`ChatTemplate.render`.
    """
    template = ChatTemplate(tokenizer)
    return template.encode(
        template.render(messages, add_generation_prompt=add_generation_prompt, **template_kwargs)
    )


def _own_source(tokenizer: PreTrainedTokenizerBase) -> str | None:
    template: object = tokenizer.chat_template
    if isinstance(template, Mapping):
        template = template.get("default") or next(iter(template.values()), None)
    if template is not None and not isinstance(template, str):
        raise UnsupportedModel("The model's chat template isn't text; fetch the model again.")
    return template or None


def _checked(index: int, message: Mapping[str, str]) -> tuple[str, str]:
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
        raise InvalidOption(f"Message {index + 1} must have a role and a content.")
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise InvalidOption(f"Message {index + 1} has the role {role!r}; use {', '.join(ROLES)}.")
    if not isinstance(content, str):
        raise InvalidOption(f"The content of message {index + 1} must be text.")
    if role == "system" and index:
        raise InvalidOption(f"Message {index + 1} is a system message; only the first one can be.")
    return role, content


def _merge_system(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """The system message's text in front of the first user message's."""
    system, rest = messages[0]["content"], messages[1:]
    for index, message in enumerate(rest):
        if message["role"] == "user":
            merged = {"role": "user", "content": f"{system}\n\n{message['content']}"}
            return [*rest[:index], merged, *rest[index + 1 :]]
    return [{"role": "user", "content": system}, *rest]


def _join_runs(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """Messages of one role in a row as one."""
    joined: list[dict[str, str]] = []
    for message in messages:
        if joined and joined[-1]["role"] == message["role"]:
            content = f"{joined[-1]['content']}\n\n{message['content']}"
            joined[-1] = {"role": message["role"], "content": content}
        else:
            joined.append(message)
    return joined
