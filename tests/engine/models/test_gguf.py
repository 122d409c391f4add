"""Models from GGUF files: the same logits as the model they were made from, and sentences for bad files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanochat.engine.models.families import load_model_config
from nanochat.engine.models.gguf import convert_gguf
from nanochat.engine.models.weights import load_decoder
from nanochat.engine.progress import Progress
from nanochat.engine.tokenizer import eos_token_ids
from nanochat.errors import ModelNotFound, NanochatError, UnsupportedModel
from tests.engine.models import gguf_files
from tests.engine.models.paged import PagedSequences
from tests.engine.models.random_models import (
    CASES,
    Case,
    assert_close,
    random_model,
    random_tokens,
    reference_logits,
)

CPU = torch.device("cpu")
PROMPT = random_tokens(40)
GEMMA = Case(
    CASES["gemma3"].config,
    {
        "sliding_window": 8,
        "num_hidden_layers": 7,
        "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
)
FAMILIES = {
    name: CASES[name]
    for name in (
        "llama",
        "llama-tied",
        "llama-biases",
        "llama-factors",
        "llama-linear-rope",
        "llama-yarn",
        "qwen2",
        "qwen3",
        "qwen3-moe",
        "smollm3",
    )
} | {"gemma3": GEMMA}


def small_model(case: Case = CASES["llama"]) -> Any:
    options = {"attention_factor": 1.0} if case is CASES["llama-factors"] else {}
    if options:
        case = Case(case.config, {"rope_parameters": case.options["rope_parameters"] | options})
    return random_model(case, vocab_size=gguf_files.VOCAB_SIZE)


def converted(source: Path, folder: Path) -> Path:
    folder.mkdir()
    convert_gguf(source, folder)
    return folder


def logits(folder: Path) -> torch.Tensor:
    decoder = load_decoder(folder, load_model_config(folder), CPU, torch.float32)
    return PagedSequences(decoder).prefill(0, PROMPT)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_computes_what_it_was_made_from(name: str, tmp_path: Path) -> None:
    model = small_model(FAMILIES[name])
    gguf_files.write_gguf(model, tmp_path / "model.gguf")
    folder = converted(tmp_path / "model.gguf", tmp_path / "model")
    assert_close(logits(folder), reference_logits(model, PROMPT))
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert_close(logits(folder), reference_logits(loaded, PROMPT))


@pytest.mark.parametrize(
    "kind", [Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1], ids=lambda t: t.name
)
def test_tensor_types(kind: Type, tmp_path: Path) -> None:
    """F16 and BF16 come through bit for bit; quantised tensors as float16 of what ``gguf`` makes of them."""
    case = Case(CASES["qwen3"].config, {"head_dim": 32})
    model = small_model(case)
    gguf_files.write_gguf(model, tmp_path / "model.gguf", kind)
    folder = converted(tmp_path / "model.gguf", tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    dtype = torch.bfloat16 if kind == Type.BF16 else torch.float16
    for name, parameter in model.named_parameters():
        expected = parameter.detach()
        if expected.dim() > 1:
            packed = gguf.quantize(expected.numpy(), kind)
            expected = torch.from_numpy(gguf.dequantize(packed, kind)).to(dtype)
        assert torch.equal(stored[name], expected), name
    published = json.loads((folder / "config.json").read_text())["dtype"]
    assert published == ("bfloat16" if kind == Type.BF16 else "float16")


@pytest.mark.parametrize(
    ("kind", "scales"),
    [
        (Type.Q2_K, slice(-4, None)),
        (Type.Q3_K, slice(-2, None)),
        (Type.Q4_K, slice(0, 4)),
        (Type.Q5_K, slice(0, 4)),
        (Type.Q6_K, slice(-2, None)),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_k_quants(kind: Type, scales: slice, tmp_path: Path) -> None:
    """``scales``: a block's float16s, which random bytes may make NaN."""
    case = Case(CASES["llama"].config, {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64})
    model = small_model(case)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rows = np.random.default_rng(0).integers(0, 256, (256, 256 // block * size), dtype=np.uint8)
    rows[:, scales] = np.frombuffer(np.array([0.01, 0.02], np.float16).tobytes(), np.uint8)[
        : len(rows[0, scales])
    ]

    class Quantised(gguf_files.gguf.GGUFWriter):  # type: ignore[name-defined, misc]
        def add_tensor(self, name: str, tensor: Any, **options: Any) -> None:
            if name.endswith("ffn_down.weight"):
                tensor, options = rows, {"raw_dtype": kind}
            super().add_tensor(name, tensor, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_files.gguf, "GGUFWriter", Quantised)
        gguf_files.write_gguf(model, tmp_path / "model.gguf")
    stored = load_file(converted(tmp_path / "model.gguf", tmp_path / "model") / "model.safetensors")
    expected = torch.from_numpy(gguf.dequantize(rows, kind)).half()
    assert torch.equal(stored["model.layers.1.mlp.down_proj.weight"], expected)


def test_large_tensors_are_converted_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    gguf_files.write_gguf(model, tmp_path / "model.gguf", Type.Q8_0)
    whole = converted(tmp_path / "model.gguf", tmp_path / "whole")
    monkeypatch.setattr("nanochat.engine.models.gguf_tensors._BLOCK_ELEMENTS", 1000)
    blocks = converted(tmp_path / "model.gguf", tmp_path / "blocks")
    assert (whole / "model.safetensors").read_bytes() == (blocks / "model.safetensors").read_bytes()


def test_tokenizer_and_end_of_sequence_come_along(tmp_path: Path) -> None:
    gguf_files.write_gguf(small_model(), tmp_path / "model.gguf")
    folder = converted(tmp_path / "model.gguf", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens(tokenizer("12 cats").input_ids)[:2] == ["1", "2"]
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "Hi"
    assert eos_token_ids(folder, tokenizer) == {2}


def test_progress_reaches_its_total(tmp_path: Path) -> None:
    gguf_files.write_gguf(small_model(), tmp_path / "model.gguf")
    seen: list[Progress] = []
    (tmp_path / "model").mkdir()
    convert_gguf(tmp_path / "model.gguf", tmp_path / "model", seen.append)
    done = [step.done for step in seen if step.unit == "B"]
    assert done == sorted(done)
    assert done[-1] == seen[-1].total > 0


class TestBadFiles:
    """Fault 31: a bad file ends in a sentence."""

    def convert(self, tmp_path: Path, **metadata: Any) -> None:
        gguf_files.write_gguf(small_model(), tmp_path / "model.gguf", metadata=metadata)
        converted(tmp_path / "model.gguf", tmp_path / "model")

    def test_not_a_gguf_file(self, tmp_path: Path) -> None:
        (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04 a zip file")
        with pytest.raises(ModelNotFound, match="not a GGUF file"):
            converted(tmp_path / "model.gguf", tmp_path / "model")

    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(ModelNotFound, match="No such file"):
            converted(tmp_path / "model.gguf", tmp_path / "model")

    def test_unknown_architecture(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedModel, match=r"'mamba' can't be run; supported: llama, qwen2"):
            self.convert(tmp_path, **{"general.architecture": "mamba"})

    def test_unknown_splitting_rule(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedModel, match="rule 'chameleon', which isn't known"):
            self.convert(tmp_path, **{"tokenizer.ggml.pre": "chameleon"})

    def test_unknown_tokenizer(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedModel, match="of the kind 'bert'"):
            self.convert(tmp_path, **{"tokenizer.ggml.model": "bert"})

    def test_part_of_a_split_model(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedModel, match="part of a split model"):
            self.convert(tmp_path, **{"split.count": 3})

    def test_absurd_sizes(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedModel, match="num_hidden_layers must be"):
            self.convert(tmp_path, **{"llama.block_count": 2**31})

    def test_sizes_that_contradict_the_tensors(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedModel, match=r"doesn't match its config\.json"):
            self.convert(tmp_path, **{"llama.feed_forward_length": 100})

    @pytest.mark.parametrize("keep", [0.0001, 0.02, 0.05, 0.2, 0.6, 0.999])
    def test_cut_short(self, keep: float, tmp_path: Path) -> None:
        gguf_files.write_gguf(small_model(), tmp_path / "model.gguf")
        content = (tmp_path / "model.gguf").read_bytes()
        (tmp_path / "model.gguf").write_bytes(content[: int(len(content) * keep)])
        with pytest.raises(ModelNotFound, match=r"damaged or only partly downloaded|not a GGUF"):
            converted(tmp_path / "model.gguf", tmp_path / "model")

    def test_an_array_said_to_be_endless(self, tmp_path: Path) -> None:
        gguf_files.write_gguf(small_model(), tmp_path / "model.gguf")
        content = bytearray((tmp_path / "model.gguf").read_bytes())
        at = content.index(b"tokenizer.ggml.token_type") + len("tokenizer.ggml.token_type") + 8
        content[at : at + 8] = (2**60).to_bytes(8, "little")
        (tmp_path / "model.gguf").write_bytes(content)
        with pytest.raises(ModelNotFound, match="damaged"):
            converted(tmp_path / "model.gguf", tmp_path / "model")

    def test_flipped_bytes_raise_nothing_else(self, tmp_path: Path) -> None:
        gguf_files.write_gguf(small_model(), tmp_path / "model.gguf")
        content = (tmp_path / "model.gguf").read_bytes()
        header = content.index(b"blk.0.attn_norm") + 600
        generator = random.Random(0)
        for attempt in range(60):
            changed = bytearray(content)
            for _ in range(3):
                changed[generator.randrange(4, header)] = generator.randrange(256)
            (tmp_path / "model.gguf").write_bytes(changed)
            folder = tmp_path / f"model-{attempt}"
            try:
                converted(tmp_path / "model.gguf", folder)
            except NanochatError:
                continue
