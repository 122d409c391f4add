"""How many KV blocks fit, and what is said when they don't. The GPU here is a few numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nanochat.engine import memory
from nanochat.engine.config import EngineConfig
from nanochat.engine.memory import (
    allocate_caches,
    choose_max_model_len,
    choose_num_blocks,
    free_gpu_bytes,
    kv_bytes_per_token,
)
from nanochat.engine.models.families import ModelConfig, load_model_config
from nanochat.errors import InvalidOption, NotEnoughMemory

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
GIB = 2**30


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> ModelConfig:
    """2 layers of 2 KV heads of 16."""
    return load_model_config(tiny_llama)


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 GiB others use 30, and this process has 20 in tensors and 5 reserved for more."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (45 * GIB, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 25 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20 * GIB)


def test_bytes_a_token(model: ModelConfig) -> None:
    assert kv_bytes_per_token(model, torch.bfloat16) == 2 * 2 * 2 * 16 * 2
    assert kv_bytes_per_token(model, torch.int8) == 2 * 2 * 2 * (16 + 2)  # a float16 scale a head


class TestNumberOfBlocks:
    def test_on_a_gpu_all_that_is_free(self, model: ModelConfig) -> None:
        block_bytes = 16 * kv_bytes_per_token(model, torch.bfloat16)
        config = EngineConfig(block_size=16)
        assert choose_num_blocks(config, model, torch.bfloat16, 10 * block_bytes, GPU) == 10
        assert choose_num_blocks(config, model, torch.bfloat16, 11 * block_bytes - 1, GPU) == 10

    def test_on_a_cpu_a_share_and_no_more_than_a_few_contexts_need(self, model: ModelConfig) -> None:
        block_bytes = 16 * kv_bytes_per_token(model, torch.float32)
        config = EngineConfig(block_size=16)
        assert choose_num_blocks(config, model, torch.float32, 40 * block_bytes, CPU) == 10
        assert choose_num_blocks(config, model, torch.float32, GIB, CPU) == 4 * 2048 // 16

    @pytest.mark.parametrize("free_bytes", [-GIB, 0, 4095])
    @pytest.mark.parametrize("device", [CPU, GPU])
    def test_no_room_for_one_is_refused(
        self, model: ModelConfig, free_bytes: int, device: torch.device
    ) -> None:
        with pytest.raises(NotEnoughMemory, match=r"one block of 16 tokens takes .* --kv int8"):
            choose_num_blocks(EngineConfig(), model, torch.bfloat16, free_bytes, device)

    def test_a_wish_is_taken(self, model: ModelConfig) -> None:
        assert choose_num_blocks(EngineConfig(num_kv_blocks=7), model, torch.bfloat16, 0, GPU) == 7


@pytest.mark.usefixtures("a_gpu")
class TestFreeMemoryOfAGpu:
    def test_what_others_use_is_not_ours(self) -> None:
        # 100 - 30 of others - 20 of ours, less the tenth that stays free.
        assert free_gpu_bytes(GPU, 0.9, 0) == pytest.approx(40 * GIB, abs=1)

    def test_the_largest_step_has_its_share(self) -> None:
        assert free_gpu_bytes(GPU, 0.9, 3 * GIB) == pytest.approx(37 * GIB, abs=1)

    def test_a_share_that_others_have_used_up_leaves_none(self, model: ModelConfig) -> None:
        free_bytes = free_gpu_bytes(GPU, 0.4, 0)
        assert free_bytes < 0
        with pytest.raises(NotEnoughMemory, match=r"0\.0 MiB are free"):
            choose_num_blocks(EngineConfig(), model, torch.bfloat16, free_bytes, GPU)


class TestAllocating:
    def test_more_than_is_free_is_refused_before_anything_is_taken(
        self, model: ModelConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A CPU would hand it out and end the process once it is used."""
        monkeypatch.setattr(memory, "free_cpu_bytes", lambda: GIB)
        with pytest.raises(
            NotEnoughMemory, match=r"takes 1\.9 GiB, and 1\.0 GiB are free: 131,072 blocks would"
        ):
            allocate_caches(model, 250_000, 16, torch.float32, CPU)

    @pytest.mark.usefixtures("a_gpu")
    def test_a_device_that_refuses_all_the_same(
        self, model: ModelConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object, **__: object) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory.")

        monkeypatch.setattr(torch, "empty", refuse)
        with pytest.raises(NotEnoughMemory, match="blocks would fit"):
            allocate_caches(model, 8, 16, torch.float32, GPU)

    def test_another_error_is_none_of_memory(
        self, model: ModelConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object, **__: object) -> torch.Tensor:
            raise RuntimeError("driver lost")

        monkeypatch.setattr(torch, "empty", fail)
        with pytest.raises(RuntimeError, match="driver lost"):
            allocate_caches(model, 8, 16, torch.float32, CPU)


class TestLongestSequence:
    def test_what_both_model_and_cache_allow(self, model: ModelConfig) -> None:
        assert choose_max_model_len(EngineConfig(), model, 10) == 160
        assert choose_max_model_len(EngineConfig(), model, 1000) == 2048
        assert choose_max_model_len(EngineConfig(max_model_len=100), model, 10) == 100

    def test_a_wish_over_the_cache_is_told_what_fits(self, model: ModelConfig) -> None:
        with pytest.raises(NotEnoughMemory, match="160 tokens would"):
            choose_max_model_len(EngineConfig(max_model_len=161), model, 10)

    def test_a_wish_over_the_model_is_told_its_limit(self, model: ModelConfig) -> None:
        with pytest.raises(InvalidOption, match="2,048"):
            choose_max_model_len(EngineConfig(max_model_len=2049), model, 10_000)

    def test_a_cache_of_one_token_is_refused(self, model: ModelConfig) -> None:
        """No prompt could ever run in it."""
        with pytest.raises(NotEnoughMemory, match="--kv-blocks"):
            choose_max_model_len(EngineConfig(block_size=1), model, 1)
