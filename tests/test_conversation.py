"""Token-exact history: what was generated stays, and only the template's new text is added."""

from __future__ import annotations

import random
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat.conversation import Conversation, Message
from nanochat.engine.prompt_encoding import GUARD, PLACEHOLDER
from nanochat.engine.request import FinishReason
from nanochat.errors import InvalidOption, UnsupportedModel
from tests.answers import END_OF_TURN, FIXED, TOKENIZERS, answer, as_text, comparable, rendered, say
from tests.tokenizer_zoo import CHAT_NAMES, TEXTS, make_tokenizer

every_tokenizer = pytest.mark.parametrize("name", CHAT_NAMES)
characters = st.characters(exclude_characters=GUARD + PLACEHOLDER, exclude_categories=["Cs"])
plain_text = st.lists(
    st.sampled_from([*TEXTS, "Hello", "user", "capital of France", "\n", " ", "?"])
    | st.text(characters, max_size=4),
    max_size=5,
).map(lambda parts: unicodedata.normalize("NFC", "".join(parts)))


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
