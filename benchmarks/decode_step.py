"""One decode step, as the engine's CUDA graph runs it, split into its parts in microseconds.

    python -m benchmarks.decode_step --rows 1,32 --json results.json

The model has the shape of Qwen3-0.6B and random weights, BF16. A step is timed whole, by replays of its graph.
Its parts come from a trace of replays: kernels overlap, so each is given the time from the end of the one that
ended before it to its own end. Tracing slows a step down, so they add up to more than the step; both are printed.
The floor is the bytes that must be read (weights, and K and V of the context, with their scales) over the bandwidth
of a copy on the same card; reading alone can be a little faster (``read_tb_per_s``).
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from benchmarks.kernel_harness import copy_bandwidth, read_bandwidth
from benchmarks.machine import describe_machine
from benchmarks.random_model import SHAPES, model_config
from nanochat.engine.config import SamplingParams
from nanochat.engine.models.decoder import Decoder
from nanochat.engine.models.families import load_model_config
from nanochat.engine.models.layers import Norm
from nanochat.engine.request import Request
from nanochat.engine.step_graphs import StepGraphs
from nanochat.engine.step_plan import ScheduledChunk, StepPlan
from nanochat.kernels.cache import LayerCache

BLOCK_SIZE = 16
REPLAYS = 30


def random_decoder(shape: dict[str, int]) -> Decoder:
    """A decoder of this shape on the GPU; norms are ones, everything else is small and random."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model_config(shape)))
        decoder = Decoder(load_model_config(Path(folder)), torch.device("cuda"), torch.bfloat16)
    for tensor in _tensors(decoder):
        if tensor.dim() == 1:
            tensor.fill_(1.0)
        else:
            tensor.normal_(std=tensor.shape[-1] ** -0.5)
    return decoder


def _tensors(root: object) -> list[torch.Tensor]:
    """Every tensor that hangs on an object of ours."""
    found: dict[int, torch.Tensor] = {}
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            found[id(value)] = value
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, Norm):
            found[id(value.weight)] = value.weight
        elif type(value).__module__.startswith("nanochat.engine.models.layers") or value is root:
            waiting += vars(value).values()
    return list(found.values())


def record(
    decoder: Decoder, rows: int, context: int, params: SamplingParams, *, int8: bool
) -> tuple[torch.cuda.CUDAGraph, int]:
    """A step of ``rows`` rows whose new token is the last of ``context``, and the bytes of K and V it reads."""
    config, per_row = decoder.config, -(-context // BLOCK_SIZE)
    shape = (rows * per_row, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    device = decoder.device
    caches = []
    for _ in decoder.layers:
        if int8:
            values = [torch.randint(-127, 128, shape, dtype=torch.int8, device=device) for _ in range(2)]
            scales = [torch.full(shape[:3], 0.01, dtype=torch.float16, device=device) for _ in range(2)]
            caches.append(LayerCache(*values, *scales))
        else:
            caches.append(LayerCache(*(torch.randn(shape, device=device).bfloat16() for _ in range(2))))
    tables = torch.randperm(rows * per_row).view(rows, per_row).tolist()
    chunks = [
        ScheduledChunk(
            Request(row, list(range(context)), params, block_table=table), context - 1, 1, samples=True
        )
        for row, table in enumerate(tables)
    ]
    plan = StepPlan(0, tuple(chunks), (), ())
    graphs = StepGraphs(
        decoder, caches, max_num_seqs=rows, max_num_tokens=max(rows, 32), max_model_len=context
    )
    fitting = graphs.shapes.fit(plan)
    if fitting is None:
        raise ValueError("a step that only decodes fits no shape")
    graphs.run(fitting, graphs.pack(plan, fitting)[0])
    torch.cuda.synchronize()
    kv_bytes = sum(cache.num_bytes for cache in caches)
    return graphs._recordings[fitting].graph, kv_bytes


def time_us(graph: torch.cuda.CUDAGraph) -> float:
    """Median of several replays, each by itself."""
    times = []
    for _ in range(REPLAYS + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times[3:])


def parts_us(graph: torch.cuda.CUDAGraph) -> dict[str, dict[str, float]]:
    """By kernel: launches in a step, and its share of the step's time, medians over replays."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        for _ in range(5):
            graph.replay()
            torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.end, event.time_range.start, event.name)
        for event in trace.events()
        if event.device_type == DeviceType.CUDA
    )
    steps = len(spans) // 5
    shares: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for step in range(1, 5):
        last = None
        for end, start, name in spans[step * steps : (step + 1) * steps]:
            name = short_name(name)
            shares[name] += end - (start if last is None else max(last, 0.0))
            counts[name] += 1
            last = end
    return {name: {"launches": counts[name] / 4, "us": shares[name] / 4} for name in shares}


def short_name(name: str) -> str:
    name = re.sub(r"^void |<.*|\(.*", "", name)
    return name.split("::")[-1][:48]


def measure(
    decoder: Decoder, rows: int, context: int, params: SamplingParams, bandwidth: float, *, int8: bool
) -> dict[str, Any]:
    with torch.inference_mode():
        graph, kv_bytes = record(decoder, rows, context, params, int8=int8)
        return {
            "rows": rows,
            "context": context,
            "temperature": params.temperature,
            "repetition_penalty": params.repetition_penalty,
            "int8": int8,
            "step_us": time_us(graph),
            "floor_us": (decoder.weight_bytes + kv_bytes) / bandwidth / 1e6,
            "parts": parts_us(graph),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--rows", default="1,32")
    parser.add_argument("--context", type=int, default=384)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    parser.add_argument("--kv", choices=["auto", "int8"], default="auto")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    params = SamplingParams(temperature=options.temperature, repetition_penalty=options.repetition_penalty)
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    decoder = random_decoder(SHAPES[options.shape])
    report: dict[str, Any] = {
        **describe_machine("triton"),
        "copy_tb_per_s": bandwidth,
        "read_tb_per_s": read_bandwidth(),
        "shape": options.shape,
        "steps": [],
    }
    for rows in map(int, options.rows.split(",")):
        step = measure(decoder, rows, options.context, params, bandwidth, int8=options.kv == "int8")
        report["steps"].append(step)
        traced_us = sum(part["us"] for part in step["parts"].values())
        print(
            f"{rows} rows of {options.context}: {step['step_us']:.0f} us, floor {step['floor_us']:.0f}; "
            f"traced, in parts {traced_us:.0f}"
        )
        for name, part in sorted(step["parts"].items(), key=lambda item: -item[1]["us"]):
            print(f"  {part['us']:8.1f}  {part['launches']:5.0f} x {name}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
