"""A small random model in Hugging Face form: real files, a real tokenizer, milliseconds a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests import tokenizer_zoo

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB_SIZE = 320


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer: three special tokens, then one token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(SPECIAL_TOKENS + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def llama_config(**overrides: Any) -> dict[str, Any]:
    """A ``config.json`` of the Llama family, with overrides."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    return config | overrides


def llama_weights(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights, large enough that greedy decoding wanders rather than repeating one token."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (2.0 / columns**0.5)

    weights = {"model.embed_tokens.weight": torch.randn(config["vocab_size"], hidden, generator=generator)}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.input_layernorm.weight": torch.ones(hidden),
            f"{name}.self_attn.q_proj.weight": matrix(queries, hidden),
            f"{name}.self_attn.k_proj.weight": matrix(keys, hidden),
            f"{name}.self_attn.v_proj.weight": matrix(keys, hidden),
            f"{name}.self_attn.o_proj.weight": matrix(hidden, queries),
            f"{name}.post_attention_layernorm.weight": torch.ones(hidden),
            f"{name}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{name}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{name}.mlp.down_proj.weight": matrix(hidden, inner),
        }
    return weights | {"model.norm.weight": torch.ones(hidden)}


def write_tiny_llama(folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """A whole model folder; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = llama_config(**overrides)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": config["eos_token_id"]}))
    save_file(llama_weights(config, seed), str(folder / "model.safetensors"), metadata={"format": "pt"})
    write_tokenizer(folder)
    return folder


def write_thinker(folder: Path) -> Path:
    """A model whose chat template opens the reasoning itself; returns its folder."""
    write_tiny_llama(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = (
        settings["chat_template"].replace("<|im_start|>assistant\n{%", "<|im_start|>assistant\n<think>{%")
        + "{# </think> #}{% if false %}</think>{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_zoo_llama(folder: Path, name: str, **overrides: Any) -> Path:
    """The same with a tokenizer of the zoo; no token that it writes in a text ends an answer."""
    size = len(tokenizer_zoo.make_tokenizer(name))
    write_tiny_llama(folder, **({"vocab_size": size, "eos_token_id": size - 1} | overrides))
    return tokenizer_zoo.write_tokenizer(folder, name)
