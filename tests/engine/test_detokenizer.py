"""Streamed text against one-shot decoding, on every kind of decoder."""

from __future__ import annotations

import random
import sys
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from nanochat.engine.detokenizer import Detokenizer, TokenSpeller
from tests.tokenizer_zoo import NAMES, TEXTS, make_tokenizer

TOKENIZERS = {name: make_tokenizer(name) for name in NAMES}
every_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())


def one_shot(tokenizer: PreTrainedTokenizerFast, ids: list[int], skip_special_tokens: bool = True) -> str:
    return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)


def stream(detokenizer: Detokenizer, ids: list[int], chunk: int = 1) -> list[str]:
    pieces = [detokenizer.push(ids[start : start + chunk]) for start in range(0, len(ids), chunk)]
    return [*pieces, detokenizer.flush()]


def random_ids(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> list[int]:
    """Pieces of real texts cut anywhere, bytes that make no text, and any ids, some of them unknown."""
    ids: list[int] = []
    for _ in range(rng.randint(1, 12)):
        match rng.randrange(4):
            case 0:
                encoded = tokenizer.encode(rng.choice(TEXTS), add_special_tokens=False)
                start = rng.randrange(len(encoded) + 1)
                ids += encoded[start : rng.randint(start, len(encoded))]
            case 1:  # where both kinds of vocabulary keep their bytes
                ids += [rng.randrange(260) for _ in range(rng.randint(1, 6))]
            case _:
                ids += [rng.randrange(len(tokenizer) + 20) for _ in range(rng.randint(1, 4))]
    return ids


@every_tokenizer
@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_streamed_text_equals_one_shot_decoding(
    tokenizer: PreTrainedTokenizerFast, skip_special_tokens: bool
) -> None:
    rng = random.Random(0)
    for _ in range(2000 if skip_special_tokens else 300):
        ids = random_ids(tokenizer, rng)
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        pieces = stream(detokenizer, ids, chunk=rng.choice([1, 1, 1, 3]))
        expected = one_shot(tokenizer, ids, skip_special_tokens)
        assert "".join(pieces) == expected
        assert detokenizer.text == expected
        assert detokenizer.num_tokens == len(ids)


@every_tokenizer
def test_text_that_goes_on_from_other_tokens_is_the_rest_of_what_all_say(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    rng = random.Random(1)
    for _ in range(500):
        ids = random_ids(tokenizer, rng)
        before, text = Detokenizer(tokenizer), ""
        places = [(0, "")]  # where no character is cut
        for count, token_id in enumerate(ids, start=1):
            text += before.push([token_id])
            if not before.is_waiting:
                places.append((count, text))
        cut, beginning = rng.choice(places)
        rest = Detokenizer(tokenizer, after=ids[:cut])
        assert beginning + "".join(stream(rest, ids[cut:])) == one_shot(tokenizer, ids)
        assert rest.num_tokens == len(ids) - cut


@pytest.mark.parametrize("name", NAMES)
def test_half_a_character_before_the_text_is_not_part_of_it(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("naïve 🜁", add_special_tokens=False)
    for cut in range(len(ids) + 1):
        assert "".join(stream(Detokenizer(tokenizer, after=ids[:cut]), [])) == ""
    word = tokenizer.encode("a capital", add_special_tokens=False)
    assert "".join(stream(Detokenizer(tokenizer, after=ids), word)).strip() == "a capital"


@every_tokenizer
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_comes_out_as_it_went_in_and_without_half_characters(
    tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(Detokenizer(tokenizer), ids)
    assert "".join(pieces) == one_shot(tokenizer, ids)
    assert all("\ufffd" not in piece for piece in pieces)


class TestHalfCharacters:
    """Characters that several tokens make together."""

    @pytest.mark.parametrize("name", ["smollm2", "llama2"])
    def test_a_character_comes_whole_or_not_yet(self, name: str) -> None:
        tokenizer = TOKENIZERS[name]
        ids = byte_ids(name, "🜁".encode())
        detokenizer = Detokenizer(tokenizer)
        assert [detokenizer.push([token]) for token in ids[:3]] == ["", "", ""]
        assert detokenizer.push([ids[3]]) + detokenizer.flush() == "🜁"

    @pytest.mark.parametrize("name", ["smollm2", "llama2"])
    def test_what_is_cut_off_at_the_end_is_marked(self, name: str) -> None:
        tokenizer = TOKENIZERS[name]
        ids = byte_ids(name, "🜁".encode()[:3])
        detokenizer = Detokenizer(tokenizer)
        assert detokenizer.push(ids) == ""
        assert detokenizer.flush() == one_shot(tokenizer, ids) != ""
        assert detokenizer.flush() == ""

    @pytest.mark.parametrize("name", ["smollm2", "llama2"])
    def test_a_prompt_that_ends_in_half_a_character_changes_nothing(self, name: str) -> None:
        generated = byte_ids(name, "🜁!".encode()[2:])
        pieces = stream(Detokenizer(TOKENIZERS[name]), generated)
        assert "".join(pieces) == one_shot(TOKENIZERS[name], generated)

    @pytest.mark.parametrize("name", ["smollm2", "llama2"])
    def test_an_endless_run_of_invalid_bytes_is_not_held_back(self, name: str) -> None:
        tokenizer = TOKENIZERS[name]
        detokenizer = Detokenizer(tokenizer)
        for count in range(1, 200):
            detokenizer.push(byte_ids(name, b"\xff"))
            assert len(detokenizer.text) >= count - 3
        detokenizer.flush()
        assert detokenizer.text == "\ufffd" * 199

    def test_an_invalid_byte_spoils_the_whole_run_of_fallback_bytes(self) -> None:
        # The backend does so, and nothing that was given out may change, so the run has to wait.
        detokenizer = Detokenizer(TOKENIZERS["llama2"])
        assert detokenizer.push(byte_ids("llama2", "é".encode())) == ""
        assert detokenizer.push(byte_ids("llama2", b"\xff")) == "\ufffd" * 3

    def test_tokens_that_decode_to_nothing(self) -> None:
        tokenizer = TOKENIZERS["smollm2"]
        end, unknown = tokenizer.eos_token_id, len(tokenizer) + 7
        detokenizer = Detokenizer(tokenizer, ("never",))
        assert [detokenizer.push([end]), detokenizer.push([unknown]), detokenizer.push([])] == [""] * 3
        assert detokenizer.flush() == "" == detokenizer.text


class TestStopStrings:
    """They end the text, and neither they nor their beginnings are seen."""

    @staticmethod
    def answer(text: str, stop: tuple[str, ...], name: str = "smollm2") -> tuple[list[str], Detokenizer]:
        tokenizer = TOKENIZERS[name]
        detokenizer = Detokenizer(tokenizer, stop)
        ids = tokenizer.encode(text, add_special_tokens=False)
        return stream(detokenizer, ids), detokenizer

    @every_tokenizer
    def test_the_text_before_is_whole(self, tokenizer: PreTrainedTokenizerFast) -> None:
        ids = tokenizer.encode("The capital of France is Paris, and more", add_special_tokens=False)
        detokenizer = Detokenizer(tokenizer, ("France is Paris",))
        stream(detokenizer, ids)
        assert detokenizer.text == "The capital of "
        assert detokenizer.stopped
        assert "France is Paris" in one_shot(tokenizer, ids[: detokenizer.num_tokens])
        assert "France is Paris" not in one_shot(tokenizer, ids[: detokenizer.num_tokens - 1])

    def test_a_beginning_that_comes_to_nothing_is_given_out(self) -> None:
        pieces, detokenizer = self.answer("one ## two ###", ("####",))
        assert "".join(pieces) == "one ## two ###"
        assert not detokenizer.stopped

    def test_at_the_first_token(self) -> None:
        pieces, detokenizer = self.answer("Hello", ("H",))
        assert (pieces[0], detokenizer.text, detokenizer.num_tokens) == ("", "", 1)

    def test_nothing_follows(self) -> None:
        _, detokenizer = self.answer("one STOP two", ("STOP",))
        assert detokenizer.push(TOKENIZERS["smollm2"].encode("more")) == ""
        assert detokenizer.text == "one "

    def test_one_that_overlaps_itself(self) -> None:
        assert self.answer("xaaab", ("aab",))[1].text == "xa"

    def test_the_first_to_be_complete_wins_and_the_longest_of_equals(self) -> None:
        assert self.answer("abcdef", ("cd", "bcdefg", "f"))[1].text == "ab"
        assert self.answer("abcdef", ("d", "bcd"))[1].text == "a"

    def test_in_the_text_that_was_waiting_at_the_end(self) -> None:
        detokenizer = Detokenizer(TOKENIZERS["llama2"], ("é",))
        assert detokenizer.push(byte_ids("llama2", "é".encode())) == ""
        assert (detokenizer.flush(), detokenizer.stopped) == ("", True)

    @settings(deadline=None, derandomize=True, max_examples=200)
    @given(
        text=st.text("ab", max_size=40),
        stop=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3),
        chunk=st.integers(1, 4),
    )
    def test_against_a_plain_search(self, text: str, stop: list[str], chunk: int) -> None:
        tokenizer = TOKENIZERS["smollm2"]
        ids = [token for character in text for token in tokenizer.encode(character)]
        ends = [(text.find(word) + len(word), -len(word)) for word in stop if word in text]
        end, negative_length = min(ends, default=(len(text), 0))
        detokenizer = Detokenizer(tokenizer, tuple(stop))
        shown = ""
        for piece in stream(detokenizer, ids, chunk):
            shown += piece
            assert text[: end + negative_length].startswith(shown)
        assert shown == text[: end + negative_length]
        assert detokenizer.stopped == bool(ends)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_spelled_one_by_one_are_the_bytes_of_the_text(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    text = "Weather: naïve 漢字 😀!"
    ids = tokenizer.encode(text, add_special_tokens=False)
    speller = TokenSpeller(tokenizer)
    spelled = b"".join(map(speller.spell, ids)).decode("utf-8")
    decoded = one_shot(tokenizer, ids)
    assert spelled.strip() == decoded.strip()  # some lose a space at the text's beginning
    assert speller.spell(10**9) == b""


class TestOtherDecoders:
    """Decoders that no family here has still give a text, through a window of tokens."""

    def test_words_with_continuation_marks(self) -> None:
        tokens = ["[UNK]", "un", "##able", "to", "##ken", "ize", "##r"]
        backend = Tokenizer(models.WordPiece({t: i for i, t in enumerate(tokens)}, unk_token="[UNK]"))
        backend.decoder = decoders.WordPiece(cleanup=False)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
        rng = random.Random(0)
        for _ in range(200):
            ids = [rng.randrange(len(tokens)) for _ in range(rng.randint(1, 30))]
            assert "".join(stream(Detokenizer(tokenizer), ids)) == one_shot(tokenizer, ids)
            cut = rng.randint(1, len(ids))
            rest = "".join(stream(Detokenizer(tokenizer, after=ids[:cut]), ids[cut:]))
            assert one_shot(tokenizer, ids[:cut]) + rest == one_shot(tokenizer, ids)

    def test_no_decoder(self) -> None:
        backend = Tokenizer(models.WordLevel({"one": 0, "two": 1, "[UNK]": 2}, unk_token="[UNK]"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
        assert "".join(stream(Detokenizer(tokenizer), [0, 1, 1, 0])) == "one two two one"


@every_tokenizer
def test_a_token_costs_as_much_late_as_early(tokenizer: PreTrainedTokenizerFast) -> None:
    """Calls are counted rather than timed."""
    ids = list(range(len(tokenizer)))
    detokenizer = Detokenizer(tokenizer, ("never to be found",))

    def calls() -> int:
        count = 0

        def tally(_frame: FrameType, event: str, _argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(tally)
        try:
            for token_id in ids:
                detokenizer.push([token_id])
        finally:
            sys.setprofile(None)
        return count

    first = calls()
    stream(detokenizer, ids * 10)
    assert calls() <= first * 1.01 + 100


def byte_ids(name: str, data: bytes) -> list[int]:
    """Ids of the tokens that stand for single bytes."""
    tokenizer = TOKENIZERS[name]
    if name == "llama2":
        return [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in data]
    return [tokenizer.convert_tokens_to_ids(bytes_to_unicode()[byte]) for byte in data]
