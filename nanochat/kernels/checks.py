"""Refuses tensors that an op can't take, with a sentence that names the argument.

Reads only what a tensor knows about itself (shape, type, device), never its values, so that it costs next to
nothing on the host and nothing on a device. The general case is one comparison; messages are made on failure.
"""

from __future__ import annotations

import torch

from nanochat.kernels.cache import AttentionBatch, LayerCache
from nanochat.kernels.normed import Normed

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _expect(condition: bool, name: str, expectation: str, tensor: torch.Tensor) -> None:
    if not condition:
        raise ValueError(
            f"{name} must be {expectation}; it is {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        )


def check_dense(**tensors: torch.Tensor | None) -> None:
    """Refuse what a GPU's kernel reads as if neighbours in the last dim were neighbours in memory, and aren't.

    Raises:
        ValueError: names the argument.
    """
    for name, tensor in tensors.items():
        if tensor is not None and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"{name} must be dense in its last dim; its strides are {tensor.stride()}")


def check_rms_norm(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> None:
    _expect(x.dim() == 2 and x.dtype in FLOATS, "x", "[T, hidden] of a float type", x)
    known = weight.dtype in FLOATS and weight.device == x.device
    _expect(
        known and weight.shape == x.shape[1:], "weight", "[hidden] of a float type, on x's device", weight
    )
    if residual is not None:
        known = residual.dtype in (x.dtype, torch.float32) and residual.device == x.device
        _expect(known and residual.shape == x.shape, "residual", "like x, or in float32", residual)


def check_take_rows(table: torch.Tensor, rows: torch.Tensor) -> None:
    _expect(table.dim() == 2 and table.dtype in FLOATS, "table", "[V, n] of a float type", table)
    known = rows.dtype == torch.int64 and rows.device == table.device
    _expect(known and rows.dim() == 1, "rows", "[T] int64, with table", rows)


def check_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
) -> None:
    _expect(q.dim() == 3 and q.dtype in FLOATS, "q", "[T, H, D] of a float type", q)
    tokens, _, dim = q.shape
    paired = k.dim() == 3 and k.shape[0] == tokens and k.shape[2] == dim
    _expect(paired and k.dtype == q.dtype and k.device == q.device, "k", "[T, Hkv, D], like q", k)
    known = positions.dtype == torch.int64 and positions.device == q.device
    _expect(known and positions.shape == (tokens,), "positions", "[T] int64, with q", positions)
    if cos_sin is not None:
        known = cos_sin.dtype == torch.float32 and cos_sin.device == q.device and cos_sin.dim() == 2
        fits = known and cos_sin.shape[1] % 2 == 0 and cos_sin.shape[1] <= dim
        expectation = "[max_pos, rotary_dim] float32, rotary_dim even and at most D, with q"
        _expect(fits, "cos_sin", expectation, cos_sin)
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            same = weight.shape == (dim,) and weight.dtype == q.dtype and weight.device == q.device
            _expect(same, name, "[D], of q's type and device", weight)


def check_linear(x: torch.Tensor | Normed, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    rows = x.values if isinstance(x, Normed) else x
    fits = rows.dim() == 2 and weight.dim() == 2 and rows.shape[1] == weight.shape[1]
    same = rows.dtype == weight.dtype and rows.device == weight.device
    _expect(fits and same, "x", "[T, in] of weight's inner size, type and device", rows)
    if bias is not None:
        known = bias.dtype == weight.dtype and bias.device == weight.device
        _expect(known and bias.shape == weight.shape[:1], "bias", "[out], like weight", bias)


def check_sum_and_norm(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor
) -> None:
    """What `nanochat.kernels.linear_add_norm` takes beyond `check_linear`."""
    rows, out_size = x.shape[0], weight.shape[0]
    known = residual.dtype in (x.dtype, torch.float32) and residual.device == weight.device
    _expect(
        known and residual.shape == (rows, out_size), "residual", "[T, out], like x or in float32", residual
    )
    known = norm_weight.dtype in FLOATS and norm_weight.device == weight.device
    _expect(
        known and norm_weight.shape == (out_size,),
        "norm_weight",
        "[out] of a float type, with x",
        norm_weight,
    )


def check_gate_up(gate_up: torch.Tensor) -> None:
    halves = gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0
    _expect(halves and gate_up.dtype in FLOATS, "gate_up", "[T, 2I] of a float type", gate_up)


def check_store_kv(k: torch.Tensor, v: torch.Tensor, cache: LayerCache, slots: torch.Tensor) -> None:
    fits = k.dim() == 3 and k.shape[1:] == cache.k.shape[2:] and k.device == cache.k.device
    expectation = "[T, Hkv, D] of the cache's sizes, type (a float type if that is int8) and device"
    accepted = k.dtype in FLOATS if cache.k_scale is not None else k.dtype == cache.k.dtype
    _expect(fits and accepted, "k", expectation, k)
    _expect(v.shape == k.shape and v.dtype == k.dtype and v.device == k.device, "v", "like k", v)
    known = slots.dtype == torch.int64 and slots.device == k.device
    _expect(known and slots.shape == k.shape[:1], "slots", "[T] int64, with k", slots)


def check_attention(
    q: torch.Tensor, cache: LayerCache, batch: AttentionBatch, window: int, softcap: float
) -> None:
    _, _, kv_heads, dim = cache.k.shape
    fits = q.dim() == 3 and q.shape[2] == dim and q.shape[1] % kv_heads == 0 and q.device == cache.k.device
    accepted = q.dtype in FLOATS if cache.k_scale is not None else q.dtype == cache.k.dtype
    expectation = (
        "[T, H, D] of the cache's type (a float type if that is int8), D and device, H a multiple of Hkv"
    )
    _expect(fits and accepted, "q", expectation, q)
    if window < 0 or softcap < 0:
        raise ValueError(f"window and softcap must not be negative; they are {window} and {softcap}")
    if "checked" not in batch.scratch:
        _check_batch(batch, q.device)
        batch.scratch["checked"] = True


def _check_batch(batch: AttentionBatch, device: torch.device) -> None:
    rows = batch.num_rows
    for name, tensor, shape in (
        ("block_tables", batch.block_tables, (rows, batch.block_tables.shape[-1])),
        ("context_lens", batch.context_lens, (rows,)),
        ("query_starts", batch.query_starts, (rows + 1,)),
    ):
        known = tensor.dtype == torch.int32 and tensor.device == device
        _expect(known and tensor.shape == shape, name, f"{list(shape)} int32, with q", tensor)
    if not 0 <= batch.num_decodes <= rows:
        raise ValueError(
            f"num_decodes must be from 0 to {rows}, the number of rows; it is {batch.num_decodes}"
        )
