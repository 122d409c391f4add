"""Small random models of every family, made by ``transformers``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

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


@dataclass(frozen=True)
class Case:
    """A configuration class of ``transformers`` and how its model differs from ``SIZES``."""

    config: Callable[..., transformers.PreTrainedConfig]
    options: dict[str, Any]


def _rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 500.0} | parameters}


Llama = transformers.LlamaConfig
Mistral = transformers.MistralConfig
Qwen2 = transformers.Qwen2Config
Qwen3 = transformers.Qwen3Config
Qwen3Moe = transformers.Qwen3MoeConfig
SmolLM3 = transformers.SmolLM3Config
Gemma3 = transformers.Gemma3TextConfig
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FACTORS = [1.0 + index / 3 for index in range(12)]

CASES = {
    "llama": Case(Llama, {}),
    "llama-tied": Case(Llama, {"tie_word_embeddings": True}),
    "llama-biases": Case(Llama, {"attention_bias": True, "mlp_bias": True}),
    "llama-one-kv-head": Case(Llama, {"num_key_value_heads": 1}),
    "llama3-rope": Case(Llama, _rope(**LLAMA3, original_max_position_embeddings=64)),
    "llama-linear-rope": Case(Llama, _rope(rope_type="linear", factor=4.0)),
    "llama-yarn": Case(Llama, _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)),
    "llama-factors": Case(
        Llama,
        _rope(
            rope_type="longrope",
            short_factor=FACTORS,
            long_factor=FACTORS,
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
        | _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=16.0),
    ),
    "qwen3-moe": Case(Qwen3Moe, MOE | {"norm_topk_prob": True}),
    "qwen3-moe-mixed": Case(Qwen3Moe, MOE | {"mlp_only_layers": [2], "decoder_sparse_step": 2}),
    "smollm3": Case(SmolLM3, {}),
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


def random_model(case: Case, seed: int = 0, **options: Any) -> transformers.PreTrainedModel:
    """A model whose every weight matters, norms and biases too."""
    torch.manual_seed(seed)
    config = case.config(**(SIZES | case.options | options))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name
            is_vector = is_norm or parameter.dim() == 1
            parameter.normal_(0.0, 0.3 if is_vector else 1.5 / parameter.shape[-1] ** 0.5)
            if is_norm and "gemma" not in config.model_type:  # gemma's are stored less one
                parameter.add_(1.0)
    return model


def write_random_model(
    folder: Path, case: Case, seed: int = 0, **options: Any
) -> transformers.PreTrainedModel:
    """The model, also saved in ``folder``."""
    model = random_model(case, seed, **options)
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
def reference_logits(model: transformers.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """``[n, vocab]`` float32."""
    return model(torch.tensor([tokens])).logits[0].float()


def random_tokens(count: int, seed: int = 1) -> list[int]:
    """Token ids of the small vocabulary, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, SIZES["vocab_size"], (count,), generator=generator).tolist()


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Within 1e-4 of the largest logit: far below what any sampling could tell."""
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()
