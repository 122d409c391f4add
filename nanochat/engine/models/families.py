"""Which models the decoder runs, and how each differs from the others: data, not code paths.

``load_model_config`` turns a ``config.json`` (of transformers 4 or 5) into a :class:`ModelConfig`. The
file is hostile input: every value is checked before anything is allocated from it. Knows nothing of
weights, devices or tokenizers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nanochat.engine.models.config_reader import ConfigReader, read_json_object
from nanochat.engine.models.rope import RopeConfig, rope_from_config
from nanochat.errors import UnsupportedModel

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What may differ from layer to layer."""

    window: int
    """Tokens a query sees, itself included; 0: all before it."""
    rope: RopeConfig | None
    """None: no position embedding in this layer (NoPE)."""
    sparse: bool = False
    """A mixture of experts instead of one MLP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Mixture of experts: softmax router, ``experts_per_token`` experts each token."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalize: bool
    """Whether the chosen experts' weights are scaled to sum to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything the decoder needs to know. Sizes are in elements."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    """Longest sequence the model was made for, in tokens."""
    layers: tuple[LayerConfig, ...]
    moe: MoEConfig | None
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """Each query and key head is RMS-normalised before it is rotated."""
    norm_plus_one: bool
    """Norm weights are stored less one."""
    output_norms: bool
    """Attention and MLP outputs are normalised before they join the residual."""
    activation: Activation
    embedding_scale: float
    attention_scale: float
    """Factor of the query-key products."""
    attention_softcap: float
    """0: none."""
    final_softcap: float
    """Of the logits; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What an architecture's name says and its ``config.json`` need not."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values for keys that a file leaves out, as its makers' own code has them."""
    is_windowed: Callable[[ConfigReader, int], bool] = lambda config, layer: False
    """Which layers use the sliding window when ``layer_types`` doesn't say."""
    honours_layer_types: bool = True
    has_rope: Callable[[ConfigReader, int], bool] = lambda config, layer: True
    """Which layers have a position embedding."""
    qkv_bias: bool = False
    """Bias on q, k and v whatever ``attention_bias`` says."""
    honours_bias: bool = True
    """Whether ``attention_bias`` gives q, k, v and o a bias."""
    qk_norm: bool = False
    norm_plus_one: bool = False
    output_norms: bool = False
    scales_embedding: bool = False
    moe: bool = False


def _past_max_window_layers(config: ConfigReader, layer: int) -> bool:
    return layer >= config.integer("max_window_layers", 0, 2**20)


def _rope_flag(config: ConfigReader, layer: int) -> bool:
    flags = config.integers("no_rope_layers")  # 1 means that the layer has rope
    if flags is None:
        return (layer + 1) % config.integer("no_rope_layer_interval", 1, 2**20, default=4) != 0
    if layer >= len(flags):
        raise config.error("no_rope_layers is shorter than num_hidden_layers")
    return bool(flags[layer])


def _local(config: ConfigReader, layer: int) -> bool:
    return (layer + 1) % config.integer("sliding_window_pattern", 1, 2**20) != 0


_COMMON = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10_000.0}
_QWEN = {"max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096}
_QWEN_WINDOW = {"max_window_layers": 28}
_GEMMA3 = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}

_GEMMA3_FAMILY = Family(
    defaults=_GEMMA3,
    is_windowed=_local,
    qk_norm=True,
    norm_plus_one=True,
    output_norms=True,
    scales_embedding=True,
)

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(defaults={"max_position_embeddings": 2048}),
    "MistralForCausalLM": Family(
        defaults={"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096},
        is_windowed=lambda config, layer: True,
        honours_layer_types=False,
        honours_bias=False,
    ),
    "Qwen2ForCausalLM": Family(
        defaults=_QWEN | _QWEN_WINDOW, is_windowed=_past_max_window_layers, qkv_bias=True, honours_bias=False
    ),
    "Qwen3ForCausalLM": Family(
        defaults=_QWEN | _QWEN_WINDOW | {"head_dim": 128}, is_windowed=_past_max_window_layers, qk_norm=True
    ),
    "Qwen3MoeForCausalLM": Family(
        defaults=_QWEN | {"num_key_value_heads": 4, "decoder_sparse_step": 1, "norm_topk_prob": False},
        is_windowed=lambda config, layer: True,
        honours_layer_types=False,
        qk_norm=True,
        moe=True,
    ),
    "SmolLM3ForCausalLM": Family(
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
        },
        is_windowed=lambda config, layer: not _rope_flag(config, layer),
        has_rope=_rope_flag,
    ),
    "Gemma3ForCausalLM": _GEMMA3_FAMILY,
    # The text half of the models that also see; its config.json nests ours under "text_config".
    "Gemma3ForConditionalGeneration": _GEMMA3_FAMILY,
}

_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def load_model_config(folder: Path) -> ModelConfig:
    """Read ``config.json``.

    Raises:
        ModelNotFound: the file isn't there or isn't JSON.
        UnsupportedModel: the architecture isn't one of ``FAMILIES``, or a value is out of range.
    """
    raw = read_json_object(folder / "config.json")
    architecture = _architecture(raw, folder)
    family = FAMILIES[architecture]
    if raw.get("quantization_config"):
        raise UnsupportedModel(
            f"{folder} holds weights quantised for another program. Choose the plain safetensors "
            "model or a GGUF file of it."
        )
    text = raw.get("text_config")
    values = _COMMON | dict(family.defaults) | (raw | text if isinstance(text, dict) else raw)
    return _model_config(ConfigReader(values, folder / "config.json"), family, architecture)


def _architecture(raw: Mapping[str, Any], folder: Path) -> str:
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else raw.get("model_type", "(none named)")
    if not isinstance(name, str) or name not in FAMILIES:
        raise UnsupportedModel(
            f"{folder} is of the kind {repr(name)[:80]}, which can't be run. Supported: {', '.join(FAMILIES)}."
        )
    return name


def _model_config(config: ConfigReader, family: Family, architecture: str) -> ModelConfig:
    hidden_size = config.integer("hidden_size", 1, 2**18)
    num_heads = config.integer("num_attention_heads", 1, 2**14)
    num_kv_heads = config.integer("num_key_value_heads", 1, num_heads, default=num_heads)
    head_dim = config.integer("head_dim", 2, 2**12, default=max(hidden_size // num_heads, 1))
    if num_heads % num_kv_heads:
        raise config.error("num_attention_heads must be a multiple of num_key_value_heads")
    if head_dim % 2:
        raise config.error("head_dim must be even")
    if config.flag("use_bidirectional_attention"):
        raise config.error("use_bidirectional_attention is for embedding models, which can't chat")
    attention_bias = family.honours_bias and config.flag("attention_bias")
    activation = config.text("hidden_activation", default=config.text("hidden_act"))
    if activation not in _ACTIVATIONS:
        raise config.error(f"hidden_act {activation[:40]!r} isn't one of {', '.join(_ACTIVATIONS)}")
    query_scalar = config.number("query_pre_attn_scalar", 1e-6, 1e9, default=float(head_dim))
    layers = _layers(config, family, head_dim)
    return ModelConfig(
        architecture=architecture,
        vocab_size=config.integer("vocab_size", 2, 2**24),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size", 1, 2**20),
        num_layers=len(layers),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.number("rms_norm_eps", 0.0, 1.0),
        max_position_embeddings=_max_position(config, layers),
        layers=layers,
        moe=_moe(config) if family.moe else None,
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        qkv_bias=family.qkv_bias or attention_bias,
        o_bias=attention_bias,
        mlp_bias=config.flag("mlp_bias"),
        qk_norm=family.qk_norm,
        norm_plus_one=family.norm_plus_one,
        output_norms=family.output_norms,
        activation=_ACTIVATIONS[activation],
        embedding_scale=hidden_size**0.5 if family.scales_embedding else 1.0,
        attention_scale=query_scalar**-0.5,
        attention_softcap=config.number("attn_logit_softcapping", 0.0, 1e9, default=0.0),
        final_softcap=config.number("final_logit_softcapping", 0.0, 1e9, default=0.0),
    )


def _layers(config: ConfigReader, family: Family, head_dim: int) -> tuple[LayerConfig, ...]:
    count = config.integer("num_hidden_layers", 1, 4096)
    window = 0
    if config.get("sliding_window") is not None and config.flag("use_sliding_window", default=True):
        window = config.integer("sliding_window", 1, 2**28)
    types = config.texts("layer_types") if family.honours_layer_types else None
    if types is not None and (len(types) != count or set(types) - {"full_attention", "sliding_attention"}):
        raise config.error("layer_types must name full_attention or sliding_attention for every layer")
    windowed = [
        types[layer] == "sliding_attention" if types else family.is_windowed(config, layer)
        for layer in range(count)
    ]
    ropes = {local: rope_from_config(config, head_dim, local=local) for local in set(windowed)}
    return tuple(
        LayerConfig(
            window=window if local else 0,
            rope=ropes[local] if family.has_rope(config, layer) else None,
            sparse=family.moe and _is_sparse(config, layer),
        )
        for layer, local in enumerate(windowed)
    )


def _max_position(config: ConfigReader, layers: tuple[LayerConfig, ...]) -> int:
    """The stated length; with YaRN, files may state the one before stretching, so the longer of both."""
    stated = config.integer("max_position_embeddings", 1, 2**28)
    ropes = [layer.rope for layer in layers if layer.rope is not None and layer.rope.scaling == "yarn"]
    return max([stated, *(int(min(rope.factor * rope.original_max_position, 2**28)) for rope in ropes)])


def _is_sparse(config: ConfigReader, layer: int) -> bool:
    step = config.integer("decoder_sparse_step", 1, 2**20)
    return layer not in (config.integers("mlp_only_layers") or ()) and (layer + 1) % step == 0


def _moe(config: ConfigReader) -> MoEConfig:
    # transformers 5 writes num_local_experts
    experts = config.integer("num_experts", 1, 2**16, default=config.get("num_local_experts") or 128)
    return MoEConfig(
        num_experts=experts,
        experts_per_token=config.integer("num_experts_per_tok", 1, experts, default=8),
        intermediate_size=config.integer("moe_intermediate_size", 1, 2**20, default=768),
        normalize=config.flag("norm_topk_prob"),
    )
