"""Prepares a loaded decoder's linear maps for the CPU's kernels, in the format asked for or the one that costs nothing.

Knows nothing of files or requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nanochat.engine.config import Weights
from nanochat.engine.models.decoder import Decoder
from nanochat.engine.models.layers import MLP, Linear
from nanochat.engine.progress import Progress, ProgressCallback, ignore_progress
from nanochat.kernels import cpu_linear
from nanochat.kernels.cpu_linear import LinearKernel
from nanochat.kernels.native import linear as native_linear

_REPORT_EVERY = 8
"""Linear maps."""


def prepare_weights(
    decoder: Decoder, weights: Weights, progress: ProgressCallback = ignore_progress
) -> Weights:
    """Give each linear map of a decoder on the CPU its kernel; plain weights nobody needs any more are dropped.

    ``auto`` takes 4 bits for weights that have no more, because they were made from such a file; then the
    output matrix, which such files keep in 8 bits, gets 8. Returns the format of most weights.
    """
    linears = list(_linears(decoder))
    compact = 0
    with _one_thread():
        for number, linear in enumerate(linears):
            if number % _REPORT_EVERY == 0:
                progress(Progress("Preparing the weights", number, len(linears)))
            compact += _prepare(linear, weights)
    head: Weights = weights
    if weights == "auto":
        head = "int8" if compact else "auto"
    _prepare(
        decoder.lm_head,
        head,
        shared=decoder.config.tie_word_embeddings,
        for_logits=True,
    )
    if weights != "auto":
        return weights
    if 2 * compact > len(linears):
        return "int4"
    return "bf16" if decoder.dtype == torch.bfloat16 else "fp32"


@contextmanager
def _one_thread() -> Iterator[None]:
    """PyTorch on a single thread.

    Its threads meet after each of the some thousand short operations, and on a busy machine wait there for one
    another: 30 s instead of 1 were seen. Several maps side by side would not, but take 200 MiB more.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _linears(decoder: Decoder) -> Iterator[Linear]:
    """All of the layers' but those of experts, which are no `Linear`."""
    for layer in decoder.layers:
        yield layer.attention.qkv
        yield layer.attention.out
        if isinstance(layer.mlp, MLP):
            yield layer.mlp.gate_up
            yield layer.mlp.down


def _prepare(linear: Linear, weights: Weights, *, shared: bool = False, for_logits: bool = False) -> bool:
    """Returns whether few rows meet it in 4 bits now.

    ``shared``: the plain weight stays in memory anyway. ``for_logits``: often only a row's largest result is wanted.
    """
    weight, bias = linear.weight, linear.bias
    is_native = weights != "fp32" and native_linear.can_take(weight)
    compact: Any = native_linear if is_native else cpu_linear
    many: LinearKernel | None = None
    if not (is_native and native_linear.can_take_many_rows(weight)):
        many = (cpu_linear.plain if shared else cpu_linear.packed)(weight, bias)
    quantized = None
    if weights == "auto":
        quantized = compact.four_bit(weight)
    elif weights == "int4" and weight.shape[1] % cpu_linear.GROUP == 0:
        quantized = compact.quantize_int4(weight)
    kernel: LinearKernel
    if quantized is not None:
        kernel = compact.int4(quantized, bias, many)
    elif weights == "int8" and for_logits and is_native:
        kernel = native_linear.largest(weight, bias, many)
    elif weights == "int8":
        kernel = compact.int8(weight, bias, many)
    elif is_native or many is None:
        kernel = native_linear.plain(weight, bias)
    else:
        kernel = many
    linear.use(kernel, keep_weight=shared)
    return quantized is not None and kernel is not many
