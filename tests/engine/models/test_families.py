"""config.json of transformers 4 and 5 to a ModelConfig, and sentences for those that can't be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nanochat.engine.models.families import FAMILIES, ModelConfig, load_model_config
from nanochat.engine.models.rope import RopeConfig, cos_sin_table, inverse_frequencies
from nanochat.errors import ModelNotFound, UnsupportedModel
from tests.tiny_model import llama_config

# As published, shortened to what is read.
QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA_3_2_1B = {
    "architectures": ["LlamaForCausalLM"],
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
}


def load(folder: Path, config: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return load_model_config(folder)


class TestPublishedConfigs:
    def test_qwen3(self, tmp_path: Path) -> None:
        config = load(tmp_path, QWEN3_0_6B)
        assert (config.num_heads, config.num_kv_heads, config.head_dim) == (16, 8, 128)
        assert config.qk_norm
        assert not config.qkv_bias
        assert config.tie_word_embeddings
        assert config.attention_scale == 128**-0.5
        assert {layer.window for layer in config.layers} == {0}
        assert config.layers[0].rope == RopeConfig(theta=1e6, rotary_dim=128)

    def test_llama_3_2(self, tmp_path: Path) -> None:
        config = load(tmp_path, LLAMA_3_2_1B)
        rope = config.layers[0].rope
        assert rope is not None
        assert (rope.scaling, rope.factor, rope.original_max_position) == ("llama3", 32.0, 8192)

    def test_gemma_3_with_its_eyes_closed(self, tmp_path: Path) -> None:
        config = load(tmp_path, GEMMA_3_4B)
        assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
        assert [layer.window for layer in config.layers[:7]] == [1024] * 5 + [0, 1024]
        local, full = config.layers[0].rope, config.layers[5].rope
        assert local == RopeConfig(theta=1e4, rotary_dim=256)
        assert full == RopeConfig(theta=1e6, rotary_dim=256, scaling="linear", factor=8.0)
        assert config.embedding_scale == 2560**0.5
        assert (config.activation, config.norm_plus_one, config.output_norms) == ("gelu_tanh", True, True)

    @pytest.mark.parametrize("name", FAMILIES)
    def test_what_a_file_leaves_out_is_as_in_transformers(self, name: str, tmp_path: Path) -> None:
        """A config.json with the required sizes only."""
        config_class = getattr(transformers, name).config_class
        sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 12}
        sizes |= {"num_attention_heads": 8, "vocab_size": 1000}
        expected = config_class(**sizes)
        if name == "Gemma3ForConditionalGeneration":
            expected = transformers.Gemma3TextConfig(**sizes)
        actual = load(tmp_path, {"architectures": [name]} | sizes)
        head_dim = getattr(expected, "head_dim", None) or 64
        for theirs, ours in (
            (head_dim, actual.head_dim),
            (expected.max_position_embeddings, actual.max_position_embeddings),
            (expected.rms_norm_eps, actual.rms_norm_eps),
            (expected.tie_word_embeddings, actual.tie_word_embeddings),
            (_rope_parameters(expected, "full_attention")["rope_theta"], _full_rope(actual).theta),
        ):
            assert theirs == ours
        if "layer_types" in vars(expected):
            windowed = [kind == "sliding_attention" for kind in expected.layer_types]
            assert [layer.window > 0 for layer in actual.layers] == windowed


def _rope_parameters(config: Any, layer_type: str) -> dict[str, Any]:
    return config.rope_parameters.get(layer_type, config.rope_parameters)


def _full_rope(config: ModelConfig) -> RopeConfig:
    return next(
        layer.rope for layer in config.layers if layer.rope and not (layer.window and config.output_norms)
    )


class TestForms:
    def test_both_forms_of_rope_scaling_are_one(self, tmp_path: Path) -> None:
        yarn = {"factor": 4.0, "original_max_position_embeddings": 512}
        older = load(tmp_path, llama_config(rope_theta=1e6, rope_scaling={"type": "yarn"} | yarn))
        newer = llama_config(rope_parameters={"rope_type": "yarn", "rope_theta": 1e6} | yarn)
        del newer["rope_theta"]
        assert load(tmp_path, newer).layers == older.layers
        assert older.max_position_embeddings == 2048  # 4 x 512

    def test_yarn_stretches_a_context_stated_before_scaling(self, tmp_path: Path) -> None:
        scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
        assert load(tmp_path, llama_config(rope_scaling=scaling)).max_position_embeddings == 8192

    def test_dynamic_scaling_is_none_up_to_the_context_length(self, tmp_path: Path) -> None:
        scaled = load(tmp_path, llama_config(rope_scaling={"rope_type": "dynamic", "factor": 2.0}))
        assert scaled.layers == load(tmp_path, llama_config()).layers

    def test_layers_of_one_kind_share_their_rope(self, tmp_path: Path) -> None:
        config = load(tmp_path, GEMMA_3_4B)
        assert len({layer.rope for layer in config.layers}) == 2

    def test_cosines_come_before_sines(self) -> None:
        rope = RopeConfig(theta=1e4, rotary_dim=8)
        table = cos_sin_table(rope, 5, torch.device("cpu"))
        angles = 3 * inverse_frequencies(rope)
        torch.testing.assert_close(table[3], torch.cat((angles.cos(), angles.sin())))


class TestUnusable:
    """Fault 31: wrong architecture or values end in a sentence, before anything is allocated."""

    def test_unknown_architecture_names_itself_and_the_known(self, tmp_path: Path) -> None:
        with pytest.raises(
            UnsupportedModel, match=r"of the kind 'BertModel', which.*Supported: LlamaForCausalLM, Mistral"
        ):
            load(tmp_path, {"architectures": ["BertModel"]})

    def test_a_name_that_would_command_a_terminal_is_spelled_out(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedModel) as caught:
            load(tmp_path, {"architectures": ["\x1b]52;c;Y3VybA==\x07"]})
        assert str(caught.value).isprintable()

    @pytest.mark.parametrize("architectures", [None, [], [3], "LlamaForCausalLM", [["a"]]])
    def test_architecture_of_the_wrong_type(self, architectures: Any, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedModel, match="can't be run"):
            load(tmp_path, llama_config(architectures=architectures))

    def test_weights_quantised_for_another_program(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedModel, match="quantised for another program"):
            load(tmp_path, llama_config(quantization_config={"quant_method": "awq"}))

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("hidden_size", -1),
            ("hidden_size", 2**40),
            ("hidden_size", "64"),
            ("hidden_size", True),
            ("hidden_size", None),
            ("hidden_size", 64.5),
            ("num_hidden_layers", 0),
            ("num_hidden_layers", 10**9),
            ("num_attention_heads", 0),
            ("num_key_value_heads", 3),
            ("num_key_value_heads", 8),
            ("head_dim", 15),
            ("head_dim", 10**6),
            ("vocab_size", 2**31),
            ("intermediate_size", []),
            ("rms_norm_eps", float("nan")),
            ("rms_norm_eps", -1.0),
            ("max_position_embeddings", 0),
            ("max_position_embeddings", 2**40),
            ("hidden_act", "exec"),
            ("hidden_act", 3),
            ("tie_word_embeddings", "yes"),
            ("rope_theta", 0),
            ("rope_theta", float("inf")),
            pytest.param("rope_theta", 10**400, id="rope_theta-beyond floats"),
            ("rope_scaling", {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1e-320}),
            ("rope_scaling", {"rope_type": "yarn", "factor": 4.0, "beta_slow": 1e-320}),
            (
                "rope_scaling",
                {"rope_type": "longrope", "short_factor": [10**400] * 8, "long_factor": [10**400] * 8},
            ),
            ("rope_scaling", "linear"),
            ("rope_scaling", {"rope_type": "spiral", "factor": 2.0}),
            ("rope_scaling", {"rope_type": "linear"}),
            ("rope_scaling", {"rope_type": "linear", "factor": 0}),
            (
                "rope_scaling",
                {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4},
            ),
            ("rope_scaling", {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}),
            ("rope_scaling", {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}),
            ("rope_scaling", {"rope_type": "default", "partial_rotary_factor": 0.5}),
            ("layer_types", ["full_attention"]),
            ("layer_types", ["linear_attention"] * 2),
        ],
    )
    def test_values(self, name: str, value: Any, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedModel) as caught:
            load(tmp_path, llama_config(**{name: value}))
        assert str(tmp_path) in str(caught.value)

    @pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00", "[" * 100_000, '{"a": 1e9999'])
    def test_not_a_json_object(self, text: str, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelNotFound, match="Download the model again"):
            load_model_config(tmp_path)

    def test_bytes_that_are_no_text(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ModelNotFound, match="not valid JSON"):
            load_model_config(tmp_path)

    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(ModelNotFound, match=r"holds no config\.json"):
            load_model_config(tmp_path)
