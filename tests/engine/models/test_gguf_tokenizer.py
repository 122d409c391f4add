"""Tokenizers built from GGUF metadata: how they split, merge, decode and mark special tokens."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from nanochat.engine.models.config_reader import ConfigReader
from nanochat.engine.models.gguf_tokenizer import write_tokenizer
from nanochat.errors import UnsupportedModel
from tests.engine.models.gguf_files import byte_level_metadata

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def build(folder: Path, metadata: dict[str, Any]) -> Tokenizer:
    write_tokenizer(ConfigReader(metadata, Path("model.gguf")), folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


class TestByteLevel:
    @pytest.mark.parametrize(
        ("pre", "number"),
        [
            ("gpt-2", ["Ġ12345"]),
            ("smollm", ["Ġ", *"12345"]),
            ("qwen2", ["Ġ", *"12345"]),
            ("llama-bpe", ["Ġ", "123", "45"]),
            ("smaug-bpe", ["Ġ", "123", "45"]),
            ("tekken", ["Ġ", *"12345"]),
        ],
    )
    def test_splits_text_by_the_named_rule(self, pre: str, number: list[str], tmp_path: Path) -> None:
        tokenizer = build(tmp_path, byte_level_metadata(pre))
        pieces = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("I had 12345 cats, it's")]
        assert pieces == ["I", "Ġhad", *number, "Ġcats", ",", "Ġit", "'s"]

    def test_tekken_cuts_where_the_case_changes(self, tmp_path: Path) -> None:
        tokenizer = build(tmp_path, byte_level_metadata("tekken"))
        pieces = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("helloWorld HTTPServer")]
        assert pieces == ["hello", "World", "ĠHTTPServer"]

    @pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe", "smaug-bpe", "tekken"])
    def test_text_comes_back_whole(self, pre: str, tmp_path: Path) -> None:
        tokenizer = build(tmp_path, byte_level_metadata(pre))
        text = "  Grüße, 你好 👩‍👩‍👧 \t 3.14\r\n"
        assert tokenizer.decode(tokenizer.encode(text).ids) == text

    def test_merges_are_applied_in_order(self, tmp_path: Path) -> None:
        metadata = byte_level_metadata()
        tokenizer = build(tmp_path, metadata)
        first = metadata["tokenizer.ggml.merges"][0].replace(" ", "")
        assert first in tokenizer.encode(first.replace("Ġ", " ")).tokens

    def test_control_tokens_are_one_token_and_left_out_of_text(self, tmp_path: Path) -> None:
        tokenizer = build(tmp_path, byte_level_metadata())
        ids = tokenizer.encode("a<|im_end|>b").ids
        assert ids[1] == 2
        assert tokenizer.decode(ids) == "ab"

    def test_user_defined_tokens_are_one_token_and_stay_in_text(self, tmp_path: Path) -> None:
        metadata = byte_level_metadata()
        metadata["tokenizer.ggml.tokens"][0] = "<tool>"
        metadata["tokenizer.ggml.token_type"][0] = 4
        tokenizer = build(tmp_path, metadata)
        ids = tokenizer.encode("a<tool>b").ids
        assert ids[1] == 0
        assert tokenizer.decode(ids) == "a<tool>b"

    def test_a_missing_rule_is_not_guessed(self, tmp_path: Path) -> None:
        metadata = byte_level_metadata()
        del metadata["tokenizer.ggml.pre"]
        with pytest.raises(UnsupportedModel, match="rule '', which isn't known"):
            build(tmp_path, metadata)


class TestSpecialTokens:
    def test_bos_is_added_when_the_file_says_so(self, tmp_path: Path) -> None:
        tokenizer = build(tmp_path, byte_level_metadata() | {"tokenizer.ggml.add_bos_token": True})
        assert tokenizer.encode("a").ids[0] == 1
        assert tokenizer.encode("a", add_special_tokens=False).ids[0] != 1

    def test_bos_and_eos_surround(self, tmp_path: Path) -> None:
        flags = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
        ids = build(tmp_path, byte_level_metadata() | flags).encode("a").ids
        assert (ids[0], ids[-1], len(ids)) == (1, 2, 3)

    def test_llama3_adds_bos_when_the_file_does_not_say(self, tmp_path: Path) -> None:
        metadata = byte_level_metadata("llama-bpe")
        del metadata["tokenizer.ggml.add_bos_token"]
        assert build(tmp_path, metadata).encode("a").ids[0] == 1

    def test_every_end_of_turn_token_ends_an_answer(self, tmp_path: Path) -> None:
        metadata = byte_level_metadata() | {
            "tokenizer.ggml.eos_token_id": 0,
            "tokenizer.ggml.eot_token_id": 5,
        }
        build(tmp_path, metadata)
        generation = json.loads((tmp_path / "generation_config.json").read_text())
        assert generation["eos_token_id"] == [0, 5, 2]

    def test_transformers_reads_the_same_ids(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
        tokenizer = build(tmp_path, byte_level_metadata() | {"tokenizer.ggml.add_bos_token": True})
        loaded = AutoTokenizer.from_pretrained(tmp_path)
        text = "There are 12345 cats<|im_end|>"
        assert loaded(text).input_ids == tokenizer.encode(text).ids
        assert loaded.decode(loaded("a , b .").input_ids, skip_special_tokens=True) == "a , b ."


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """A vocabulary of bytes, letters and the merges a real one would have learnt, with its scores."""
    words = [
        "th",
        "the",
        f"{SPACE}the",
        "in",
        "er",
        f"{SPACE}a",
        "an",
        "and",
        f"{SPACE}and",
        "re",
        "here",
        "is",
    ]
    merged = ["he", *words, f"{SPACE}t", f"{SPACE}th", "nd", f"{SPACE}an", "hi", "this", "ther", "her"]
    letters = [*"abcdefghijklmnopqrstuvwxyz.,", SPACE]
    runs = ["  ", "    "]  # written with real spaces, as converters do for user-defined tokens
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *runs, *merged, *letters]
    types = [2, 3, 3, *[6] * 256, *[4] * len(runs), *[1] * (len(merged) + len(letters))]
    scores = [0.0] * 259 + [-1000.0] * len(runs) + [-float(rank) for rank in range(len(merged))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores + [-1e6] * len(letters),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    } | changes


def best_pair_merging(metadata: dict[str, Any], text: str) -> list[str]:
    """SentencePiece's rule, plainly: again and again the adjacent pair whose joint token scores best."""
    scores = {
        token: score
        for token, score, kind in zip(
            metadata["tokenizer.ggml.tokens"],
            metadata["tokenizer.ggml.scores"],
            metadata["tokenizer.ggml.token_type"],
            strict=True,
        )
        if kind == 1
    }
    pieces = list(text)
    while True:
        pairs = [
            (scores[left + right], -at)
            for at, (left, right) in enumerate(pairwise(pieces))
            if left + right in scores
        ]
        if not pairs:
            return pieces
        at = -max(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


class TestSentencePiece:
    def test_merges_by_score(self, tmp_path: Path) -> None:
        metadata = sentencepiece_metadata()
        tokenizer = build(tmp_path, metadata)
        generator = random.Random(0)
        for _ in range(300):
            words = ["".join(generator.choices("therandis", k=generator.randint(1, 7))) for _ in range(4)]
            text = " ".join(words)
            expected = best_pair_merging(metadata, SPACE + text.replace(" ", SPACE))
            assert tokenizer.encode(text).tokens == expected

    def test_unknown_characters_become_bytes(self, tmp_path: Path) -> None:
        tokenizer = build(tmp_path, sentencepiece_metadata())
        encoded = tokenizer.encode("the é")
        assert encoded.tokens == [f"{SPACE}the", SPACE, "<0xC3>", "<0xA9>"]
        assert tokenizer.decode(encoded.ids) == "the é"

    def test_runs_of_spaces_come_before_any_merge(self, tmp_path: Path) -> None:
        tokenizer = build(tmp_path, sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": False}))
        assert tokenizer.encode("is     the").tokens == ["is", SPACE * 4, f"{SPACE}the"]
        assert tokenizer.encode("is    the").tokens == ["is", SPACE * 4, "the"]

    @pytest.mark.parametrize("prefixed", [True, False])
    def test_text_comes_back_whole(self, prefixed: bool, tmp_path: Path) -> None:
        tokenizer = build(tmp_path, sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": prefixed}))
        text = " this and   that, 你好 👩‍👩‍👧"
        assert tokenizer.decode(tokenizer.encode(text).ids) == text

    def test_scores_are_needed(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedModel, match="has no scores"):
            build(tmp_path, sentencepiece_metadata(**{"tokenizer.ggml.scores": None}))


class TestBadVocabularies:
    """Fault 31: hostile metadata ends in a sentence."""

    def test_none(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedModel, match="vocabulary is incomplete"):
            build(tmp_path, byte_level_metadata() | {"tokenizer.ggml.tokens": []})

    def test_types_of_another_length(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedModel, match="vocabulary is incomplete"):
            build(tmp_path, byte_level_metadata() | {"tokenizer.ggml.token_type": [1, 1]})

    def test_a_token_twice(self, tmp_path: Path) -> None:
        metadata = byte_level_metadata()
        metadata["tokenizer.ggml.tokens"][7] = metadata["tokenizer.ggml.tokens"][8]
        with pytest.raises(UnsupportedModel, match="holds a token twice"):
            build(tmp_path, metadata)

    def test_a_token_of_absurd_length(self, tmp_path: Path) -> None:
        """Looking for the merges that make it takes time in the square of its length."""
        metadata = sentencepiece_metadata()
        metadata["tokenizer.ggml.tokens"][-1] = "a" * 2_000_000
        with pytest.raises(UnsupportedModel, match="a token of 2,000,000 characters"):
            build(tmp_path, metadata)

    def test_special_ids_out_of_range(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedModel, match="eos_token_id must be a whole number from 0 to 319"):
            build(tmp_path, byte_level_metadata() | {"tokenizer.ggml.eos_token_id": 320})
