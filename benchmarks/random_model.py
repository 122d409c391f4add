"""Models for benchmarks: the shape of a published one, random weights made from a seed, nothing downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SHAPES: dict[str, dict[str, int]] = {
    "qwen3-0.6b": {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "qwen3-8b": {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
}


def model_config(shape: dict[str, int]) -> dict[str, Any]:
    """What the ``config.json`` of a Qwen3 model of this shape says."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "eos_token_id": 0,
        "torch_dtype": "bfloat16",
        **shape,
    }


def write_random_model(folder: Path, shape: dict[str, int], seed: int = 0) -> Path:
    """A Qwen3 model of this shape in Hugging Face form, with random BF16 weights; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model_config(shape)))
    _write_weights(folder, shape, seed)
    vocab = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def _write_weights(folder: Path, shape: dict[str, int], seed: int) -> None:
    """Random weights in one file a layer, and one for the rest, so that not all are in memory at once."""
    device = "cuda" if torch.cuda.is_available() else "cpu"  # 8 billion take minutes on a CPU
    generator = torch.Generator(device).manual_seed(seed)
    files: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, size in _tensor_shapes(shape).items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else "rest"
        files.setdefault(f"model-{layer}.safetensors", {})[name] = size
    for file, sizes in files.items():
        weights = {}
        for name, size in sizes.items():
            if len(size) == 1:
                weights[name] = torch.ones(size, dtype=torch.bfloat16)
            else:
                values = torch.randn(size, generator=generator, device=device) / size[1] ** 0.5
                weights[name] = values.bfloat16().cpu()
        save_file(weights, str(folder / file), metadata={"format": "pt"})
    index = {name: file for file, sizes in files.items() for name in sizes}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def _tensor_shapes(shape: dict[str, int]) -> dict[str, tuple[int, ...]]:
    hidden, inner, head_dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * head_dim, shape["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape["vocab_size"], hidden)}
    if not shape.get("tie_word_embeddings", True):
        shapes["lm_head.weight"] = (shape["vocab_size"], hidden)
    for layer in range(shape["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        shapes |= {
            f"{name}.input_layernorm.weight": (hidden,),
            f"{name}.self_attn.q_proj.weight": (queries, hidden),
            f"{name}.self_attn.k_proj.weight": (keys, hidden),
            f"{name}.self_attn.v_proj.weight": (keys, hidden),
            f"{name}.self_attn.o_proj.weight": (hidden, queries),
            f"{name}.self_attn.q_norm.weight": (head_dim,),
            f"{name}.self_attn.k_norm.weight": (head_dim,),
            f"{name}.post_attention_layernorm.weight": (hidden,),
            f"{name}.mlp.gate_proj.weight": (inner, hidden),
            f"{name}.mlp.up_proj.weight": (inner, hidden),
            f"{name}.mlp.down_proj.weight": (hidden, inner),
        }
    return shapes | {"model.norm.weight": (hidden,)}
