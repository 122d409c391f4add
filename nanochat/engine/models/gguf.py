"""Turns a GGUF file into a folder in Hugging Face form: config.json, one safetensors file, tokenizer files.

Quantised tensors become float16; F32, F16 and BF16 keep their type. What the format's converter changed
is changed back: the row order of q and k, and the 1 added to Gemma's norms. The file is hostile input.
Knows nothing of caches or downloads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat.engine.models.config_reader import ConfigReader
from nanochat.engine.models.families import load_model_config
from nanochat.engine.models.gguf_tensors import plan_tensors, write_safetensors
from nanochat.engine.models.gguf_tokenizer import write_tokenizer
from nanochat.engine.models.weights import check_tensors
from nanochat.engine.progress import Progress, ProgressCallback, ignore_progress
from nanochat.errors import ModelNotFound, NanochatError, NotEnoughMemory


@dataclass(frozen=True, slots=True)
class _Architecture:
    """How GGUF's name for a family maps to ours."""

    name: str
    model_type: str
    permuted: bool = False
    """q and k rows are stored in GGML's order for interleaved rotation."""
    norm_offset: float = 0.0
    """Was added to every norm weight."""
    fixed: tuple[tuple[str, Any], ...] = ()
    """Settings that GGUF doesn't store."""


_ARCHITECTURES: Mapping[str, _Architecture] = {
    "llama": _Architecture("LlamaForCausalLM", "llama", permuted=True),
    "qwen2": _Architecture("Qwen2ForCausalLM", "qwen2", fixed=(("use_sliding_window", False),)),
    "qwen3": _Architecture("Qwen3ForCausalLM", "qwen3", fixed=(("use_sliding_window", False),)),
    "qwen3moe": _Architecture(
        "Qwen3MoeForCausalLM", "qwen3_moe", fixed=(("use_sliding_window", False), ("norm_topk_prob", True))
    ),
    "smollm3": _Architecture(
        "SmolLM3ForCausalLM", "smollm3", permuted=True, fixed=(("no_rope_layer_interval", 4),)
    ),
    "gemma3": _Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        norm_offset=1.0,
        fixed=(("hidden_activation", "gelu_pytorch_tanh"),),
    ),
}

_LONGEST_ARRAY = 2**22
"""Entries; no vocabulary is nearly as large, and reading each takes microseconds and a hundred bytes."""

_GEMMA3_LOCAL_LAYERS = 6
"""Every sixth layer is a full one."""
_GEMMA3_27B_LAYERS = 62
"""Only this size scales attention by hidden size over heads instead of the head dim."""


def convert_gguf(source: Path, target: Path, progress: ProgressCallback = ignore_progress) -> None:
    """Write the model in ``source`` to the existing, empty folder ``target``.

    Raises:
        ModelNotFound: the file can't be read, is cut short or damaged.
        UnsupportedModel: its architecture, tensor types or tokenizer can't be run.
        NotEnoughMemory: even a block of a tensor doesn't fit.
    """
    try:
        _convert(source, target, progress)
    except NanochatError:
        raise
    except MemoryError as error:
        raise NotEnoughMemory(
            f"There is too little memory to convert {source}. Close other programs."
        ) from error
    except OSError as error:
        raise ModelNotFound(f"{source} can't be converted: {error.strerror or error}.") from error
    except Exception as error:  # the reader has no error of its own: what it raises depends on the damage
        raise ModelNotFound(
            f"{source} is damaged or only partly downloaded ({type(error).__name__}). Download it again."
        ) from error


def _convert(source: Path, target: Path, progress: ProgressCallback) -> None:
    progress(Progress("Reading the GGUF file"))
    with source.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelNotFound(f"{source} is not a GGUF file.")
    reader = _open(source)
    metadata = ConfigReader({name: field.contents() for name, field in reader.fields.items()}, source)
    if metadata.integer("split.count", 0, 2**16, default=1) > 1:
        raise metadata.error("it is one part of a split model; join the parts with llama-gguf-split --merge")
    architecture = _architecture(metadata)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    raw_config = _config(metadata, architecture, tensors)
    (target / "config.json").write_text(json.dumps(raw_config, indent=2), encoding="utf-8")
    config = load_model_config(target)
    outputs = plan_tensors(source, config, tensors, architecture.permuted, architecture.norm_offset)
    check_tensors(source, config, {output.name: output.stored(source) for output in outputs})
    write_tokenizer(metadata, target)
    write_safetensors(target / "model.safetensors", outputs, progress)


def _open(source: Path) -> Any:
    from gguf import GGUFReader, GGUFValueType

    class BoundedReader(GGUFReader):
        """Stops at the end of the file, where the library's own would read on through an endless array."""

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            part = super()._get(offset, dtype, count, override_order)
            if len(part) < count:
                raise EOFError(f"the file ends before byte {offset}")
            return part

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type == GGUFValueType.ARRAY and self._get(orig_offs + 4, "u8")[0] > _LONGEST_ARRAY:
                raise ValueError("an array is too long")
            return super()._get_field_parts(orig_offs, raw_type)

    return BoundedReader(source)


def _architecture(metadata: ConfigReader) -> _Architecture:
    name = metadata.text("general.architecture")
    if name not in _ARCHITECTURES:
        raise metadata.error(
            f"its architecture {name[:60]!r} can't be run; supported: {', '.join(_ARCHITECTURES)}"
        )
    return _ARCHITECTURES[name]


def _config(
    metadata: ConfigReader, architecture: _Architecture, tensors: Mapping[str, Any]
) -> dict[str, Any]:
    """The ``config.json``, in the form of transformers 5."""
    prefix = metadata.text("general.architecture")

    def integer(name: str, default: int | None = None) -> int:
        return metadata.integer(f"{prefix}.{name}", 0, 2**31, default=default)

    hidden_size, num_heads = integer("embedding_length"), integer("attention.head_count")
    num_layers = integer("block_count")
    head_dim = integer("attention.key_length", default=hidden_size // max(num_heads, 1))
    if integer("attention.value_length", default=head_dim) != head_dim:
        raise metadata.error("keys and values of different sizes aren't supported")
    if integer("rope.dimension_count", default=head_dim) != head_dim:
        raise metadata.error("rotating only a part of each head isn't supported")
    config = {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        "vocab_size": int(tensors["token_embd.weight"].shape[-1]),
        "hidden_size": hidden_size,
        "intermediate_size": integer("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": integer("attention.head_count_kv", default=num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": integer("context_length"),
        "rms_norm_eps": metadata.number(f"{prefix}.attention.layer_norm_rms_epsilon", 0, 1),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": architecture.model_type != "qwen2" and "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "rope_parameters": _rope(metadata, prefix, tensors),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "dtype": _published_dtype(tensors),
    }
    config |= dict(architecture.fixed)
    if prefix == "gemma3":
        config |= _gemma3(metadata, config)
    if prefix == "qwen3moe":
        config |= {
            "num_experts": integer("expert_count"),
            "num_experts_per_tok": integer("expert_used_count"),
            "moe_intermediate_size": integer("expert_feed_forward_length"),
        }
    return config


def _rope(metadata: ConfigReader, prefix: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    parameters: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": metadata.number(f"{prefix}.rope.freq_base", 1, 1e15, default=10_000.0),
    }
    if "rope_freqs.weight" in tensors:  # llama3 scaling, worked out: one divisor a frequency
        factors = [float(factor) for factor in tensors["rope_freqs.weight"].data]
        return parameters | {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": metadata.get(f"{prefix}.context_length"),
        }
    scaling = metadata.text(f"{prefix}.rope.scaling.type", default="none")
    factor = metadata.number(f"{prefix}.rope.scaling.factor", 0, 1e6, default=1.0)
    if scaling == "none" or factor == 1.0:
        return parameters
    if scaling == "linear":
        return parameters | {"rope_type": "linear", "factor": factor}
    if scaling == "yarn":
        original = metadata.integer(f"{prefix}.rope.scaling.original_context_length", 1, 2**28)
        return parameters | {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        }
    raise metadata.error(f"rope scaling {scaling[:40]!r} isn't supported")


def _gemma3(metadata: ConfigReader, config: Mapping[str, Any]) -> dict[str, Any]:
    num_layers = config["num_hidden_layers"]
    is_27b = num_layers == _GEMMA3_27B_LAYERS
    scalar = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    softcap = metadata.number("gemma3.final_logit_softcapping", 0, 1e9, default=0.0)
    local_theta = metadata.number("gemma3.rope.freq_base_swa", 1, 1e15, default=10_000.0)
    return {
        "query_pre_attn_scalar": scalar,
        "sliding_window": metadata.integer("gemma3.attention.sliding_window", 1, 2**28),
        "layer_types": [
            "sliding_attention" if (layer + 1) % _GEMMA3_LOCAL_LAYERS else "full_attention"
            for layer in range(min(num_layers, 4096))
        ],
        "final_logit_softcapping": softcap or None,
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        },
    }


def _published_dtype(tensors: Mapping[str, Any]) -> str:
    types = {tensor.tensor_type.name for tensor in tensors.values()}
    if "BF16" in types:
        return "bfloat16"
    return "float32" if types == {"F32"} else "float16"
