"""Every family against ``transformers`` on the same random weights, in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nanochat.engine.models.decoder import Decoder
from nanochat.engine.models.families import load_model_config
from nanochat.engine.models.weights import load_decoder
from tests.engine.models.paged import BLOCK_SIZE, PagedSequences

SIZES: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 500.0} | parameters}


@dataclass(frozen=True)
class Case:
    config: Callable[..., transformers.PreTrainedConfig]
    options: dict[str, Any]


Llama = transformers.LlamaConfig
Mistral = transformers.MistralConfig
Qwen2 = transformers.Qwen2Config
Qwen3 = transformers.Qwen3Config
Qwen3Moe = transformers.Qwen3MoeConfig
SmolLM3 = transformers.SmolLM3Config
Gemma3 = transformers.Gemma3TextConfig
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

CASES = {
    "llama": Case(Llama, {}),
    "llama-tied": Case(Llama, {"tie_word_embeddings": True}),
    "llama-biases": Case(Llama, {"attention_bias": True, "mlp_bias": True}),
    "llama-one-kv-head": Case(Llama, {"num_key_value_heads": 1}),
    "llama3-rope": Case(Llama, rope(**LLAMA3, original_max_position_embeddings=64)),
    "llama-linear-rope": Case(Llama, rope(rope_type="linear", factor=4.0)),
    "llama-yarn": Case(Llama, rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)),
    "llama-factors": Case(
        Llama,
        rope(
            rope_type="longrope",
            short_factor=[1.0 + i / 3 for i in range(12)],
            long_factor=[1.0 + i / 3 for i in range(12)],
            factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "mistral": Case(Mistral, {"sliding_window": None}),
    "mistral-window": Case(Mistral, {"sliding_window": 11}),
    "qwen2": Case(Qwen2, {}),
    "qwen2-window": Case(Qwen2, {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
    "qwen3": Case(Qwen3, {"tie_word_embeddings": True}),
    "qwen3-biases-yarn": Case(
        Qwen3,
        {"attention_bias": True}
        | rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=16.0),
    ),
    "qwen3-moe": Case(Qwen3Moe, MOE | {"norm_topk_prob": True}),
    "qwen3-moe-mixed": Case(Qwen3Moe, MOE | {"mlp_only_layers": [2], "decoder_sparse_step": 2}),
    "smollm3": Case(SmolLM3, {"no_rope_layer_interval": 2}),
    "smollm3-window": Case(
        SmolLM3, {"no_rope_layers": [1, 0, 0, 1], "use_sliding_window": True, "sliding_window": 10}
    ),
    "gemma3": Case(
        Gemma3,
        {
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 8,
            "query_pre_attn_scalar": 40,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma3-softcap": Case(
        Gemma3, {"sliding_window": 8, "sliding_window_pattern": 2, "final_logit_softcapping": 3.0}
    ),
}


@dataclass(frozen=True)
class Pair:
    reference: transformers.PreTrainedModel
    decoder: Decoder
    prompt: list[int]

    @torch.inference_mode()
    def reference_logits(self, tokens: list[int]) -> torch.Tensor:
        return self.reference(torch.tensor([tokens])).logits[0].float()


def write_random_model(folder: Path, case: Case, seed: int = 0) -> transformers.PreTrainedModel:
    """Save a random model whose every weight matters (norms and biases too)."""
    torch.manual_seed(seed)
    config = case.config(**(SIZES | case.options))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name
            parameter.normal_(
                0.0, 0.3 if is_norm or parameter.dim() == 1 else 1.5 / parameter.shape[-1] ** 0.5
            )
            if is_norm and "gemma" not in config.model_type:
                parameter.add_(1.0)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("models") / request.param
    reference = write_random_model(folder, CASES[request.param])
    decoder = load_decoder(folder, load_model_config(folder), torch.device("cpu"), torch.float32)
    prompt = torch.randint(3, 199, (41,), generator=torch.Generator().manual_seed(1)).tolist()
    return Pair(reference, decoder, prompt)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Within 1e-4 of the largest logit: far below what any sampling could tell."""
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_prefill(pair: Pair) -> None:
    assert_close(PagedSequences(pair.decoder).prefill(0, pair.prompt), pair.reference_logits(pair.prompt))


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunked_prefill(pair: Pair, chunk: int) -> None:
    actual = PagedSequences(pair.decoder).prefill(0, pair.prompt, chunk)
    assert_close(actual, pair.reference_logits(pair.prompt))


def test_prefix_hit(pair: Pair) -> None:
    sequences = PagedSequences(pair.decoder)
    sequences.prefill(0, pair.prompt)
    shared = 5 * BLOCK_SIZE
    other = pair.prompt[:shared] + pair.prompt[::-1]
    sequences.share_prefix(0, 1, shared // BLOCK_SIZE)
    assert_close(sequences.prefill(1, other[shared:]), pair.reference_logits(other)[shared:])


def test_decode_beside_a_prefill(pair: Pair) -> None:
    sequences = PagedSequences(pair.decoder)
    sequences.prefill(0, pair.prompt[:19])
    sequences.prefill(1, pair.prompt[3:33])
    logits = sequences.step({0: pair.prompt[19], 1: 77}, {2: pair.prompt[5:28]})
    assert_close(logits[0], pair.reference_logits(pair.prompt[:20])[-1:])
    assert_close(logits[1], pair.reference_logits([*pair.prompt[3:33], 77])[-1:])
    assert_close(logits[2], pair.reference_logits(pair.prompt[5:28]))


def test_greedy_tokens(pair: Pair) -> None:
    expected = pair.reference.generate(
        torch.tensor([pair.prompt]), max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    actual = PagedSequences(pair.decoder).greedy(0, pair.prompt, 64)
    assert actual == expected[0, len(pair.prompt) :].tolist()
