"""Encoding of rendered text: the step-by-step way against the backend's own."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from nanochat.engine.prompt_encoding import GUARD, PLACEHOLDER, PromptEncoder, placeholders
from nanochat.errors import UnsupportedModel
from tests.tokenizer_zoo import NAMES, TEXTS, make_tokenizer

TOKENIZERS = {name: make_tokenizer(name) for name in NAMES}
every_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())


def added_tokens(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    return sorted(tokenizer.get_added_vocab())


def mixed_text(tokenizer: PreTrainedTokenizerFast) -> st.SearchStrategy[str]:
    """Texts with the tokenizer's own added tokens among the words."""
    parts = st.sampled_from([*added_tokens(tokenizer), *TEXTS, " ", "\n", "<", "|>", "ab"])
    return st.lists(parts | st.text(max_size=5), max_size=8).map("".join)


@every_tokenizer
@settings(deadline=None, derandomize=True, max_examples=150)
@given(data=st.data())
def test_the_steps_give_what_the_backend_gives(
    tokenizer: PreTrainedTokenizerFast, data: st.DataObject
) -> None:
    text = data.draw(mixed_text(tokenizer)).replace(GUARD, "")
    encoder = PromptEncoder(tokenizer, "")
    expected = tokenizer.encode(text, add_special_tokens=False)
    assert encoder.encode(text) == expected
    assert encoder._encode_guarded(text)[0] == expected


@every_tokenizer
@settings(deadline=None, derandomize=True, max_examples=150)
@given(data=st.data())
def test_guarded_text_has_no_control_token_and_loses_nothing(
    tokenizer: PreTrainedTokenizerFast, data: st.DataObject
) -> None:
    text = data.draw(mixed_text(tokenizer))
    encoder = PromptEncoder(tokenizer, "<think></think>")
    guarded = encoder.guard(text)
    assert guarded.replace(GUARD, "") == text.replace(GUARD, "\ufffd").replace(PLACEHOLDER, "\ufffd")
    ids = encoder.encode(guarded)
    control = {tokenizer.convert_tokens_to_ids(token) for token in encoder.control_tokens - {"<unk>"}}
    assert control.isdisjoint(ids)
    if "ByteFallback" in str(tokenizer.decoder) or tokenizer is TOKENIZERS["smollm2"]:
        plain = guarded.replace(GUARD, "")
        if not any(token in plain for token in set(added_tokens(tokenizer)) - encoder.control_tokens):
            assert tokenizer.decode(ids, clean_up_tokenization_spaces=False).lstrip(" ") == plain.lstrip(" ")


@every_tokenizer
@settings(deadline=None, derandomize=True, max_examples=150)
@given(data=st.data())
def test_a_text_after_a_token_is_encoded_as_in_one_go(
    tokenizer: PreTrainedTokenizerFast, data: st.DataObject
) -> None:
    before = data.draw(st.sampled_from(TEXTS)) + str(tokenizer.eos_token)
    text = data.draw(mixed_text(tokenizer)).replace(GUARD, "")
    encoder = PromptEncoder(tokenizer, "")
    together = tokenizer.encode(before + text, add_special_tokens=False)
    assert tokenizer.encode(before, add_special_tokens=False) + encoder.encode(text, before) == together


@pytest.mark.parametrize("name", ["llama2", "mistral", "metaspace"])
def test_a_text_after_a_word_gains_no_space(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    encoder = PromptEncoder(tokenizer, "")
    ids = encoder.encode("\nuser", before="hello")
    assert tokenizer.convert_ids_to_tokens(ids[:1]) == ["\n"]
    assert encoder.encode("\nuser") != ids


def test_a_token_that_would_reach_across_is_split() -> None:
    tokenizer = TOKENIZERS["smollm2"]
    encoder = PromptEncoder(tokenizer, "")
    assert len(tokenizer.encode(" the")) == 1
    assert encoder.encode("he", before=" t") == tokenizer.encode("he")


@pytest.mark.parametrize("name", ["llama2", "smollm2"])
def test_a_normalizer_that_makes_control_tokens(name: str) -> None:
    """Full-width letters become ASCII ones only after the contents have been guarded."""
    from tokenizers import AddedToken, normalizers

    tokenizer = make_tokenizer(name)
    backend = tokenizer.backend_tokenizer
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), *([backend.normalizer] if backend.normalizer else [])]
    )
    backend.add_special_tokens([AddedToken("<|x|>", special=True, normalized=True)])
    control = tokenizer.convert_tokens_to_ids("<|x|>")
    encoder = PromptEncoder(tokenizer, "")
    assert control in tokenizer.encode("＜｜x｜＞")
    assert control not in encoder.encode(encoder.guard("＜｜x｜＞"))
    assert encoder.encode("a<|x|>b").count(control) == 1


class TestTokensThatTakeTheSpaceAroundThem:
    """Added tokens with ``lstrip`` and ``rstrip``."""

    @staticmethod
    def tokenizer() -> PreTrainedTokenizerFast:
        from tokenizers import AddedToken

        tokenizer = make_tokenizer("smollm2")
        mask = AddedToken("<|mask|>", special=True, lstrip=True, rstrip=True)
        tokenizer.backend_tokenizer.add_special_tokens([mask])
        return tokenizer

    @pytest.mark.parametrize(
        "text",
        [
            "a <|mask|> b",
            "  \n<|mask|>",
            "<|mask|>  <|mask|>",
            "a  b <|im_end|>  <|mask|>c",
            "a\t <|mask|><|mask|>",
        ],
    )
    def test_are_found_as_the_backend_finds_them(self, text: str) -> None:
        tokenizer = self.tokenizer()
        encoder = PromptEncoder(tokenizer, "")
        assert encoder._encode_guarded(text)[0] == tokenizer.encode(text, add_special_tokens=False)

    @pytest.mark.timeout(60)
    def test_a_long_run_of_space_is_looked_through_once(self) -> None:
        """It took time in the square of its length."""
        encoder = PromptEncoder(self.tokenizer(), "")
        text = encoder.guard("<|im_end|>" + " " * 300_000 + "x")
        assert encoder.encode(text)


def test_a_token_of_absurd_length_is_refused() -> None:
    """All beginnings of it would be kept, which takes memory in the square of its length."""
    tokenizer = make_tokenizer("smollm2", extra_special_tokens=["<|" + "a" * 100_000 + "|>"])
    with pytest.raises(UnsupportedModel, match="100,004 characters"):
        PromptEncoder(tokenizer, "")


class TestControlTokens:
    """Which tokens count as control tokens."""

    def test_special_ones_and_those_that_look_or_are_used_like_it(self) -> None:
        tokenizer = TOKENIZERS["qwen3"]
        special = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}
        assert PromptEncoder(tokenizer, "").control_tokens == special | {"<|fim_prefix|>"}
        used = PromptEncoder(tokenizer, "write <think> and </think>").control_tokens
        assert used == special | {"<|fim_prefix|>", "<think>", "</think>"}

    def test_space_is_none_although_templates_write_it(self) -> None:
        control = PromptEncoder(TOKENIZERS["gemma"], "\n\n ▁▁").control_tokens
        assert control.isdisjoint({"\n\n", "\n\n\n", "▁▁", "<table>"})


def test_placeholders_and_the_texts_between() -> None:
    mark = PLACEHOLDER
    assert list(placeholders(f"a{mark}12{mark}{mark}0{mark}b")) == ["a", 12, "", 0, "b"]
    assert list(placeholders("plain")) == ["plain"]
