"""A divided decoder gives what the whole one gives, and each rank holds its part and no more."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from nanochat.engine import parallel
from nanochat.engine.memory import allocate_caches, kv_bytes_per_token
from nanochat.engine.models.decoder import Decoder
from nanochat.engine.models.families import load_model_config
from nanochat.engine.models.shard import Shard
from nanochat.engine.models.weights import load_decoder
from nanochat.engine.parallel import ALONE, Alone, Group
from tests.engine.gloo import ThreadedRanks, threaded_ranks
from tests.engine.models.paged import PagedSequences
from tests.engine.models.random_models import CASES, Case, Llama, random_tokens, write_random_model

CPU = torch.device("cpu")
PROMPT = random_tokens(37)
OTHER = random_tokens(9, seed=2)


@pytest.fixture(scope="module", params=[2, 4])
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ThreadedRanks]:
    with threaded_ranks(request.param, tmp_path_factory.mktemp("meeting")) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each family's model, written once for all numbers of ranks."""
    root = tmp_path_factory.mktemp("models")
    for name, case in CASES.items():
        write_random_model(root / name, case)
    return {name: root / name for name in CASES}


def run_steps(decoder: Decoder) -> list[torch.Tensor]:
    """Logits of chunked prefill, of a mixed step, and of decodes over a shared prefix."""
    sequences = PagedSequences(decoder)
    logits = [sequences.prefill(0, PROMPT, chunk=16)]
    logits += sequences.step({0: 5}, {1: OTHER}).values()
    sequences.share_prefix(0, 2, 4)
    logits += sequences.step({0: 6, 1: 7}, {2: OTHER}).values()
    return logits


def assert_same_logits(folder: Path, ranks: ThreadedRanks) -> None:
    config = load_model_config(folder)
    whole = load_decoder(folder, config, CPU, torch.float32)

    def run(group: Group) -> list[torch.Tensor]:
        return run_steps(load_decoder(folder, config, CPU, torch.float32, ranks=group))

    expected = run_steps(whole)
    first, *others = ranks.run(run)
    for mine, theirs in zip(first, expected, strict=True):
        assert (mine - theirs).abs().max() <= 1e-4 * theirs.abs().max()
        assert torch.equal(mine.argmax(-1), theirs.argmax(-1))
    assert all(
        part.shape == (len(whole_part), 0)
        for rank in others
        for part, whole_part in zip(rank, expected, strict=True)
    )


@pytest.mark.parametrize("name", CASES)
def test_every_family_gives_the_logits_of_one_rank(
    name: str, models: dict[str, Path], ranks: ThreadedRanks
) -> None:
    assert_same_logits(models[name], ranks)


@pytest.mark.parametrize("name", ["llama-biases", "gemma3", "qwen3"])
def test_bf16_is_as_near_to_float32_as_on_one_rank(
    name: str, models: dict[str, Path], ranks: ThreadedRanks
) -> None:
    config = load_model_config(models[name])

    def prefill(group: Group | Alone, dtype: torch.dtype) -> torch.Tensor:
        decoder = load_decoder(models[name], config, CPU, dtype, ranks=group)
        return PagedSequences(decoder).prefill(0, PROMPT, chunk=20)

    exact = prefill(ALONE, torch.float32)
    whole = prefill(ALONE, torch.bfloat16)
    divided = ranks.run(lambda group: prefill(group, torch.bfloat16))[0]
    assert 0 < (divided - exact).norm() < 1.5 * (whole - exact).norm()


@pytest.mark.parametrize(("heads", "kv_heads"), [(12, 3), (12, 2), (20, 5), (4, 4)])
def test_heads_that_do_not_line_up_with_the_ranks(
    heads: int, kv_heads: int, tmp_path: Path, ranks: ThreadedRanks
) -> None:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    sizes |= {"hidden_size": 120, "intermediate_size": 101}
    write_random_model(tmp_path, Case(Llama, sizes | {"attention_bias": True, "mlp_bias": True}))
    assert_same_logits(tmp_path, ranks)


def test_experts_in_one_tensor(models: dict[str, Path], tmp_path: Path, ranks: ThreadedRanks) -> None:
    source, folder = models["qwen3-moe"], tmp_path / "stacked"
    folder.mkdir()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    with safe_open(source / "model.safetensors", framework="pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for layer in range(4):
        name = f"model.layers.{layer}.mlp.experts"
        if f"{name}.0.gate_proj.weight" not in weights:
            continue
        parts = {
            part: torch.stack([weights.pop(f"{name}.{e}.{part}_proj.weight") for e in range(6)])
            for part in ("gate", "up", "down")
        }
        weights[f"{name}.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], dim=1)
        weights[f"{name}.down_proj"] = parts["down"]
    save_file(weights, folder / "model.safetensors")
    assert_same_logits(folder, ranks)


class TestGroup:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
    def test_sums_gathers_and_broadcasts(self, ranks: ThreadedRanks, dtype: torch.dtype) -> None:
        size = len(ranks.groups)

        def work(group: Group) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
            own = torch.full((3, 2), group.shard.rank + 1, dtype=dtype)
            return group.all_reduce(own.clone()), group.gather(own), group.broadcast(own.clone())

        for rank, (total, parts, first) in enumerate(ranks.run(work)):
            assert torch.equal(total, torch.full((3, 2), size * (size + 1) // 2, dtype=dtype))
            assert [int(part[0, 0]) for part in parts] == ([] if rank else list(range(1, size + 1)))
            assert torch.equal(first, torch.ones(3, 2, dtype=dtype))
        assert ranks.run(lambda group: group.least(10 - group.shard.rank)) == [11 - size] * size

    @pytest.mark.parametrize("length", [0, 1, 8183, 8184, 8185, 100_000])
    def test_messages_of_any_length_arrive_whole(self, ranks: ThreadedRanks, length: int) -> None:
        message = bytes(i % 251 for i in range(length))

        def work(group: Group) -> bytes:
            if group.shard.rank:
                return group.receive()
            group.send(message)
            return message

        assert ranks.run(work) == [message] * len(ranks.groups)

    def test_idle_ranks_wait_for_longer_than_it_may_take_to_meet(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(parallel, "CONNECT_TIMEOUT", timedelta(seconds=1))

        def work(group: Group) -> bytes:
            if group.shard.rank:
                return group.receive()
            time.sleep(1.5)
            group.send(b"late")
            return b"late"

        with threaded_ranks(2, tmp_path) as ranks:
            assert ranks.run(work) == [b"late", b"late"]


class TestMemory:
    @pytest.mark.parametrize("name", ["llama", "llama-biases", "qwen3", "qwen3-moe-mixed", "gemma3"])
    def test_of_a_rank_is_its_share_of_the_weights_and_the_rest(
        self, name: str, models: dict[str, Path], ranks: ThreadedRanks
    ) -> None:
        config, size = load_model_config(models[name]), len(ranks.groups)
        decoders = ranks.run(lambda group: Decoder(config, CPU, torch.float32, group))
        whole = Decoder(config, CPU, torch.float32)
        for decoder in decoders:
            divided = replicated = 0
            for mine, all_of_it in zip(tensors(decoder), tensors(whole), strict=True):
                if mine.shape == all_of_it.shape:
                    replicated += mine.nbytes
                    assert mine.dim() == 1 or mine.shape[0] == 6  # norms, biases of sums, routers
                else:
                    divided += mine.nbytes
            assert decoder.weight_bytes == divided + replicated
            # The vocabulary of 199 is filled up, and with four ranks there are only two KV heads.
            assert divided <= 1.35 * (whole.weight_bytes - replicated) / size

    def test_only_a_rank_s_part_of_a_file_is_read(
        self, models: dict[str, Path], ranks: ThreadedRanks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Divided tensors are only ever asked for in slices."""
        from nanochat.engine.models import weights

        config, read, sizes = load_model_config(models["llama"]), weights._read, []

        def spy(tensors: Any, name: str, piece: Any) -> torch.Tensor:
            part = read(tensors, name, piece)
            sizes.append((name, part.numel()))
            return part

        monkeypatch.setattr(weights, "_read", spy)
        decoder = load_decoder(models["llama"], config, CPU, torch.float32, ranks=ranks.groups[0])
        assert sum(size for _, size in sizes) * 4 <= decoder.weight_bytes
        whole = dict(stored_sizes(models["llama"]))
        assert all(size < whole[name] for name, size in sizes if "norm" not in name)

    @pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
    def test_of_the_cache_is_divided_by_kv_head(self, kv_dtype: torch.dtype, models: dict[str, Path]) -> None:
        config = load_model_config(models["qwen3"])
        for size, share in ((2, 2), (4, 2)):  # there are two KV heads to divide
            local = Shard(1, size).config(config)
            assert kv_bytes_per_token(local, kv_dtype) == kv_bytes_per_token(config, kv_dtype) // share
            caches = allocate_caches(local, 8, 4, kv_dtype, CPU)
            assert sum(cache.num_bytes for cache in caches) == 32 * kv_bytes_per_token(local, kv_dtype)


def tensors(decoder: Decoder) -> list[torch.Tensor]:
    """All of a decoder's weights, in an order that depends on its kind alone."""
    found: list[torch.Tensor] = [decoder.embedding, decoder.norm.weight]
    if not decoder.config.tie_word_embeddings:
        found.append(decoder.lm_head.weight)

    def walk(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif type(value).__module__.startswith("nanochat.engine.models.layers"):
            fields = (
                value.__dict__
                if hasattr(value, "__dict__")
                else {slot: getattr(value, slot) for slot in value.__slots__}
            )
            for field in fields.values():
                walk(field)

    for layer in decoder.layers:
        walk(layer)
    return found


def stored_sizes(folder: Path) -> Iterator[tuple[str, int]]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            yield name, file.get_tensor(name).numel()
