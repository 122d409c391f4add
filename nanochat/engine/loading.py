"""From a configuration to a model in memory with its caches: the slow part of starting an engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanochat import kernels
from nanochat.engine.block_pool import BlockPool
from nanochat.engine.config import EngineConfig, Weights
from nanochat.engine.device import (
    choose_device,
    choose_dtype,
    free_cpu_bytes,
    give_back_freed_memory,
    is_out_of_memory,
)
from nanochat.engine.memory import (
    allocate_caches,
    choose_max_model_len,
    choose_num_blocks,
    choose_num_kept,
    free_gpu_bytes,
)
from nanochat.engine.models.cpu_weights import prepare_weights
from nanochat.engine.models.decoder import Decoder
from nanochat.engine.models.families import ModelConfig, load_model_config
from nanochat.engine.models.resolve import resolve_model
from nanochat.engine.models.shard import Shard
from nanochat.engine.models.weights import load_decoder
from nanochat.engine.parallel import ALONE, Alone, Group
from nanochat.engine.progress import Progress, ProgressCallback, ignore_progress
from nanochat.engine.ranks import RankMemory, Ranks
from nanochat.engine.runner import Runner
from nanochat.engine.scheduler import Scheduler
from nanochat.engine.step_graphs import MAX_PREFILL_TOKENS, StepGraphs, state_bytes
from nanochat.engine.step_pace import FIRST_TOKENS, StepPace
from nanochat.engine.step_programs import record_steps
from nanochat.engine.tokenizer import default_sampling, eos_token_ids, load_tokenizer
from nanochat.errors import InvalidOption, NotEnoughMemory
from nanochat.kernels.cache import LayerCache
from nanochat.kernels.native.library import find as find_native

RECORDING_STAGE = "Preparing the GPU"
"""The last stage of loading, where there is one."""
GRAPH_BYTES = 128 * 2**20
"""What recordings take beside the memory that their steps compute in."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Everything an engine needs of its model."""

    name: str
    folder: Path
    config: ModelConfig
    tokenizer: Any
    eos_token_ids: frozenset[int]
    default_sampling: dict[str, float | int]
    runner: Runner
    device: torch.device
    dtype: torch.dtype
    weights: Weights
    """Format of most linear maps' weights."""
    kv_dtype: torch.dtype
    num_kv_blocks: int
    max_model_len: int
    ranks: Ranks | None
    """The other ranks, if the model is divided; to be closed."""
    memory: list[RankMemory]
    """What each rank holds, the first one first."""

    @property
    def compute_name(self) -> str:
        """The device; on a CPU with the weights' format, and whether steps run as native programs."""
        if self.device.type != "cpu":
            return self.device.type
        return f"cpu {self.weights}{' native' if self.runner.is_native else ''}"


@dataclass(frozen=True, slots=True)
class LoadedPart:
    """What one rank has of a model, ready to run."""

    runner: Runner
    weights: Weights
    kv_dtype: torch.dtype
    num_kv_blocks: int
    max_model_len: int
    memory: RankMemory


def load_model(config: EngineConfig, progress: ProgressCallback) -> LoadedModel:
    """Find, read and prepare a model.

    Raises:
        NanochatError: a subclass whose message says what to do.
    """
    try:
        return _load(config, progress)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise NotEnoughMemory(
            "The model doesn't fit this machine's memory with all it needs to compute. Close other programs, "
            "choose a smaller model, or start with fewer --kv-blocks or --max-batched-tokens."
        ) from error


def _load(config: EngineConfig, progress: ProgressCallback) -> LoadedModel:
    device = choose_device(config)
    choose_dtype(config, device)  # a wrong option should not cost a download
    resolved = resolve_model(config.model, progress)
    model = load_model_config(resolved.path)
    tokenizer = load_tokenizer(resolved.path)
    # A file that is wrong should not cost the time of loading, nor leave other ranks behind.
    eos_ids, recommended = eos_token_ids(resolved.path, tokenizer), default_sampling(resolved.path)
    ranks = _start_ranks(config, resolved.path, model, device)
    try:
        if ranks is None:
            part = load_part(config, resolved.path, model, device, ALONE, progress=progress)
            memory = [part.memory]
        else:
            connect = functools.partial(ranks.connect, progress)
            part = load_part(
                config, resolved.path, model, device, ranks.group, progress=progress, connect=connect
            )
            memory = [part.memory, *ranks.wait_until_ready(progress)]
            part.runner.lead(ranks)
    except BaseException as error:
        if ranks is not None:
            if isinstance(error, RuntimeError) and not is_out_of_memory(error):
                ranks.give_up(error)  # a collective fails where another rank has failed before
            ranks.close()
            ranks.check()
        raise
    return LoadedModel(
        name=resolved.name,
        folder=resolved.path,
        config=model,
        tokenizer=tokenizer,
        eos_token_ids=eos_ids,
        default_sampling=recommended,
        runner=part.runner,
        device=device,
        dtype=part.runner.decoder.dtype,
        weights=part.weights,
        kv_dtype=part.kv_dtype,
        num_kv_blocks=part.num_kv_blocks,
        max_model_len=part.max_model_len,
        ranks=ranks,
        memory=memory,
    )


def _start_ranks(
    config: EngineConfig, folder: Path, model: ModelConfig, device: torch.device
) -> Ranks | None:
    """The other ranks, if the model is to be divided.

    Raises:
        InvalidOption: it can't be.
    """
    size = config.tensor_parallel_size
    if size == 1:
        return None
    Shard(0, size).config(model)
    if device.type == "cuda" and torch.cuda.device_count() < size:
        raise InvalidOption(
            f"--tp {size} needs {size} GPUs, and {torch.cuda.device_count()} can be used here; ask for that or less."
        )
    return Ranks(config, folder, device)


def load_part(
    config: EngineConfig,
    folder: Path,
    model: ModelConfig,
    device: torch.device,
    ranks: Group | Alone,
    *,
    progress: ProgressCallback = ignore_progress,
    connect: Callable[[], object] = lambda: None,
) -> LoadedPart:
    """Load what one of ``ranks`` holds of a model, all of it if it is alone, and make it ready to run.

    ``connect`` is called once the weights are in place and before anything is computed.

    Raises:
        NanochatError: a subclass whose message says what to do.
    """
    dtype = choose_dtype(config, device)
    kv_dtype = torch.int8 if config.kv_dtype == "int8" else dtype
    decoder = load_decoder(folder, model, device, dtype, progress, ranks)
    weight_bytes = decoder.weight_bytes
    weights: Weights = config.weights
    if device.type == "cpu":
        # Whoever asks for float32 wants exact products, not a compact form with rounded factors.
        exact = weights == "auto" and config.dtype == "float32"
        weights = prepare_weights(decoder, "fp32" if exact else weights, progress)
        give_back_freed_memory()
    connect()
    progress(Progress("Preparing the KV cache"))
    with torch.inference_mode():
        local = decoder.local
        # Every rank has the same blocks, so the one with the least memory says how many.
        free_bytes = ranks.least(_free_bytes(config, decoder, kv_dtype))
        num_blocks = choose_num_blocks(config, local, kv_dtype, free_bytes, device)
        max_model_len = choose_max_model_len(config, local, num_blocks)
        caches = allocate_caches(local, num_blocks, config.block_size, kv_dtype, device, ranks.shard.size)
        if device.type == "cuda":
            decoder.reserve_positions(max_model_len)  # later it would have to wait for the device
        graphs = _graphs(config, model, decoder, caches, max_model_len)
        programs = None
        if device.type == "cpu" and weights != "fp32" and ranks.shard.size == 1:
            programs = record_steps(
                decoder, caches, find_native(), max_model_len, config.max_num_batched_tokens
            )
        runner = Runner(decoder, caches, graphs, programs, max_num_seqs=config.max_num_seqs)
        runner.warm_up()
        if graphs is not None:
            graphs.record_common(lambda done, total: progress(Progress(RECORDING_STAGE, done, total)))
    memory = RankMemory(
        weights=weight_bytes,
        cache=sum(cache.num_bytes for cache in caches),
        allocated=torch.cuda.memory_allocated(device) if device.type == "cuda" else 0,
    )
    return LoadedPart(runner, weights, kv_dtype, num_blocks, max_model_len, memory)


def _has_graphs(config: EngineConfig, model: ModelConfig, device: torch.device) -> bool:
    has_moe = any(layer.sparse for layer in model.layers)
    return config.cuda_graphs and device.type == "cuda" and not has_moe


def _graphs(
    config: EngineConfig, model: ModelConfig, decoder: Decoder, caches: list[LayerCache], max_model_len: int
) -> StepGraphs | None:
    """Recorded steps, where there can be any."""
    if not _has_graphs(config, model, decoder.device):
        return None
    return StepGraphs(
        decoder,
        caches,
        max_num_seqs=config.max_num_seqs,
        max_num_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
    )


def _free_bytes(config: EngineConfig, decoder: Decoder, kv_dtype: torch.dtype) -> int:
    """Memory for this rank's cache, once the weights are in place and the largest step has had its share."""
    model = decoder.local
    if decoder.device.type == "cpu":
        return free_cpu_bytes() // decoder.shard.size
    num_tokens = min(config.max_num_batched_tokens, model.max_position_embeddings)
    peak = _step_peak_bytes(config, model, decoder, kv_dtype, num_tokens)
    if _has_graphs(config, model, decoder.device):
        # Recorded steps keep their memory, beside what steps launched kernel by kernel need.
        recorded = min(num_tokens, MAX_PREFILL_TOKENS)
        is_same = recorded == num_tokens
        peak += peak if is_same else _step_peak_bytes(config, model, decoder, kv_dtype, recorded)
        peak += GRAPH_BYTES
        longest = config.max_model_len or model.max_position_embeddings
        peak += state_bytes(config.max_num_seqs, -(-longest // config.block_size), model.vocab_size)
    return free_gpu_bytes(decoder.device, config.gpu_memory_utilization, peak)


def _step_peak_bytes(
    config: EngineConfig, model: ModelConfig, decoder: Decoder, kv_dtype: torch.dtype, num_tokens: int
) -> int:
    """Most memory that a step of so many tokens, and of as many rows as may be, takes beside the weights."""
    num_blocks = -(-num_tokens // config.block_size)
    before = torch.cuda.memory_allocated(decoder.device)
    torch.cuda.reset_peak_memory_stats(decoder.device)
    caches = allocate_caches(model, num_blocks, config.block_size, kv_dtype, decoder.device)
    Runner(decoder, caches, max_num_seqs=config.max_num_seqs).warm_up(num_tokens, config.max_num_seqs)
    peak = torch.cuda.max_memory_allocated(decoder.device) - before
    # Contexts as short as this step's are read in place.
    peak += kernels.most_converted_bytes(caches[0], decoder.dtype, config.max_num_seqs)
    del caches
    torch.cuda.empty_cache()
    return int(peak)


def make_scheduler(config: EngineConfig, model: LoadedModel) -> Scheduler:
    """The scheduler of a loaded model's cache."""
    pool = BlockPool(
        model.num_kv_blocks,
        config.block_size,
        prefix_caching=config.prefix_caching,
        num_kept=choose_num_kept(config, model.device),
    )
    return Scheduler(
        pool,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=model.max_model_len,
        model_limit=model.config.max_position_embeddings,
        pace=StepPace(config.step_goal_ms / 1000, FIRST_TOKENS if model.device.type == "cpu" else None),
    )
