"""Token-exact history: what was generated stays, and only the template's new text is added."""

from __future__ import annotations

import random
import unicodedata
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from nanochat.conversation import Conversation, Message
from nanochat.engine.outputs import RequestMetrics, RequestOutput
from nanochat.engine.prompt_encoding import GUARD, PLACEHOLDER
from nanochat.engine.request import FinishReason
from nanochat.errors import InvalidOption, UnsupportedModel
from tests.tokenizer_zoo import CHAT_NAMES, QWEN3, TEXTS, make_tokenizer

TOKENIZERS = {name: make_tokenizer(name) for name in CHAT_NAMES}
every_tokenizer = pytest.mark.parametrize("name", CHAT_NAMES)
END_OF_TURN = {
    "qwen3": "<|im_end|>",
    "smollm2": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "llama2": "</s>",
    "mistral": "</s>",
    "gemma": "<end_of_turn>",
}
characters = st.characters(exclude_characters=GUARD + PLACEHOLDER, exclude_categories=["Cs"])
plain_text = st.lists(
    st.sampled_from([*TEXTS, "Hello", "user", "capital of France", "\n", " ", "?"])
    | st.text(characters, max_size=4),
    max_size=5,
).map(lambda parts: unicodedata.normalize("NFC", "".join(parts)))
FIXED = datetime(2024, 12, 24)


def answer(
    tokenizer: PreTrainedTokenizerFast, ids: list[int], reason: FinishReason = "stop", text: str | None = None
) -> RequestOutput:
    """An output as the engine gives it; ``text`` where a stop string has cut it."""
    if text is None:
        text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return RequestOutput(text, ids, reason, None, None, RequestMetrics())


def say(name: str, text: str, *, end: bool = True) -> list[int]:
    """The ids with which a model says a text after the template's generation prompt."""
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [*ids, tokenizer.convert_tokens_to_ids(END_OF_TURN[name])] if end else ids


def rendered(name: str, chat: Conversation) -> str:
    """What the template makes of the plain messages."""
    messages = [{"role": message.role, "content": message.content} for message in chat.messages]
    return TOKENIZERS[name].apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, date_string="24 Dec 2024"
    )


def as_text(name: str, ids: list[int]) -> str:
    return TOKENIZERS[name].decode(ids, clean_up_tokenization_spaces=False)


def comparable(name: str, text: str) -> str:
    """Sentencepiece writes spaces after tokens and before answers; they say nothing here."""
    return text if name in ("qwen3", "smollm2", "llama3") else text.replace(" ", "")


@every_tokenizer
@settings(deadline=None, derandomize=True, max_examples=60)
@given(turns=st.lists(st.tuples(plain_text, plain_text), min_size=1, max_size=4))
def test_a_prompt_extends_the_last_one_and_reads_as_the_template_would_have_it(
    name: str, turns: list[tuple[str, str]]
) -> None:
    chat = Conversation(TOKENIZERS[name], started=FIXED)
    before: list[int] = []
    for question, reply in turns:
        chat.add_user(question)
        prompt = chat.prompt_ids()
        assert prompt[: len(before)] == before
        assert comparable(name, as_text(name, prompt)) == comparable(name, rendered(name, chat))
        generated = say(name, reply.strip())
        chat.add_assistant(answer(TOKENIZERS[name], generated))
        before = prompt + generated
    chat.add_user("And?")
    assert chat.prompt_ids()[: len(before)] == before


@every_tokenizer
@pytest.mark.parametrize("reason", ["stop", "length", "cancelled", "error"])
def test_any_ids_are_kept_verbatim_and_the_turn_is_closed_once(name: str, reason: FinishReason) -> None:
    """Ids that no tokenizer would choose: pieces of characters, invalid bytes, tokens split oddly."""
    tokenizer, rng = TOKENIZERS[name], random.Random(name + reason)
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    ordinary = [token for token in range(len(tokenizer)) if token not in special]
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN[name])
    for _ in range(60):
        chat = Conversation(tokenizer, started=FIXED)
        expected: list[int] = []
        for turn in range(3):
            chat.add_user("What is the capital of France?")
            prompt = chat.prompt_ids()
            assert prompt[: len(expected)] == expected
            assert prompt.count(end) - (turn if name != "gemma" else 0) == chat_ends(name, turn)
            generated = [rng.choice(ordinary) for _ in range(rng.randint(1, 8))]
            text = tokenizer.decode(generated)
            if name not in ("qwen3", "smollm2") and text != text.strip():
                generated = say(name, "Paris", end=False)  # the template would trim it
            if reason == "stop":
                generated.append(end)
            chat.add_assistant(answer(tokenizer, generated, reason))
            expected = prompt + generated


def chat_ends(name: str, turns: int) -> int:
    """End-of-turn tokens in a prompt, less one for each earlier answer."""
    return {
        "qwen3": turns + 1,
        "smollm2": turns + 2,
        "llama3": turns + 2,
        "llama2": 0,
        "mistral": 0,
        "gemma": 2 * turns + 1,
    }[name]


class TestEndings:
    """However an answer ended, its turn is closed as the template closes it."""

    @pytest.mark.parametrize("end", [True, False])
    def test_closed_by_the_model_or_by_the_template(self, end: bool) -> None:
        tokenizer = TOKENIZERS["smollm2"]
        chat = Conversation(tokenizer)
        chat.add_user("Hello")
        prompt = chat.prompt_ids()
        chat.add_assistant(answer(tokenizer, say("smollm2", "Hi.", end=end)))
        chat.add_user("And?")
        new = chat.prompt_ids()[len(prompt) :]
        expected = "Hi.<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
        assert new == tokenizer.encode(expected)

    def test_a_stop_string_stays_in_the_context_but_not_in_the_text(self) -> None:
        tokenizer = TOKENIZERS["smollm2"]
        chat = Conversation(tokenizer)
        chat.add_user("Hello")
        prompt, generated = chat.prompt_ids(), say("smollm2", "Hi.\nuser", end=False)
        chat.add_assistant(answer(tokenizer, generated, text="Hi."))
        chat.add_user("And?")
        assert chat.prompt_ids()[: len(prompt) + len(generated)] == prompt + generated
        assert chat.messages[1].content == "Hi."

    def test_cancelled_before_the_first_token(self) -> None:
        tokenizer = TOKENIZERS["smollm2"]
        chat = Conversation(tokenizer)
        chat.add_user("Hello")
        chat.add_assistant(answer(tokenizer, [], "cancelled"))
        chat.add_user("Hello?")
        assert as_text("smollm2", chat.prompt_ids()) == rendered("smollm2", chat)

    def test_half_a_character_at_the_end(self) -> None:
        tokenizer = TOKENIZERS["smollm2"]
        half = say("smollm2", "🜁", end=False)[:-1]
        chat = Conversation(tokenizer)
        chat.add_user("Hello")
        prompt = chat.prompt_ids()
        chat.add_assistant(answer(tokenizer, half, "length"))
        chat.add_user("And?")
        assert chat.prompt_ids()[: len(prompt) + len(half)] == prompt + half
        assert chat.messages[1].content == "\ufffd"

    def test_end_of_turn_tokens_inside_an_answer(self) -> None:
        """As they come when the end of an answer is ignored."""
        tokenizer = TOKENIZERS["smollm2"]
        chat = Conversation(tokenizer)
        chat.add_user("Hello")
        prompt, generated = chat.prompt_ids(), [*say("smollm2", "Hi."), *say("smollm2", " More.")]
        chat.add_assistant(answer(tokenizer, generated, "length"))
        chat.add_user("And?")
        assert chat.prompt_ids()[: len(prompt) + len(generated)] == prompt + generated

    def test_control_tokens_spelled_by_either_side_stay_text(self) -> None:
        tokenizer = TOKENIZERS["smollm2"]
        plain = tokenizer.backend_tokenizer
        spelled = [token for piece in ("<|im_", "end|>") for token in plain.encode(piece).ids]
        chat = Conversation(tokenizer)
        chat.add_user("<|im_end|>")
        prompt = chat.prompt_ids()
        chat.add_assistant(answer(tokenizer, [*spelled, tokenizer.eos_token_id]))
        assert chat.messages[1].content == "<|im_end|>"
        chat.add_user("And?")
        ids = chat.prompt_ids()
        assert ids[: len(prompt) + len(spelled)] == prompt + spelled
        assert ids.count(tokenizer.eos_token_id) == 4  # system, two questions, one answer


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


class TestEditing:
    """Fork, go back, change the instructions."""

    def long_chat(self, name: str = "smollm2") -> Conversation:
        chat = Conversation(TOKENIZERS[name], "Be brief.", started=FIXED)
        for turn in range(4):
            chat.add_user(f"Question {turn}")
            chat.add_assistant(answer(TOKENIZERS[name], say(name, f"Answer {turn}.")))
        chat.add_user("And?")
        return chat

    def test_a_fork_goes_its_own_way(self) -> None:
        chat = self.long_chat()
        other = chat.fork()
        assert other.prompt_ids() == chat.prompt_ids()
        other.add_assistant("Yes.")
        other.add_user("More")
        other.system = "Be long."
        assert len(chat.messages) == 9
        assert (chat.system, other.system) == ("Be brief.", "Be long.")
        assert chat.prompt_ids() == self.long_chat().prompt_ids()

    def test_answering_again_asks_the_same(self) -> None:
        chat = self.long_chat()
        prompt = chat.prompt_ids()
        chat.add_assistant(answer(TOKENIZERS["smollm2"], say("smollm2", "First try.")))
        chat.truncate(9)
        assert chat.prompt_ids() == prompt

    def test_another_text_in_an_earlier_place(self) -> None:
        chat = self.long_chat()
        prompt = chat.prompt_ids()
        chat.truncate(4)
        chat.add_user("Question 2, put otherwise")
        ids = chat.prompt_ids()
        shared = next(i for i, (a, b) in enumerate(zip(prompt, ids, strict=False)) if a != b)
        assert as_text("smollm2", prompt[:shared]).endswith("<|im_start|>user\nQuestion 2")

    @pytest.mark.parametrize("count", [-1, 10])
    def test_no_such_place(self, count: int) -> None:
        with pytest.raises(InvalidOption, match="9 messages"):
            self.long_chat().truncate(count)

    def test_other_instructions_leave_the_answers_as_they_are(self) -> None:
        chat = self.long_chat()
        chat.system = "Be long."
        ids = chat.prompt_ids()
        assert as_text("smollm2", ids).startswith("<|im_start|>system\nBe long.<|im_end|>\n")
        generated = say("smollm2", "Answer 2.")
        assert any(ids[start : start + len(generated)] == generated for start in range(len(ids)))

    def test_an_answer_of_another_model_is_text(self) -> None:
        chat = Conversation(TOKENIZERS["llama2"])
        chat.add_user("Hello")
        chat.add_assistant(answer(TOKENIZERS["smollm2"], say("smollm2", "Hi there.")))
        assert chat.messages[1] == Message("assistant", "Hi there.")
        chat.add_user("And?")
        assert "Hi there." in as_text("llama2", chat.prompt_ids())

    def test_a_chat_keeps_its_date(self) -> None:
        chat = Conversation(TOKENIZERS["llama3"], started=FIXED)
        chat.add_user("Hello")
        assert "Today Date: 24 Dec 2024" in as_text("llama3", chat.prompt_ids())

    def test_messages_as_they_are_seen(self) -> None:
        chat = Conversation(TOKENIZERS["smollm2"])
        chat.add_user("Hello")
        ids = say("smollm2", "Hi.")
        chat.add_assistant(answer(TOKENIZERS["smollm2"], ids))
        assert chat.messages == (Message("user", "Hello"), Message("assistant", "Hi.", tuple(ids)))
        assert chat.reasoning_tags is None


class TestRefusals:
    """What has no prompt says why."""

    def test_nothing_to_answer(self) -> None:
        chat = Conversation(TOKENIZERS["smollm2"])
        with pytest.raises(InvalidOption, match="add a user message"):
            chat.prompt_ids()
        chat.add_user("Hello")
        chat.add_assistant("Hi.")
        with pytest.raises(InvalidOption, match="add a user message"):
            chat.prompt_ids()

    def test_a_broken_template_loses_no_answer(self) -> None:
        tokenizer = make_tokenizer("smollm2", chat_template="{{ nothing.at.all }}")
        chat = Conversation(tokenizer)
        chat.add_user("Hello")
        with pytest.raises(UnsupportedModel):
            chat.prompt_ids()
        chat.add_assistant(answer(tokenizer, say("smollm2", "Hi.")))
        assert chat.messages[1].content == "Hi."

    def test_questions_in_a_row(self) -> None:
        """As they come when an answer has failed."""
        chat = Conversation(TOKENIZERS["gemma"])
        chat.add_user("Hello")
        chat.add_user("Hello?")
        assert "Hello\n\nHello?<end_of_turn>" in as_text("gemma", chat.prompt_ids())
