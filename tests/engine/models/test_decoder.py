"""Every family against ``transformers`` on the same random weights, in float32."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers

from nanochat.engine.models.decoder import Decoder
from nanochat.engine.models.families import load_model_config
from nanochat.engine.models.weights import load_decoder
from tests.engine.models.paged import BLOCK_SIZE, PagedSequences
from tests.engine.models.random_models import (
    CASES,
    assert_close,
    random_tokens,
    reference_logits,
    write_random_model,
)

CPU = torch.device("cpu")
PROMPT = random_tokens(41)


@dataclass(frozen=True)
class Pair:
    reference: transformers.PreTrainedModel
    decoder: Decoder


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("models") / request.param
    reference = write_random_model(folder, CASES[request.param])
    return Pair(reference, load_decoder(folder, load_model_config(folder), CPU, torch.float32))


def test_prefill(pair: Pair) -> None:
    actual = PagedSequences(pair.decoder).prefill(0, PROMPT)
    assert_close(actual, reference_logits(pair.reference, PROMPT))


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunked_prefill(pair: Pair, chunk: int) -> None:
    actual = PagedSequences(pair.decoder).prefill(0, PROMPT, chunk)
    assert_close(actual, reference_logits(pair.reference, PROMPT))


def test_prefix_hit(pair: Pair) -> None:
    sequences = PagedSequences(pair.decoder)
    sequences.prefill(0, PROMPT)
    shared = 5 * BLOCK_SIZE
    other = PROMPT[:shared] + PROMPT[::-1]
    sequences.share_prefix(0, 1, shared // BLOCK_SIZE)
    assert_close(sequences.prefill(1, other[shared:]), reference_logits(pair.reference, other)[shared:])


def test_decode_beside_a_prefill(pair: Pair) -> None:
    sequences = PagedSequences(pair.decoder)
    sequences.prefill(0, PROMPT[:19])
    sequences.prefill(1, PROMPT[3:33])
    logits = sequences.step({0: PROMPT[19], 1: 77}, {2: PROMPT[5:28]})
    assert_close(logits[0], reference_logits(pair.reference, PROMPT[:20])[-1:])
    assert_close(logits[1], reference_logits(pair.reference, [*PROMPT[3:33], 77])[-1:])
    assert_close(logits[2], reference_logits(pair.reference, PROMPT[5:28]))


def test_greedy_tokens(pair: Pair) -> None:
    expected = pair.reference.generate(
        torch.tensor([PROMPT]), max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    actual = PagedSequences(pair.decoder).greedy(0, PROMPT, 64)
    assert actual == expected[0, len(PROMPT) :].tolist()


def test_rotary_tables_grow_with_the_sequence(tmp_path: Path) -> None:
    reference = write_random_model(tmp_path, CASES["gemma3"], max_position_embeddings=3000)
    decoder = load_decoder(tmp_path, load_model_config(tmp_path), CPU, torch.float32)
    sequences = PagedSequences(decoder, num_blocks=600)
    tokens = random_tokens(2100)
    actual = torch.cat([sequences.prefill(0, tokens[:5]), sequences.prefill(0, tokens[5:])])
    assert_close(actual, reference_logits(reference, tokens))


def test_reserved_positions_are_kept(tmp_path: Path) -> None:
    write_random_model(tmp_path, CASES["llama"])
    decoder = load_decoder(tmp_path, load_model_config(tmp_path), CPU, torch.float32)
    decoder.reserve_positions(100)
    expected = PagedSequences(decoder).prefill(0, PROMPT)
    decoder.reserve_positions(50)
    assert torch.equal(PagedSequences(decoder).prefill(0, PROMPT), expected)


def test_weight_bytes_count_tied_embeddings_once(tmp_path: Path) -> None:
    tied = write_random_model(tmp_path, CASES["llama-tied"])
    decoder = load_decoder(tmp_path, load_model_config(tmp_path), CPU, torch.bfloat16)
    assert decoder.weight_bytes == 2 * sum(parameter.numel() for parameter in tied.parameters())
