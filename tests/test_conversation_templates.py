"""Token-exact history with templates that rewrite earlier answers, and with none at all."""

from __future__ import annotations

import pytest

from nanochat.conversation import Conversation
from tests.answers import FIXED, TOKENIZERS, answer, as_text, rendered, say
from tests.tokenizer_zoo import QWEN3, make_tokenizer


class TestRewritingTemplates:
    """The part in common is kept, the rest is the template's."""

    THOUGHTS = "<think>\nhello hello\n</think>\n\nHi there."

    def reasoning_chat(self, *, keep_reasoning: bool) -> tuple[Conversation, list[int], list[int]]:
        tokenizer = TOKENIZERS["qwen3"]
        chat = Conversation(tokenizer, keep_reasoning=keep_reasoning)
        chat.add_user("Hello")
        prompt, generated = chat.prompt_ids(), say("qwen3", self.THOUGHTS)
        chat.add_assistant(answer(tokenizer, generated))
        chat.add_user("And?")
        return chat, prompt, generated

    def test_old_reasoning_is_left_out(self) -> None:
        chat, prompt, _ = self.reasoning_chat(keep_reasoning=False)
        ids = chat.prompt_ids()
        assert ids[: len(prompt)] == prompt
        assert as_text("qwen3", ids) == rendered("qwen3", chat)
        assert "hello hello" not in as_text("qwen3", ids)

    def test_or_kept_as_the_user_chooses(self) -> None:
        chat, prompt, generated = self.reasoning_chat(keep_reasoning=True)
        ids = chat.prompt_ids()
        assert ids[: len(prompt) + len(generated)] == prompt + generated
        assert as_text("qwen3", ids).endswith(
            "Hi there.<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
        )
        chat.keep_reasoning = False
        assert "hello hello" not in as_text("qwen3", chat.prompt_ids())

    def test_a_rewritten_turn_is_extended_by_the_next(self) -> None:
        chat, _, _ = self.reasoning_chat(keep_reasoning=False)
        second = chat.prompt_ids()
        chat.add_assistant(answer(TOKENIZERS["qwen3"], say("qwen3", "No reasoning here.")))
        chat.add_user("More")
        assert chat.prompt_ids()[: len(second)] == second

    @pytest.mark.parametrize("keep_reasoning", [True, False])
    def test_an_answer_that_begins_inside_the_reasoning(self, keep_reasoning: bool) -> None:
        """The template opens it in the prompt, and leaves the opening out of earlier turns."""
        template = QWEN3.replace(
            "{{- '<|im_start|>assistant\\n' }}\n", "{{- '<|im_start|>assistant\\n<think>\\n' }}\n"
        )
        assert template != QWEN3
        tokenizer = make_tokenizer("qwen3", chat_template=template)
        chat = Conversation(tokenizer, keep_reasoning=keep_reasoning)
        chat.add_user("Hello")
        prompt, generated = chat.prompt_ids(), say("qwen3", "hello hello\n</think>\n\nHi there.")
        assert as_text("qwen3", prompt).endswith("<think>\n")
        assert chat.opens_reasoning
        chat.add_assistant(answer(tokenizer, generated))
        chat.add_user("And?")
        ids = chat.prompt_ids()
        if keep_reasoning:
            assert ids[: len(prompt) + len(generated)] == prompt + generated
        else:
            assert "<|im_start|>assistant\nHi there.<|im_end|>" in as_text("qwen3", ids)

    def test_an_empty_reasoning_that_the_prompt_has_closed(self) -> None:
        tokenizer = TOKENIZERS["qwen3"]
        options = {"enable_thinking": False}
        chat = Conversation(tokenizer, keep_reasoning=True, template_kwargs=options)
        chat.add_user("Hello")
        prompt, generated = chat.prompt_ids(), say("qwen3", "Hi.")
        chat.add_assistant(answer(tokenizer, generated))
        assert not chat.opens_reasoning
        chat.template_kwargs = {"enable_thinking": True}  # earlier answers began as they began
        chat.add_user("And?")
        assert chat.prompt_ids()[: len(prompt) + len(generated)] == prompt + generated

    @pytest.mark.parametrize(("text", "kept"), [("The end. \n", "The end."), ("The\n\n", "The")])
    def test_trimmed_at_the_end(self, text: str, kept: str) -> None:
        tokenizer = TOKENIZERS["llama3"]
        chat = Conversation(tokenizer, started=FIXED)
        chat.add_user("Hello")
        prompt = chat.prompt_ids()
        odd = [tokenizer.convert_tokens_to_ids(character) for character in "The"]
        assert odd != tokenizer.encode("The", add_special_tokens=False)
        generated = odd + say("llama3", text.removeprefix("The"))
        chat.add_assistant(answer(tokenizer, generated))
        chat.add_user("And?")
        ids = chat.prompt_ids()
        assert ids[: len(prompt) + len(odd)] == prompt + odd
        assert as_text("llama3", ids) == rendered("llama3", chat)
        assert f"\n\n{kept}<|eot_id|>" in as_text("llama3", ids)

    def test_trimmed_at_the_beginning(self) -> None:
        tokenizer = TOKENIZERS["gemma"]
        chat = Conversation(tokenizer)
        chat.add_user("Hello")
        prompt = chat.prompt_ids()
        chat.add_assistant(answer(tokenizer, say("gemma", "\n\nHi there.")))
        chat.add_user("And?")
        ids = chat.prompt_ids()
        assert ids[: len(prompt)] == prompt
        assert as_text("gemma", ids) == rendered("gemma", chat)

    def test_a_system_message_that_moves_along(self) -> None:
        tokenizer = TOKENIZERS["mistral"]
        chat = Conversation(tokenizer, "Answer in one sentence.")
        chat.add_user("Hello")
        chat.prompt_ids()
        generated = say("mistral", "Hi there.")
        chat.add_assistant(answer(tokenizer, generated))
        chat.add_user("And?")
        ids = chat.prompt_ids()
        text = as_text("mistral", ids)
        assert text.index("Hi there.") < text.index("Answer in one sentence.") < text.index("And?")
        assert any(ids[start : start + len(generated)] == generated for start in range(len(ids)))

    def test_a_template_that_leaves_answers_out(self) -> None:
        template = "{% for m in messages if m.role == 'user' %}{{ m.content }}\n{% endfor %}"
        tokenizer = make_tokenizer("smollm2", chat_template=template)
        for keep_reasoning in (True, False):
            chat = Conversation(tokenizer, keep_reasoning=keep_reasoning)
            chat.add_user("Hello")
            chat.add_assistant(answer(tokenizer, say("smollm2", "Hi.")))
            chat.add_user("And?")
            assert as_text("smollm2", chat.prompt_ids()) == "Hello\nAnd?\n"

    def test_a_template_that_changes_every_letter(self) -> None:
        template = "{% for m in messages %}<{{ m.content | upper }}>{% endfor %}"
        tokenizer = make_tokenizer("smollm2", chat_template=template)
        chat = Conversation(tokenizer)
        chat.add_user("Hello")
        chat.add_assistant(answer(tokenizer, say("smollm2", "Hi.")))
        chat.add_user("And?")
        assert as_text("smollm2", chat.prompt_ids()) == "<HELLO><HI.><AND?>"


class TestNoTemplate:
    """A base model goes on where the text ends."""

    def test_texts_follow_each_other(self) -> None:
        tokenizer = make_tokenizer("llama3", chat_template=None)
        chat = Conversation(tokenizer)
        chat.add_user("The capital of France")
        prompt = chat.prompt_ids()
        assert prompt == tokenizer.encode("The capital of France")
        generated = tokenizer.encode(" is Paris.", add_special_tokens=False)
        chat.add_assistant(answer(tokenizer, generated, "length"))
        chat.add_user("And Japan")
        ids = chat.prompt_ids()
        assert ids[: len(prompt) + len(generated)] == prompt + generated
        assert as_text("llama3", ids[1:]) == "The capital of France is Paris.\n\nAnd Japan"
