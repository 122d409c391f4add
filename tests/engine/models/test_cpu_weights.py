"""Which format each linear map gets on the CPU, and that the engine answers with all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nanochat import EngineConfig, SamplingParams
from nanochat.engine import loading
from nanochat.engine.config import Weights
from nanochat.engine.device import choose_dtype
from nanochat.engine.engine import Engine
from nanochat.engine.loading import load_model
from nanochat.errors import InvalidOption
from nanochat.kernels import cpu_linear
from nanochat.kernels.native import linear as native_linear
from tests.tiny_model import llama_config, llama_weights, write_tiny_llama

CPU = torch.device("cpu")


def config(folder: Path, weights: Weights = "auto", **options: object) -> EngineConfig:
    return EngineConfig(model=str(folder), device="cpu", weights=weights, num_kv_blocks=32, **options)  # type: ignore[arg-type]


@pytest.fixture
def compact_llama(tmp_path: Path) -> Path:
    """The tiny model with linear maps that have 16 levels in each group of 32, as from a Q4_1 file."""
    folder = write_tiny_llama(tmp_path / "model")
    tensors = {
        name: cpu_linear.dequantize_int4(cpu_linear.quantize_int4(tensor)).half()
        if name.endswith("proj.weight")
        else tensor
        for name, tensor in llama_weights(llama_config()).items()
    }
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def greedy_tokens(options: EngineConfig) -> list[int]:
    with Engine(options) as engine:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        return engine.submit([5, 6, 7, 8, 9], params).result(60).token_ids


def test_auto_keeps_the_four_bits_that_the_file_has(compact_llama: Path) -> None:
    assert load_model(config(compact_llama), lambda progress: None).weights == "int4"


def test_auto_is_exact_for_whoever_asks_for_float32(compact_llama: Path) -> None:
    assert load_model(config(compact_llama, dtype="float32"), lambda progress: None).weights == "fp32"


@pytest.mark.parametrize(("dtype", "expected"), [("float32", "fp32"), ("bfloat16", "bf16")])
def test_auto_never_makes_other_weights_compact(tiny_llama: Path, dtype: str, expected: str) -> None:
    assert load_model(config(tiny_llama, dtype=dtype), lambda progress: None).weights == expected


def test_compact_weights_give_the_same_probabilities_as_full_ones(compact_llama: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    tops = []
    for weights in ("auto", "fp32"):
        with Engine(config(compact_llama, weights)) as engine:  # type: ignore[arg-type]
            logprobs = engine.submit([5, 6, 7, 8, 9], params).result(60).logprobs
        assert logprobs is not None
        tops.append(dict(logprobs[0].top))
    compact, full = tops
    assert max(compact, key=compact.__getitem__) == max(full, key=full.__getitem__)
    for token in compact.keys() & full.keys():
        # BF16 alone moves this random model's by 0.28.
        assert compact[token] == pytest.approx(full[token], abs=0.5)


@pytest.mark.parametrize(
    ("weights", "dtype"),
    [
        *((weights, "auto") for weights in ("fp32", "bf16", "int8", "int4")),
        *((weights, dtype) for weights in ("int8", "int4") for dtype in ("float32", "bfloat16")),
    ],
)
def test_every_format_answers(tiny_llama: Path, weights: Weights, dtype: str) -> None:
    assert len(greedy_tokens(config(tiny_llama, weights, dtype=dtype))) == 12


def test_where_a_build_has_no_kernels_of_its_own_plain_products_do(
    compact_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = greedy_tokens(config(compact_llama, "fp32"))
    monkeypatch.setattr(cpu_linear, "_works", lambda *attempt: False)
    monkeypatch.setattr(native_linear, "can_take", lambda weight: False)
    monkeypatch.setattr(loading, "find_native", lambda: None)
    assert load_model(config(compact_llama), lambda progress: None).weights in ("bf16", "fp32")
    for weights in ("auto", "fp32", "int8"):
        assert greedy_tokens(config(compact_llama, weights, dtype="float32")) == expected  # type: ignore[arg-type]


class TestTypes:
    def test_weights_of_a_float_type_choose_the_type(self) -> None:
        assert choose_dtype(EngineConfig(weights="fp32"), CPU) == torch.float32
        assert choose_dtype(EngineConfig(weights="bf16"), CPU) == torch.bfloat16

    @pytest.mark.parametrize(("weights", "dtype"), [("fp32", "bfloat16"), ("bf16", "float32")])
    def test_contradictions_are_refused(self, weights: Weights, dtype: str) -> None:
        with pytest.raises(InvalidOption, match="contradict each other"):
            choose_dtype(EngineConfig(weights=weights, dtype=dtype), CPU)  # type: ignore[arg-type]

    @pytest.mark.parametrize("weights", ["int8", "int4"])
    def test_few_bits_are_for_cpus(self, weights: Weights) -> None:
        with pytest.raises(InvalidOption, match="for CPUs only"):
            choose_dtype(EngineConfig(weights=weights), torch.device("cuda"))
