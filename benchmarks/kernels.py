"""How fast and how exact the GPU kernels are, beside what the same card copies and multiplies.

    python -m benchmarks.kernels                          # everything, about two minutes
    python -m benchmarks.kernels --only decode,prefill --json results.json

Attention has Qwen3-0.6B's shape: 16 query heads, 8 KV heads, head dim 128; blocks of 16 tokens in random order.
Times are microseconds a call: see `kernel_harness`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernel_harness import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    Case,
    copies_beyond_l2,
    copy_bandwidth,
    exact_attention,
    format_value,
    gemm_rate,
    paged_case,
    read_bandwidth,
    relative_error,
    sdpa,
    stored_kv,
    time_us,
)
from benchmarks.machine import describe_machine
from nanochat.kernels import attention_decode, attention_prefill, gpu, kv_convert, reference, sampling
from nanochat.kernels.triton_utils import device_info, next_power_of_2
from nanochat.kernels.tuning import DecodeConfig, decode_config

SCALE = HEAD_DIM**-0.5
DECODES = ((32, 4095), (64, 8191), (1, 32767), (8, 511), (1, 4095), (8, 4095), (64, 511))
PREFILLS = (
    *((8, 32, 32), (8, 128, 128), (8, 256, 256), (4, 2048, 2048), (1, 8192, 8192)),
    *((1, 512, 16_896), (1, 64, 4064)),
)
SPLITS = [
    (rows, context)
    for rows in (1, 2, 4, 8, 16, 32, 64)
    for context in (127, 511, 2047, 8191, 32_767)
    if rows * context <= 64 * 8191
]
TOKENS = 4096
VOCABULARY = 151_936
INT8_WAYS = {
    "in_place": attention_prefill.prefill_in_place,
    "converted": attention_prefill.prefill_converted,
}
"""How prefill reads an INT8 cache."""

Figures = list[dict[str, Any]]


def decode_cases(rows: int, context: int, *, int8: bool) -> list[Case]:
    num_bytes = 2 * rows * context * KV_HEADS * HEAD_DIM * (1 if int8 else 2)
    return [paged_case(rows, 1, context, int8=int8, decode=True) for _ in range(copies_beyond_l2(num_bytes))]


def prefill_cases(rows: int, queries: int, context: int, *, int8: bool) -> list[Case]:
    kv_bytes = 2 * KV_HEADS * context * (1 if int8 else 2)
    num_bytes = rows * (4 * HEADS * queries + kv_bytes) * HEAD_DIM
    return [
        paged_case(rows, queries, context, int8=int8, decode=False)
        for _ in range(copies_beyond_l2(num_bytes))
    ]


def prefill_calls(cases: Sequence[Case], way: Callable[..., None]) -> list[Callable[[], object]]:
    """In one of `INT8_WAYS`."""
    outs = [torch.empty_like(case.q) for case in cases]
    return [
        lambda case=case, out=out: way(
            case.q, case.cache, case.batch, out, scale=SCALE, window=0, softcap=0.0
        )
        for case, out in zip(cases, outs, strict=True)
    ]


def attention_calls(cases: Sequence[Case]) -> list[Callable[[], object]]:
    return [lambda case=case: gpu.attention(case.q, case.cache, case.batch, scale=SCALE) for case in cases]


def correctness() -> Figures:
    """Relative errors against float64 over what the cache holds, beside PyTorch's attention."""
    figures = []
    shapes = [(rows, 1, context) for rows, context in ((8, 511), (32, 4095), (1, 32_767))]
    shapes += [(8, 256, 256), (2, 2048, 2048), (3, 130, 1000)]
    for int8 in (False, True):
        for rows, queries, context in shapes:
            case = paged_case(rows, queries, context, int8=int8, decode=queries == 1)
            exact = exact_attention(case, *stored_kv(case))
            figure: dict[str, Any] = {"rows": rows, "queries": queries, "context": context, "int8": int8}
            out = gpu.attention(case.q, case.cache, case.batch, scale=SCALE)
            figure["error"] = relative_error(out, exact)
            if int8 and queries > 1:
                for name, way in INT8_WAYS.items():
                    way(case.q, case.cache, case.batch, out, scale=SCALE, window=0, softcap=0.0)
                    figure[f"{name}_error"] = relative_error(out, exact)
            if not int8 and queries in (1, context):
                figure["sdpa_error"] = relative_error(sdpa(case), exact)
            figures.append(figure)
    return figures


def quantisation() -> Figures:
    """Values recovered from an INT8 cache, in quantisation steps, and equality with the definition."""
    case = paged_case(4, 1, 4096, int8=True, decode=True)
    k = torch.randn(4 * 4096, KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    slots = torch.randperm(4 * 4096, device="cuda")
    gpu.store_kv(k, k, case.cache, slots)
    assert case.cache.k_scale is not None
    stored = (case.cache.k.flatten(0, 1)[slots], case.cache.k_scale.flatten(0, 1)[slots])
    expected = reference.quantize(k)
    scale = stored[1].double().unsqueeze(-1)
    steps = ((stored[0].double() * scale - k.double()).abs() / scale).amax()
    equal = all(torch.equal(a, b) for a, b in zip(stored, expected, strict=True))
    return [{"worst_error_in_steps": float(steps), "equal_to_reference": equal}]


def decode(bandwidth: float) -> Figures:
    """Both cache types at each batch and context, and what K and V would take at the bandwidth of a copy."""
    figures = []
    for rows, context in DECODES:
        figure: dict[str, Any] = {"rows": rows, "context": context}
        figure["floor_us"] = 4 * rows * context * KV_HEADS * HEAD_DIM / bandwidth / 1e6
        for name, int8 in (("bf16_us", False), ("int8_us", True)):
            figure[name] = time_us(attention_calls(decode_cases(rows, context, int8=int8)))
            torch.cuda.empty_cache()
        figure["int8_ratio"] = figure["int8_us"] / figure["bf16_us"]
        figures.append(figure)
    return figures


def prefill() -> Figures:
    """Both cache types, and PyTorch's FlashAttention over the same K and V laid out contiguously.

    INT8 as the rule chooses, in place, and converted first, the conversion included and by itself.
    """
    figures = []
    for rows, queries, context in PREFILLS:
        figure: dict[str, Any] = {"rows": rows, "queries": queries, "context": context}
        cases = prefill_cases(rows, queries, context, int8=False)
        figure["bf16_us"] = time_us(attention_calls(cases), replays=8)
        if queries == context:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
                calls = [lambda case=case: sdpa(case) for case in cases]
                figure["sdpa_flash_us"] = time_us(calls, replays=8)
        del cases
        torch.cuda.empty_cache()
        cases = prefill_cases(rows, queries, context, int8=True)
        figure["int8_us"] = time_us(attention_calls(cases), replays=8)
        for name, way in INT8_WAYS.items():
            figure[f"int8_{name}_us"] = time_us(prefill_calls(cases, way), replays=8)
        figure["conversion_us"] = time_us(
            [
                lambda case=case: kv_convert.convert_prefills(case.cache, case.batch, case.q.dtype, 0)
                for case in cases
            ]
        )
        del cases
        torch.cuda.empty_cache()
        pairs = rows * (queries * (2 * context - queries + 1) / 2)
        figure["bf16_tflops"] = 4 * HEADS * HEAD_DIM * pairs / figure["bf16_us"] / 1e6
        figure["int8_ratio"] = figure["int8_us"] / figure["bf16_us"]
        figures.append(figure)
    return figures


def config_alone(capability: int, block_d: int, kv_bytes: int, rows: int, kv_heads: int) -> DecodeConfig:
    """As in use, but none starts early: that is for kernels that come after smaller ones, not after their like."""
    return dataclasses.replace(decode_config(capability, block_d, kv_bytes, rows, kv_heads), early=False)


def splits(runs: int = 5) -> Figures:
    """The share a device computes for each program, against a program for each row and KV head."""
    figures = []
    device = torch.device("cuda")
    info = device_info(device)
    for rows, context in SPLITS:
        config = config_alone(info.capability, next_power_of_2(HEAD_DIM), 2, rows, KV_HEADS)
        whole = dataclasses.replace(config, min_tiles=-(-context // config.block_n))
        cases = decode_cases(rows, context, int8=False)
        outs = [torch.empty_like(case.q) for case in cases]

        def calls(
            config: DecodeConfig,
            programs: int,
            cases: list[Case] = cases,
            outs: list[torch.Tensor] = outs,
        ) -> list[Callable[[], object]]:
            space = attention_decode.allocate_workspace(programs, HEADS // KV_HEADS, HEAD_DIM, device)
            return [
                lambda case=case, out=out: attention_decode.launch_decode(
                    case.q, case.cache, case.batch, out, space, config, scale=SCALE, window=0, softcap=0.0
                )
                for case, out in zip(cases, outs, strict=True)
            ]

        shared = calls(config, info.num_sms * config.programs_per_sm)
        single = calls(whole, rows * KV_HEADS)
        times = [(time_us(shared, replays=5), time_us(single, replays=5)) for _ in range(runs)]
        ratios = [a / b for a, b in times]
        figures.append(
            {
                "rows": rows,
                "context": context,
                "split_us": statistics.median(a for a, _ in times),
                "single_us": statistics.median(b for _, b in times),
                "worst_ratio": max(ratios),
            }
        )
        del shared, single, cases, outs
        torch.cuda.empty_cache()
    return figures


def int8_accuracy() -> Figures:
    """One decode of 8 rows of 511 tokens: INT8 beside BF16, in time and in what comes out."""
    case = paged_case(8, 1, 511, int8=False, decode=True)
    eight = paged_case(8, 1, 511, int8=True, decode=True)
    eight.batch = dataclasses.replace(case.batch, scratch={})
    positions = torch.arange(511, device="cuda")
    for row in range(8):
        slots = case.batch.block_tables[row, positions // 16].long() * 16 + positions % 16
        gpu.store_kv(case.k[row], case.v[row], eight.cache, slots)
    float_out = gpu.attention(case.q, case.cache, case.batch, scale=SCALE).double()
    int8_out = gpu.attention(case.q, eight.cache, eight.batch, scale=SCALE).double()
    cosine = torch.nn.functional.cosine_similarity(float_out.flatten(), int8_out.flatten(), dim=0)
    times = [time_us(attention_calls(decode_cases(8, 511, int8=int8))) for int8 in (False, True)]
    return [
        {
            "cosine": float(cosine),
            "mean_abs_error": float((float_out - int8_out).abs().mean()),
            "max_abs_error": float((float_out - int8_out).abs().amax()),
            "int8_ratio": times[1] / times[0],
        }
    ]


def elementwise(bandwidth: float) -> Figures:
    """The ops bound by memory at 4,096 tokens, and the share of the copy bandwidth each reaches."""

    def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=dtype)

    hidden, intermediate, kv, width = 1024, 3072, KV_HEADS * HEAD_DIM, HEADS * HEAD_DIM
    weight, head_weight = randn(hidden), randn(HEAD_DIM)
    angles, positions = randn(TOKENS, HEAD_DIM, dtype=torch.float32), torch.arange(TOKENS, device="cuda")
    xs = [randn(TOKENS, hidden) for _ in range(16)]
    residuals = [randn(TOKENS, hidden) for _ in range(16)]
    wide_residuals = [randn(TOKENS, hidden, dtype=torch.float32) for _ in range(8)]
    gates = [randn(TOKENS, 2 * intermediate) for _ in range(6)]
    packed = [randn(TOKENS, width + 2 * kv) for _ in range(10)]
    heads = [[part.unflatten(1, (-1, HEAD_DIM)) for part in x.split((width, kv, kv), dim=1)] for x in packed]
    caches = {int8: paged_case(8, 1, 8192, int8=int8, decode=True).cache for int8 in (False, True)}
    slots = [torch.randperm(8 * 8192, device="cuda")[:TOKENS] for _ in packed]

    def store(int8: bool) -> list[Callable[[], object]]:
        return [
            lambda k=k, v=v, at=at: gpu.store_kv(k, v, caches[int8], at)
            for (_, k, v), at in zip(heads, slots, strict=True)
        ]

    def rope(spread: bool) -> list[Callable[[], object]]:
        norms: dict[str, Any] = {"q_norm": head_weight, "k_norm": head_weight}
        return [
            lambda q=q, k=k: gpu.rope(q, k, positions, angles, **norms, spread=spread) for q, k, _ in heads
        ]

    pairs = list(zip(xs, residuals, strict=True))
    wide_pairs = list(zip(xs, wide_residuals, strict=False))
    ops: list[tuple[str, int, list[Callable[[], object]]]] = [
        ("rms_norm", 4 * hidden, [lambda x=x: gpu.rms_norm(x, weight, 1e-6) for x in xs]),
        (
            "rms_norm with residual",
            8 * hidden,
            [lambda x=x, r=r: gpu.rms_norm(x, weight, 1e-6, r) for x, r in pairs],
        ),
        (
            "rms_norm with float32 residual",
            12 * hidden,
            [lambda x=x, r=r: gpu.rms_norm(x, weight, 1e-6, r) for x, r in wide_pairs],
        ),
        ("rope with norms", 4 * (width + kv), rope(False)),
        ("rope with norms, spread", 4 * (width + kv), rope(True)),
        ("silu_mul", 6 * intermediate, [lambda x=x: gpu.silu_mul(x) for x in gates]),
        ("store_kv", 8 * kv, store(False)),
        ("store_kv int8", 6 * kv + 4 * KV_HEADS, store(True)),
    ]
    figures = []
    for name, token_bytes, calls in ops:
        us = time_us(calls)
        rate = TOKENS * token_bytes / us / 1e6
        figures.append({"op": name, "us": us, "tb_per_s": rate, "share_of_copy": rate / bandwidth})
    return figures


def rotations() -> Figures:
    """Norms, rotation and store of a small step, for a full cache and an INT8 one. Warm, as after q, k and v."""
    figures = []
    norms: dict[str, Any] = {
        name: torch.randn(HEAD_DIM, device="cuda", dtype=torch.bfloat16) for name in ("q_norm", "k_norm")
    }
    angles = torch.randn(128, HEAD_DIM, device="cuda")
    caches = {int8: paged_case(8, 1, 8192, int8=int8, decode=True).cache for int8 in (False, True)}
    for rows in (1, 8, 32, 128):
        shape = (rows, HEADS + 2 * KV_HEADS, HEAD_DIM)
        packed = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(16)]
        heads = [x.split((HEADS, KV_HEADS, KV_HEADS), dim=1) for x in packed]
        slots = [torch.randperm(8 * 8192, device="cuda")[:rows] for _ in packed]
        positions = torch.arange(rows, device="cuda")
        for int8, cache in caches.items():
            calls = [
                lambda q=q, k=k, v=v, at=at, cache=cache, positions=positions: gpu.rope_store(
                    q, k, v, positions, angles, cache, at, **norms
                )
                for (q, k, v), at in zip(heads, slots, strict=True)
            ]
            figures.append({"rows": rows, "int8": int8, "us": time_us(calls)})
    return figures


def samplers() -> Figures:
    """Sampling from Qwen3's vocabulary, for one row and for 32. Warm, as after `lm_head`."""
    figures = []
    kinds = {
        "greedy": (0.0, 0, 1.0, 0.0),
        "temperature": (0.7, 0, 1.0, 0.0),
        "top-k 50": (0.7, 50, 1.0, 0.0),
        "top-p 0.9": (0.7, 0, 0.9, 0.0),
        "top-k 50, top-p 0.9": (0.7, 50, 0.9, 0.0),
        "min-p 0.05": (0.7, 0, 1.0, 0.05),
        "top-p 0.95, flat": (3.0, 0, 0.95, 0.0),
    }
    for rows in (1, 32):
        logits = [torch.randn(rows, VOCABULARY, device="cuda") * 3 for _ in range(4)]
        numbers = torch.arange(rows, device="cuda")
        for name, (temperature, top_k, top_p, min_p) in kinds.items():
            columns = [torch.full((rows,), value, device="cuda") for value in (temperature, top_p, min_p)]
            arguments = (columns[0], torch.full_like(numbers, top_k, dtype=torch.int32), *columns[1:])
            arguments += (numbers, numbers)
            calls = [lambda x=x, a=arguments: sampling.sample_tokens(x, *a) for x in logits]
            figures.append({"rows": rows, "kind": name, "us": time_us(calls, replays=5)})
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", help="sections, separated by commas")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    torch.manual_seed(0)
    attention_decode.decode_config = config_alone  # type: ignore[attr-defined]
    bandwidth = copy_bandwidth()
    sections: dict[str, Callable[[], Figures]] = {
        "correctness": correctness,
        "quantisation": quantisation,
        "decode": lambda: decode(bandwidth),
        "prefill": prefill,
        "int8_accuracy": int8_accuracy,
        "elementwise": lambda: elementwise(bandwidth),
        "rotations": rotations,
        "sampling": samplers,
        "splits": splits,
    }
    results: dict[str, Any] = {
        **describe_machine("triton"),
        "copy_tb_per_s": bandwidth,
        "read_tb_per_s": read_bandwidth(),
        "gemm_tflops": gemm_rate(),
    }
    print(json.dumps(results))
    for name in options.only.split(",") if options.only else sections:
        results[name] = sections[name]()
        print(f"\n{name}")
        for figure in results[name]:
            print(
                "  " + "  ".join(f"{key} {format_value(value)}" for key, value in figure.items()), flush=True
            )
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
