"""Tile sizes by GPU generation and shape: a small table, measured where hardware was at hand, safe elsewhere.

Nothing is tuned at run time. The limits the table keeps to are shared memory a program: 64 KB on compute
capability 7.5, 99 KB on 8.6, 8.9 and 12.0, 163 KB on 8.0, 227 KB from 9.0 to 11.0. Knows nothing of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How the decode kernel is cut."""

    block_n: int
    """Keys a tile."""
    num_warps: int
    num_stages: int
    programs_per_sm: int
    """Programs of the static grid; each takes an equal share of all tiles."""
    min_tiles: int
    """Fewest tiles worth a program of its own."""
    merge: int
    """Partial results read at once when a row's splits are merged."""
    early: bool = False
    """Whether programs may start before the kernel before them ends, which pays where most of the time is latency."""


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """How the prefill kernel is cut."""

    block_m: int
    """Query rows a tile: tokens times the query heads that share a KV head."""
    block_n: int
    """Keys a tile."""
    num_warps: int
    num_stages: int


def padded_rows(rows: int) -> int:
    """Rows of the recorded step that a step of so many decodes is padded to, where more than those may run at once.

    Powers of two up to 8, then multiples of 8, and from 128 on of more, so that padding stays within an eighth.
    """
    if rows <= 8:
        return 1 << max(rows - 1, 0).bit_length()
    multiple = max(8, 1 << ((rows - 1).bit_length() - 4))
    return -(-rows // multiple) * multiple


def _has_large_sms(capability: int) -> bool:
    """Data centres' cards from Hopper on: 227 KB of shared memory a program. 12.0 and 12.1 are others, with 99 KB."""
    return 90 <= capability < 120


def decode_config(capability: int, block_d: int, kv_bytes: int, rows: int, kv_heads: int) -> DecodeConfig:
    """For ``rows`` whose heads of ``block_d`` dims, a power of two, are cached in ``kv_bytes`` each.

    A step padded for a recording is cut as if it were not.
    """
    runs = padded_rows(rows) * kv_heads
    row_bytes = block_d * kv_bytes
    if capability < 80:
        warps = 8 if block_d > 128 else 4
        return DecodeConfig(16 if block_d > 128 or row_bytes > 256 else 32, warps, 1, 4, 4, 16)
    if _has_large_sms(capability):
        # As many programs as a multiprocessor has registers for: where more fit than the grid has, they are placed
        # unevenly, which cost a tenth. A half-sized head takes two thirds of the registers.
        small = block_d == 64 and kv_bytes <= 2
        places = 6 if small else 4
        if kv_bytes == 1 and block_d <= 128:
            if runs >= 256:
                # Converting costs instructions, and one-warp programs spend none on meeting each other.
                return DecodeConfig(32, 1, 3, 8, 4, 16, early=True)
            if runs >= 32:
                return DecodeConfig(64, 2, 3, places, 1, 64 if runs >= 128 else 32, early=True)
            # So few that more and smaller programs wait for less each.
            return DecodeConfig(32, 2, 3, places, 1, 64, early=True)
        if row_bytes <= 256:
            if 128 <= runs <= 256 and not small:
                # About a run a program: nothing is split, nor merged.
                return DecodeConfig(64, 4, 3, 2, 2, 64, early=True)
            # Of 128 dims, a merge of 64 takes registers for just four programs.
            return DecodeConfig(32, 2, 3, places, 1, 64, early=True)
        return DecodeConfig(32, 4, 3, 2, 2, 64, early=True)
    block_n = 64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16
    return DecodeConfig(block_n, 4, 2, 2, 2, 32)


def prefill_config(capability: int, block_d: int, q_bytes: int, kv_bytes: int, context: int) -> PrefillConfig:
    """``q_bytes``, ``kv_bytes``: of one query and one cached element; ``context``: the longest row's."""
    if q_bytes == 4 or capability < 80:
        return PrefillConfig(32, 16 if block_d > 128 else 32, 8, 1)  # products without tensor cores
    if _has_large_sms(capability):
        short = context <= 4096
        if block_d > 128:
            block_n = 64 if kv_bytes > 1 else 32
            return PrefillConfig(64, block_n, 4, 2) if short else PrefillConfig(128, block_n, 8, 2)
        if short:
            return PrefillConfig(64, 32 if context <= 64 else 64, 4, 3)
        return PrefillConfig(128, 128, 8, 3) if kv_bytes > 1 else PrefillConfig(128, 64, 8, 2)
    if block_d > 128:
        return PrefillConfig(64, 32, 4, 2)
    return PrefillConfig(64, 64, 4, 2) if context <= 512 else PrefillConfig(128, 32, 4, 2)


def prefill_int8_config(context: int) -> PrefillConfig:
    """For `attention_prefill_hopper`: two small programs a multiprocessor, or one large."""
    return PrefillConfig(64, 64, 4, 2) if context <= 256 else PrefillConfig(128, 128, 8, 2)


MAX_KEY_TILE = 128
"""All key tiles of `prefill_config` divide this."""
CONVERTED_BYTES = 256 << 20
"""Most memory for the converted K and V of a step's prefill rows."""


def converted_tokens(capability: int, token_bytes: int) -> int:
    """Of how much context of INT8 prefill rows there is a 16-bit copy in each layer, of ``token_bytes`` a token."""
    return CONVERTED_BYTES // token_bytes if capability == 90 else 0


def converts_prefill(capability: int, queries: int, context: int) -> bool:
    """Whether that copy takes less time than it saves, for the tokens of all rows; ``context``: the longest row's.

    In recorded steps both are upper bounds: ``context`` is then at least 4,096, or what a request can have.
    """
    if capability != 90:
        return False
    return queries >= (256 if context > 4096 else 1024) and context > 256


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """How a linear map of few rows is cut."""

    split: int
    """Warps of a program, each with a part of the inner dimension."""
    step: int
    """Of the inner dimension, what a warp multiplies at once."""
    repeat: int
    """Sixteens of outputs a program."""
    row_tile: int
    """Rows multiplied at once: 8, 16 or 32."""
    joins_norm: bool = True
    """Whether the residual's addition and the norm are faster as part of it than as a kernel of their own."""


def linear_config(capability: int, rows: int, in_size: int, out_size: int, parts: int) -> LinearConfig | None:
    """For ``rows`` times ``[parts * out_size, in_size]`` in 16 bits; None where cuBLAS is faster or must do.

    It changes only after 8, 16 and 32 rows, so that a step padded to one of those multiplies as if it were not.
    """
    if capability < 80 or rows == 0 or out_size % 16:
        return None
    if rows > 32 or (rows > 16 and 2 * out_size > in_size) or (rows > 8 and out_size > 32_768):
        return None
    row_tile = 8 if rows <= 8 else 16 if rows <= 16 else 32
    for split in (2, 4, 8):
        if in_size * parts <= 512 * split:  # 128 registers a thread
            for step in (64, 32):
                if in_size % (split * step) == 0:
                    return LinearConfig(split, step, 1, row_tile, joins_norm=rows <= 16)
    return None


SPLIT_TILE = 64
"""Outputs of a program of `SplitConfig`: the fewest that a warpgroup multiplies."""
MAX_SHARED_TILES = 64
"""Most tiles of outputs that programs share in one launch."""
_FEWEST_SPLIT_PROGRAMS = 24
_SPLIT_INNER = 1024
"""Of the inner dimension, what a program's weights and rows have room for in shared memory."""


@dataclass(frozen=True, slots=True)
class SplitConfig:
    """How a linear map of more rows than `LinearConfig`'s is cut on Hopper."""

    splits: int
    """Programs that share a tile of outputs, each with a part of the inner dimension."""
    step: int
    """Of the inner dimension, what is copied at once: 64 or 128."""
    row_tile: int
    """Rows multiplied at once: 8, 16, 32 or 64, and no fewer than there are."""
    ring: int
    """Steps of rows in shared memory, all or at least four; of weights all are."""


def split_config(
    capability: int, num_sms: int, rows: int, in_size: int, out_size: int, parts: int
) -> SplitConfig | None:
    """As `linear_config`, which has the say where this is None.

    A program may fill a multiprocessor's shared memory, so there may be no more of them than multiprocessors, and half
    as many where they add up each other's sums. With few, the weights would come too slowly.
    """
    if capability != 90 or not 8 < rows <= 64 or in_size % 64 or parts * out_size % SPLIT_TILE:
        return None
    step = 64 if in_size % 128 else 128
    steps = in_size // step
    tiles = parts * out_size // SPLIT_TILE
    for splits in range(1, 5):
        if steps % splits == 0 and in_size <= splits * _SPLIT_INNER:
            most = num_sms if splits == 1 else min(num_sms // 2, MAX_SHARED_TILES * splits)
            if not _FEWEST_SPLIT_PROGRAMS <= tiles * splits <= most:
                return None
            row_tile = 16 if rows <= 16 else 32 if rows <= 32 else 64
            own_steps = steps // splits
            return SplitConfig(
                splits, step, row_tile, min(own_steps, 512 // step) if rows > 32 else own_steps
            )
    return None
