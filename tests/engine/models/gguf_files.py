"""Writes GGUF files of small models as their usual converter does: names, row order, norms, metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "smollm3": "smollm3",
    "gemma3_text": "gemma3",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
GEMMA_LAYER_NAMES = LAYER_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GLOBAL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB_SIZE = 320
TEXT = [
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "In 1969, on the 20th of July, 600 million people watched the landing.",
    "def add(first, second):\n    return first + second\n\nprint(add(17, 25))",
    "Das heißt: größer, schöner, höher! 你好，世界。 Привет, мир.",
] * 3


def byte_level_metadata(pre: str = "smollm") -> dict[str, Any]:
    """A small byte-level vocabulary with merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=SPECIAL_TOKENS,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    vocab = tokenizer.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = _trained_merges(tokenizer)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL_TOKENS else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    }


def _trained_merges(tokenizer: Tokenizer) -> list[str]:
    import json

    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]


def write_gguf(
    model: transformers.PreTrainedModel,
    path: Path,
    tensor_type: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
) -> None:
    """``model`` with its matrices as ``tensor_type``; ``metadata`` replaces or adds entries."""
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (_metadata(config, architecture) | byte_level_metadata() | (metadata or {})).items():
        _add(writer, key, value)
    if config.rope_parameters.get("rope_type") == "longrope":
        writer.add_tensor("rope_freqs.weight", np.array(config.rope_parameters["short_factor"], np.float32))
    for name, array in tensors(model).items():
        kind = tensor_type if array.ndim > 1 and "ffn_gate_inp" not in name else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _metadata(config: Any, architecture: str) -> dict[str, Any]:
    values: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
    }
    rope = config.rope_parameters
    if architecture == "gemma3":
        values["attention.sliding_window"] = config.sliding_window
        rope = rope["full_attention"]
    values["rope.freq_base"] = float(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        values["rope.scaling.type"] = rope["rope_type"]
        values["rope.scaling.factor"] = float(rope["factor"])
    if rope["rope_type"] == "yarn":
        values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if architecture == "qwen3moe":
        values["expert_count"] = config.num_experts
        values["expert_used_count"] = config.num_experts_per_tok
        values["expert_feed_forward_length"] = config.moe_intermediate_size
    return {f"{architecture}.{key}": value for key, value in values.items()}


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def tensors(model: transformers.PreTrainedModel) -> dict[str, np.ndarray]:
    """Every tensor under its GGUF name, float32, as the converter lays it out."""
    config = model.config
    named: dict[str, np.ndarray] = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach().float()
        if "gemma" in config.model_type and name.endswith("norm.weight"):
            value = value + 1.0
        if config.model_type in ("llama", "smollm3") and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            value = _interleaved(value, heads)
        if name.endswith("experts.gate_up_proj"):
            gate, up = value.chunk(2, dim=1)
            named[_layer_name(name, "ffn_gate_exps")] = gate.numpy()
            named[_layer_name(name, "ffn_up_exps")] = up.numpy()
        elif name.endswith("experts.down_proj"):
            named[_layer_name(name, "ffn_down_exps")] = value.numpy()
        else:
            named[_name(config, name)] = value.numpy()
    return named


def _interleaved(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Halves of each head's rows, dealt out alternately."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(rows.shape)


def _name(config: Any, name: str) -> str:
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name]
    names = GEMMA_LAYER_NAMES if "gemma" in config.model_type else LAYER_NAMES
    inner, _, part = name.split(".", 3)[3].rpartition(".")
    return f"blk.{name.split('.')[2]}.{names[inner]}.{part}"


def _layer_name(name: str, kind: str) -> str:
    return f"blk.{name.split('.')[2]}.{kind}.weight"
