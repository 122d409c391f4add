"""One function per op of a decoder's forward pass, each run by the fastest version for its tensors' device.

`nanochat.kernels.reference` defines what each computes. Knows nothing of models, requests or schedules.

``T`` packed tokens, ``R`` rows, ``H`` query heads, ``Hkv`` KV heads, ``D`` head dim, ``N`` blocks of ``B``
tokens, ``M`` entries of a block table. All math is float32; results have the argument's type.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from nanochat.kernels import checks, cpu
from nanochat.kernels.cache import AttentionBatch, LayerCache
from nanochat.kernels.native import ops as native_ops
from nanochat.kernels.native.program import current_program
from nanochat.kernels.normed import Normed
from nanochat.kernels.rows import StepRows, StepTokens

__all__ = [
    "AttentionBatch",
    "LayerCache",
    "Normed",
    "StepRows",
    "StepTokens",
    "attention",
    "decode_attention",
    "expand_rows",
    "finished",
    "gelu_tanh_mul",
    "linear",
    "linear_add_norm",
    "most_converted_bytes",
    "most_converted_tokens",
    "prefill_attention",
    "rms_norm",
    "rope",
    "rope_store",
    "silu_linear",
    "silu_mul",
    "store_kv",
    "take_rows",
]


def _backend(tensor: torch.Tensor) -> ModuleType:
    """The module whose functions are fastest where ``tensor`` lies."""
    if tensor.device.type == "cpu":
        return cpu if current_program() is None else native_ops
    from nanochat.kernels import gpu  # it needs Triton, which a machine without a GPU may not have

    return gpu


def expand_rows(
    rows: StepRows, last_ids: torch.Tensor, block_tables: torch.Tensor, block_size: int
) -> StepTokens:
    """What a step's rows stand for, with what the device keeps for each of ``S`` seats.

    ``last_ids [S]`` int64: the token that each seat sampled last. ``block_tables [S, M]`` int32: each seat's
    block table, which gets the entries that it lacked. Rows that aren't padding have distinct seats, and what
    each lacks is everything from ``first_new`` to the end of its context, if anything. Nothing is checked.
    """
    return _backend(last_ids).expand_rows(rows, last_ids, block_tables, block_size)


def take_rows(
    table: torch.Tensor, rows: torch.Tensor, *, scale: float = 1.0, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``table[rows] * scale`` of ``table [V, n]`` and ``rows [T]`` int64, which are not checked: ``[T, n]``.

    The product is rounded to ``table``'s type, and is given in that or in ``dtype``.
    """
    checks.check_take_rows(table, rows)
    return _backend(table).take_rows(table, rows, scale=scale, dtype=dtype)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    *,
    plus_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add ``residual`` if there is one, then divide by the root mean square and multiply by ``weight``.

    ``x [T, hidden]``; ``residual`` like it, or in float32; ``weight [hidden]``, or ``weight + 1`` with
    ``plus_one`` (Gemma). Returns ``(normed, new_residual)``, both ``[T, hidden]``: ``normed`` of
    ``weight``'s type; ``new_residual`` the sum that was normed, in the wider of ``x``'s and
    ``residual``'s types, and ``x`` itself when ``residual`` is None.
    """
    checks.check_rms_norm(x, weight, residual)
    return _backend(x).rms_norm(x, weight, eps, residual, plus_one=plus_one)


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    plus_one: bool = False,
    spread: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm of each head where weights are given, then rotary embedding of the first ``rotary_dim`` dims.

    With ``spread`` q and k are then multiplied by `reference.hadamard_matrix`, which shares out large values of
    few dims among many. That matrix is orthogonal, so q·k stays what it is.

    ``q [T, H, D]``, ``k [T, Hkv, D]``, ``positions [T]`` int64, ``cos_sin [max_pos, rotary_dim]`` float32
    (cosines, then sines), ``q_norm``, ``k_norm`` ``[D]``. Pairs are ``(i, i + rotary_dim / 2)``, as in
    GPT-NeoX. None as ``cos_sin`` turns nothing. Returns new ``(q, k)`` of the same shapes and types.
    Sources: arXiv:2104.09864; for spreading arXiv:2404.00456.
    """
    checks.check_rope(q, k, positions, cos_sin, q_norm, k_norm)
    return _backend(q).rope(
        q, k, positions, cos_sin, q_norm=q_norm, k_norm=k_norm, eps=eps, plus_one=plus_one, spread=spread
    )


def linear(
    x: torch.Tensor | Normed,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    scratch: dict[Any, Any] | None = None,
) -> torch.Tensor:
    """``x @ weight.T + bias`` of ``x [T, in]``, ``weight [out, in]``, ``bias [out]``: ``[T, out]``.

    The result has ``weight``'s type, or ``dtype``. A dict as ``scratch``, the same for a whole step, keeps what its
    linear maps on a GPU share.
    """
    checks.check_linear(x, weight, bias)
    return _backend(weight).linear(x, weight, bias, dtype=dtype, **_shared(weight, scratch))


def silu_linear(
    x: torch.Tensor | Normed,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scratch: dict[Any, Any] | None = None,
) -> torch.Tensor:
    """`silu_mul` of `linear`, of ``x [T, in]`` and ``weight [2I, in]`` (gate first): ``[T, I]``.

    ``scratch`` as there.
    """
    checks.check_linear(x, weight, bias)
    return _backend(weight).silu_linear(x, weight, bias, **_shared(weight, scratch))


def linear_add_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    *,
    plus_one: bool = False,
    scratch: dict[Any, Any] | None = None,
) -> tuple[Normed, torch.Tensor]:
    """`rms_norm` of `linear` plus ``residual``: the normed rows, and the sum, both of ``[T, out]``.

    ``residual [T, out]`` is of ``x``'s type or float32, and so is the sum. ``norm_weight [out]``, or
    ``norm_weight + 1`` with ``plus_one``; the normed rows have its type. ``scratch`` as for `linear`.
    """
    checks.check_linear(x, weight, bias)
    checks.check_sum_and_norm(x, weight, residual, norm_weight)
    shared = _shared(weight, scratch)
    return _backend(weight).linear_add_norm(
        x, weight, bias, residual, norm_weight, eps, plus_one=plus_one, **shared
    )


def finished(x: Normed) -> torch.Tensor:
    """The rows ``[T, hidden]`` of ``x``, divided by their norm if that was still to come."""
    return x.finished() if x.values.device.type == "cpu" else _backend(x.values).divide_norm(x)


def _shared(weight: torch.Tensor, scratch: dict[Any, Any] | None) -> dict[str, Any]:
    """What a linear map's version for ``weight``'s device takes besides: those for CPUs share nothing."""
    return {} if weight.device.type == "cpu" else {"scratch": scratch}


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``gate_up [T, 2I]`` (gate first); returns ``[T, I]``."""
    checks.check_gate_up(gate_up)
    return _backend(gate_up).silu_mul(gate_up)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``gelu(gate) * up``, in GELU's tanh approximation, of ``gate_up [T, 2I]`` (gate first): ``[T, I]``."""
    checks.check_gate_up(gate_up)
    return _backend(gate_up).gelu_tanh_mul(gate_up)


def store_kv(k: torch.Tensor, v: torch.Tensor, cache: LayerCache, slots: torch.Tensor) -> None:
    """Write ``k``, ``v`` ``[T, Hkv, D]`` to their ``slots [T]`` int64; a negative slot is skipped.

    Slots that are not negative are distinct. An INT8 cache gets, per token and KV head, a float16 scale
    ``max|x| / 127`` (at most 65504) and ``x / scale``, by the scale as stored, rounded half away from zero
    and clamped to ±127. A zero vector stays zero, as does one so small that its scale rounds to 0. NaN is
    stored as 0, an infinity as ±127.
    """
    checks.check_store_kv(k, v, cache, slots)
    _backend(k).store_kv(k, v, cache, slots)


def rope_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    cache: LayerCache,
    slots: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    plus_one: bool = False,
    scratch: dict[Any, Any] | None = None,
) -> torch.Tensor:
    """`rope`, then `store_kv` of the rotated k: returns the new q.

    With an INT8 cache q and k are spread: a head's one scale then no longer has to fit a few large dims, whose
    rounding the others would share. The q returned belongs to keys that were stored in this way, and no others.

    A dict as ``scratch``, the same for all layers of a step, keeps what they share.
    """
    checks.check_rope(q, k, positions, cos_sin, q_norm, k_norm)
    checks.check_store_kv(k, v, cache, slots)
    if cos_sin is None and q_norm is None and k_norm is None and cache.k_scale is None:
        _backend(k).store_kv(k, v, cache, slots)
        return q
    norms: dict[str, Any] = {"q_norm": q_norm, "k_norm": k_norm, "eps": eps, "plus_one": plus_one}
    if q.device.type == "cpu":
        norms["scratch"] = scratch
    return _backend(q).rope_store(q, k, v, positions, cos_sin, cache, slots, **norms)


def attention(
    q: torch.Tensor,
    cache: LayerCache,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Causal attention of each row's query tokens to its cached context: ``q [T, H, D]`` to ``[T, H, D]``.

    This step's own K/V is already in the cache. Query ``i`` of a row with ``n`` queries and context length
    ``L`` sits at position ``p = L - n + i`` and sees positions ``<= p``; with a ``window`` above 0, only
    ``p - window + 1 .. p``. Scores are ``q·k * scale``; with a ``softcap`` above 0 they become
    ``softcap * tanh(score / softcap)``. A row of context length 0 (padding), and a token of no row, give
    zeros. Only slots of the rows' contexts are read.
    """
    checks.check_attention(q, cache, batch, window, softcap)
    return _backend(q).attention(q, cache, batch, scale=scale, window=window, softcap=softcap)


def decode_attention(
    q: torch.Tensor,
    cache: LayerCache,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """`attention` of the batch's decode rows alone: ``q [T, H, D]`` to ``[num_decodes, H, D]``."""
    checks.check_attention(q, cache, batch, window, softcap)
    return _backend(q).decode_attention(q, cache, batch, scale=scale, window=window, softcap=softcap)


def prefill_attention(
    q: torch.Tensor,
    cache: LayerCache,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """`attention` of the tokens after the decodes alone: ``q [T, H, D]`` to ``[T - num_decodes, H, D]``."""
    checks.check_attention(q, cache, batch, window, softcap)
    return _backend(q).prefill_attention(q, cache, batch, scale=scale, window=window, softcap=softcap)


def most_converted_tokens(cache: LayerCache, dtype: torch.dtype) -> int:
    """Up to how much context of a step's prefill rows, added up, `attention` copies an INT8 cache to ``dtype``.

    It does so once a layer, on GPUs where that is faster, for queries of that type; 0 where it never does.
    """
    return 0 if cache.k.device.type == "cpu" else _backend(cache.k).most_converted_tokens(cache, dtype)


def most_converted_bytes(cache: LayerCache, dtype: torch.dtype, rows: int) -> int:
    """What that copy takes at most, in a step of so many rows that prefill."""
    return 0 if cache.k.device.type == "cpu" else _backend(cache.k).most_converted_bytes(cache, dtype, rows)
