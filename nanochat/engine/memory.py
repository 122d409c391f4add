"""How many KV blocks fit: sizes the cache from free memory and lays it out.

Knows the shape of the cache and the devices' memory; nothing of who uses which block.
"""

from __future__ import annotations

import torch

from nanochat.engine.config import EngineConfig
from nanochat.engine.device import dtype_name, free_cpu_bytes, is_out_of_memory
from nanochat.engine.models.families import ModelConfig
from nanochat.errors import InvalidOption, NotEnoughMemory
from nanochat.kernels.cache import LayerCache

SCALE_DTYPE = torch.float16
CPU_MEMORY_SHARE = 0.25
"""Of the memory that is free, how much the cache may grow to: the rest is the user's other programs."""
CPU_FULL_CONTEXTS = 4
"""On a CPU more than this many chats of full length would decode too slowly to be of use."""

CPU_KEPT_TOKENS = 8192
"""On a CPU, what ended chats may keep the cache grown to: older ones are read again if they go on."""


def kv_bytes_per_token(model: ModelConfig, kv_dtype: torch.dtype) -> int:
    """Bytes of K and V (and of their scales, if INT8) that one token takes in all layers."""
    per_head = model.head_dim * kv_dtype.itemsize
    if kv_dtype == torch.int8:
        per_head += SCALE_DTYPE.itemsize
    return 2 * model.num_layers * model.num_kv_heads * per_head


def allocate_caches(
    model: ModelConfig,
    num_blocks: int,
    block_size: int,
    kv_dtype: torch.dtype,
    device: torch.device,
    num_ranks: int = 1,
) -> list[LayerCache]:
    """One empty cache a layer, of a model or of a rank's part of it; ``num_ranks`` share a CPU's memory.

    Raises:
        NotEnoughMemory: it doesn't fit the device.
    """
    shape = (num_blocks, block_size, model.num_kv_heads, model.head_dim)
    block_bytes = block_size * kv_bytes_per_token(model, kv_dtype)
    on_cpu = device.type == "cpu"
    free_bytes = free_cpu_bytes() // num_ranks if on_cpu else _unallocated_gpu_bytes(device)
    too_large = NotEnoughMemory(
        f"A KV cache of {num_blocks:,} blocks takes {_size(num_blocks * block_bytes)}, and "
        f"{_size(free_bytes)} are free: {free_bytes // block_bytes:,} blocks would fit. Ask for fewer with "
        "--kv-blocks, or use --kv int8."
    )
    # A CPU's memory is handed out on credit: only the bill, much later, would show that it isn't there.
    if num_blocks * block_bytes > free_bytes:
        raise too_large

    def layer() -> LayerCache:
        k = torch.empty(shape, dtype=kv_dtype, device=device)
        v = torch.empty(shape, dtype=kv_dtype, device=device)
        if kv_dtype != torch.int8:
            return LayerCache(k, v)
        scales = [torch.empty(shape[:3], dtype=SCALE_DTYPE, device=device) for _ in range(2)]
        return LayerCache(k, v, *scales)

    try:
        return [layer() for _ in range(model.num_layers)]
    except Exception as error:
        if is_out_of_memory(error):
            raise too_large from error
        raise


def choose_num_blocks(
    config: EngineConfig, model: ModelConfig, kv_dtype: torch.dtype, free_bytes: int, device: torch.device
) -> int:
    """Blocks that fit into ``free_bytes`` of the device, or the number the user asked for.

    Raises:
        NotEnoughMemory: not even one block, or not one context of ``max_model_len``, fits.
    """
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    block_bytes = config.block_size * kv_bytes_per_token(model, kv_dtype)
    budget = free_bytes
    if device.type == "cpu":
        longest = min(config.max_model_len or model.max_position_embeddings, model.max_position_embeddings)
        useful = CPU_FULL_CONTEXTS * -(-longest // config.block_size) * block_bytes
        budget = min(int(free_bytes * CPU_MEMORY_SHARE), useful)
    num_blocks = budget // block_bytes
    if num_blocks < 1:
        raise NotEnoughMemory(
            f"No memory is left for the KV cache: one block of {config.block_size} tokens takes "
            f"{_size(block_bytes)} in {dtype_name(kv_dtype)}, and {_size(max(budget, 0))} are free. "
            "Use a smaller model, --kv int8, or close other programs."
        )
    return int(num_blocks)


def choose_num_kept(config: EngineConfig, device: torch.device) -> int | None:
    """Blocks that are used before contents of ended requests are given up for others; None: all of them.

    A GPU's cache is taken at once, and whoever says how many blocks there shall be wants them used.
    """
    if device.type != "cpu" or config.num_kv_blocks is not None:
        return None
    return -(-CPU_KEPT_TOKENS // config.block_size)


def choose_max_model_len(config: EngineConfig, model: ModelConfig, num_blocks: int) -> int:
    """The longest prompt plus answer: the user's wish, or what both model and cache allow.

    Raises:
        InvalidOption: the user's wish is over the model's limit.
        NotEnoughMemory: it is over the cache's, or the cache holds a single token.
    """
    capacity = num_blocks * config.block_size
    wish = config.max_model_len
    if capacity < 2:
        raise NotEnoughMemory(
            "A KV cache for 1 token has no room for a prompt and an answer; ask for more --kv-blocks."
        )
    if wish is None:
        return min(model.max_position_embeddings, capacity)
    if wish > model.max_position_embeddings:
        raise InvalidOption(
            f"--max-model-len {wish:,} is over this model's limit of "
            f"{model.max_position_embeddings:,} tokens; ask for that or less."
        )
    if wish > capacity:
        raise NotEnoughMemory(
            f"--max-model-len {wish:,} doesn't fit the KV cache of {num_blocks:,} blocks; "
            f"{capacity:,} tokens would. Ask for that or less, for more --kv-blocks, or use --kv int8."
        )
    return wish


def free_gpu_bytes(device: torch.device, utilization: float, step_peak_bytes: int) -> int:
    """What is left for the cache of a share of the card, after everyone's present use and a step's peak.

    ``mem_get_info`` counts other processes' memory as used, so theirs is respected and never taken as ours.
    """
    total = torch.cuda.mem_get_info(device)[1]
    return _unallocated_gpu_bytes(device) - int(total * (1 - utilization)) - step_peak_bytes


def _unallocated_gpu_bytes(device: torch.device) -> int:
    """What no process has taken, and what this one has reserved for tensors yet to come."""
    reserved_but_idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + reserved_but_idle


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
