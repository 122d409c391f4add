"""GGUF tensors to one safetensors file, a block of rows at a time, so that none need fit memory whole.

Knows nothing of metadata or tokenizers.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from nanochat.engine.models.families import ModelConfig
from nanochat.engine.models.weights import StoredTensor
from nanochat.engine.progress import Progress, ProgressCallback
from nanochat.errors import UnsupportedModel

_BLOCK_ELEMENTS = 4 * 2**20
"""Converted at a time: dequantising takes some 20 bytes an element."""

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_OUTPUT_NORM_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERT_NAMES = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_WORKED_INTO_CONFIG = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One tensor of the safetensors file and how its bytes come about."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As safetensors names it."""
    data: np.ndarray
    """``[rows, ...]`` as stored in the GGUF file, quantised rows as bytes."""
    tensor_type: Any
    """``gguf.GGMLQuantizationType``"""
    row_order: np.ndarray | None = None
    """Which stored row each row is."""
    offset: float = 0.0
    """Added to every element."""

    @property
    def num_bytes(self) -> int:
        return self.stored(Path()).num_bytes

    def stored(self, file: Path) -> StoredTensor:
        """What its header entry says."""
        return StoredTensor(file, self.shape, self.dtype)


def plan_tensors(
    source: Path, config: ModelConfig, tensors: Mapping[str, Any], permuted: bool, norm_offset: float
) -> list[OutputTensor]:
    """Every tensor of the model in ``source``, under its Hugging Face name.

    ``permuted``: q and k have their rows in GGML's order for interleaved rotation. ``norm_offset``: what
    the converter added to the norms' weights.

    Raises:
        UnsupportedModel: a tensor that isn't known, or of a type that can't be read.
    """
    outputs: list[OutputTensor] = []
    for name, tensor in tensors.items():
        if name == _WORKED_INTO_CONFIG:
            continue
        kind = name.split(".")[-2]
        row_order = None
        if permuted and kind in ("attn_q", "attn_k"):
            row_order = _unpermuted(
                config.num_heads if kind == "attn_q" else config.num_kv_heads, config.head_dim
            )
        offset = -norm_offset if kind.endswith("norm") else 0.0
        outputs += _outputs(source, config, name, tensor, row_order, offset)
    # Wider types first, so that every tensor starts at a multiple of its element size.
    return sorted(outputs, key=lambda output: output.dtype != "F32")


def _outputs(
    source: Path, config: ModelConfig, name: str, tensor: Any, row_order: np.ndarray | None, offset: float
) -> list[OutputTensor]:
    target = _target_name(source, config, name)
    shape = tuple(int(size) for size in reversed(tensor.shape))
    kind = tensor.tensor_type.name
    dtype = kind if kind in ("F32", "F16", "BF16") else "F16"
    if not _can_read(tensor.tensor_type) or (len(shape) == 1 and kind != "F32"):
        raise UnsupportedModel(
            f"{source} can't be used: its tensor {name[:60]} has type {kind}. Choose a file with K-quants, "
            "Q4_0 to Q8_0, F16 or BF16."
        )
    if offset and kind != "F32":
        raise UnsupportedModel(f"{source} can't be used: its norm {name[:60]} is {kind}, not F32.")
    if len(shape) < 3:
        return [OutputTensor(target, shape, dtype, tensor.data, tensor.tensor_type, row_order, offset)]
    return [  # a stack of experts
        OutputTensor(target.format(expert=expert), shape[1:], dtype, tensor.data[expert], tensor.tensor_type)
        for expert in range(shape[0])
    ]


def _can_read(tensor_type: Any) -> bool:
    """Whether ``gguf`` dequantises this type; it has no such question to ask, so try a block of zeros."""
    from gguf import GGML_QUANT_SIZES, dequantize

    if tensor_type.name in ("F32", "F16", "BF16"):
        return True
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[tensor_type][1]), dtype=np.uint8), tensor_type)
    except NotImplementedError:
        return False
    return True


def _target_name(source: Path, config: ModelConfig, name: str) -> str:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    names = _LAYER_NAMES | (_OUTPUT_NORM_NAMES if config.output_norms else {})
    match = _LAYER_TENSOR.fullmatch(name)
    if match:
        layer, kind, part = match.groups()
        if kind in names:
            return f"model.layers.{int(layer)}.{names[kind]}.{part}"
        if kind in _EXPERT_NAMES:
            return f"model.layers.{int(layer)}.mlp.experts.{{expert}}.{_EXPERT_NAMES[kind]}.{part}"
    raise UnsupportedModel(
        f"{source} can't be used: a {config.architecture} has no tensor like its {name[:60]!r}."
    )


def _unpermuted(num_heads: int, head_dim: int) -> np.ndarray:
    """Stored row of each row: GGML pairs neighbours for rotation where others pair the halves of a head."""
    rows = np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)


def write_safetensors(path: Path, outputs: list[OutputTensor], progress: ProgressCallback) -> None:
    """The format: the header's length in eight bytes, a JSON header, then the tensors' bytes in its order.

    Raises:
        OSError: the disk is full, or the file can't be written.
        UnsupportedModel: a value doesn't fit float16.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    total = 0
    for output in outputs:
        end = total + output.num_bytes
        header[output.name] = {
            "dtype": output.dtype,
            "shape": output.shape,
            "data_offsets": (total, end),
        }
        total = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data starts aligned
    done = 0
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for output in outputs:
            progress(Progress("Converting the model", done, total, "B"))
            _write_tensor(file, output)
            done += output.num_bytes
        file.flush()
        os.fsync(file.fileno())
    progress(Progress("Converting the model", total, total, "B"))


def _write_tensor(file: BinaryIO, output: OutputTensor) -> None:
    for rows in _row_blocks(output):
        if output.offset:
            rows = rows + np.float32(output.offset)
        if output.tensor_type.name not in ("F32", "F16", "BF16"):
            rows = _float16(output, rows)
        file.write(np.ascontiguousarray(rows).data)


def _row_blocks(output: OutputTensor) -> Iterator[np.ndarray]:
    data = output.data if output.data.ndim > 1 else output.data[:, None]
    num_rows = max(1, _BLOCK_ELEMENTS // max(1, int(np.prod(output.shape[1:]))))
    for start in range(0, len(data), num_rows):
        rows = slice(start, start + num_rows)
        yield data[rows] if output.row_order is None else data[output.row_order[rows]]


def _float16(output: OutputTensor, rows: np.ndarray) -> np.ndarray:
    from gguf import dequantize

    with np.errstate(over="ignore", invalid="ignore"):  # looked at right below
        values = dequantize(rows, output.tensor_type).astype(np.float16)
    if not np.isfinite(values).all():
        raise UnsupportedModel(
            f"The tensor for {output.name} holds values beyond float16. Choose an F16, BF16 or F32 file."
        )
    return values
