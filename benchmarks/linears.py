"""The linear maps of one decode step at a few rows: ours in every cut, cuBLAS', and the floor by bandwidth.

    python -m benchmarks.linears --rows 1,8,16,32,64 --json results.json

Shapes are Qwen3-0.6B's, in BF16, and each map does what it does in a step: q, k and v, and gate and up, divide
by the norm; gate and up end in SiLU and product; o and down add the residual, and norm; ``lm_head`` gives
float32. A map is timed over as many weights as the model has layers, one after another in one CUDA graph; cuBLAS'
time is that of its product alone. Every cut's results are compared with float64 before it is timed. ``chains`` are all
maps of a step one after another, each in the cut that a step takes, and cuBLAS' products alone. Compiling takes
minutes: ``--warm I/N`` compiles a share of the cuts and checks them, so that ``N`` processes can do it side by side
with one Triton cache.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.kernel_harness import copy_bandwidth, read_bandwidth, time_us
from benchmarks.machine import describe_machine
from nanochat.kernels.gpu_linear import launch_linear
from nanochat.kernels.gpu_linear_split import allocate_arrivals, launch_split_linear
from nanochat.kernels.normed import Normed
from nanochat.kernels.triton_utils import device_info
from nanochat.kernels.tuning import SPLIT_TILE, LinearConfig, SplitConfig, linear_config, split_config

LAYERS = 28
SHARED_BYTES = 227 << 10
"""Of a Hopper multiprocessor, what one program may have."""
MAX_ERROR = 6e-3
"""Of the result's norm, in BF16."""


class Shape(NamedTuple):
    """A map of a step, and what is computed with it."""

    out_size: int
    in_size: int
    parts: int = 1
    """2: gate and up."""
    normed: bool = False
    adds: bool = False


SHAPES = {
    "qkv": Shape(4096, 1024, normed=True),
    "o": Shape(1024, 2048, adds=True),
    "gate_up": Shape(3072, 1024, parts=2, normed=True),
    "down": Shape(1024, 3072, adds=True),
    "lm_head": Shape(151_936, 1024),
}


Cut = LinearConfig | SplitConfig


class Case:
    """Inputs and outputs of a map at some rows; what is not written stays NaN."""

    def __init__(self, shape: Shape, rows: int) -> None:
        def randn(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.randn(size, device="cuda", dtype=dtype)

        def nan(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.full(size, float("nan"), device="cuda", dtype=dtype)

        self.shape = shape
        squares = None
        if shape.normed:
            # As many parts as the map before, of which these are the rows, leaves behind.
            before = used_cut(SHAPES["o"], rows)
            parts = shape.in_size // (SPLIT_TILE if isinstance(before, SplitConfig) else 16)
            squares = torch.rand(parts, rows, device="cuda") * shape.in_size / parts + 1
        self.x = Normed(randn(rows, shape.in_size), squares, 1e-6)
        is_logits = shape.out_size > 32_768
        self.out = nan(rows, shape.out_size, dtype=torch.float32 if is_logits else torch.bfloat16)
        self.epilogue = None
        if shape.adds:
            residual, norm = randn(rows, shape.out_size, dtype=torch.float32), randn(shape.out_size)
            sums = (nan(rows, shape.out_size), nan(shape.out_size // 16, rows))
            self.epilogue = (residual, norm, *sums)
        self._arrivals = allocate_arrivals(torch.device("cuda"))

    def run(self, weight: torch.Tensor, config: Cut) -> None:
        options: dict[str, Any] = {"gated": self.shape.parts == 2, "epilogue": self.epilogue}
        if isinstance(config, SplitConfig):
            launch_split_linear(self.x, weight, None, self.out, config, self._arrivals, **options)
        else:
            launch_linear(self.x, weight, None, self.out, config, **options)

    def error(self, weight: torch.Tensor, config: Cut) -> float:
        """The worst of all results', relative to float64's norm."""
        self.run(weight, config)
        exact = self.x.values.double() @ weight.double().T
        if self.x.squares is not None:
            mean = self.x.squares.double().sum(0) / self.shape.in_size
            exact *= torch.rsqrt(mean + self.x.eps).unsqueeze(1)
        if self.shape.parts == 2:
            gate, up = exact.chunk(2, dim=-1)
            exact = torch.nn.functional.silu(gate) * up
        errors = []
        if self.epilogue is not None:
            residual, norm, summed, squares = self.epilogue
            exact += residual
            errors.append(relative(summed, exact))
            outputs = SPLIT_TILE if isinstance(config, SplitConfig) else 16 * config.repeat
            programs = self.shape.out_size // outputs
            errors.append(relative(squares[:programs].double().sum(0), exact.pow(2).sum(1)))
            exact *= norm
        return max(*errors, relative(self.out, exact), 0.0)


def relative(got: torch.Tensor, exact: torch.Tensor) -> float:
    """NaN counts as infinite."""
    error = float((got.double() - exact).norm() / exact.norm())
    return error if error == error else float("inf")


def weights(shape: Shape, count: int) -> list[torch.Tensor]:
    size = (shape.parts * shape.out_size, shape.in_size)
    return [torch.randn(size, device="cuda").bfloat16() / shape.in_size**0.5 for _ in range(count)]


def cuts(shape: Shape, rows: int) -> Iterator[Cut]:
    """All that fit."""
    yield from split_cuts(shape, rows)
    yield from register_cuts(shape, rows)


def split_cuts(shape: Shape, rows: int) -> Iterator[SplitConfig]:
    """All that fit shared memory."""
    tile = 8 if rows <= 8 else 16 if rows <= 16 else 32 if rows <= 32 else 64
    if shape.out_size > 32_768:
        return
    for splits in (1, 2, 3, 4, 6, 8):
        if shape.in_size % (splits * 128) == 0:
            steps = shape.in_size // splits // 128
            for ring in sorted({min(4, steps), steps}):
                if 128 * 2 * (steps * SPLIT_TILE + ring * tile) <= SHARED_BYTES:
                    yield SplitConfig(splits, 128, tile, ring)


def register_cuts(shape: Shape, rows: int) -> Iterator[LinearConfig]:
    """All that fit the registers."""
    if rows > 32:
        return
    for split in (2, 4, 8, 16):
        for step in (32, 64, 128):
            for repeat in (1, 2) if rows <= 8 else (1, 2, 4):
                for row_tile in (8,) if rows <= 8 else (16,) if rows <= 16 else (16, 32):
                    registers = shape.in_size * repeat * shape.parts // (4 * split)
                    used = registers + step * row_tile // 32 + repeat * row_tile * shape.parts
                    divides = shape.in_size % (split * step) == 0
                    if divides and registers <= 160 and used <= 250 and split * (registers + 40) <= 2048:
                        yield LinearConfig(split, step, repeat, row_tile)


def warm(all_rows: list[int], index: int, count: int) -> None:
    jobs = [(shape, rows, cut) for shape in SHAPES.values() for rows in all_rows for cut in cuts(shape, rows)]
    own = {shape: weights(shape, 1)[0] for shape in SHAPES.values()}
    for shape, rows, cut in jobs[index::count]:
        check(Case(shape, rows), own[shape], cut)


def check(case: Case, weight: torch.Tensor, cut: Cut) -> None:
    """Stop where a cut's results are wrong."""
    error = case.error(weight, cut)
    if error > MAX_ERROR:
        raise SystemExit(f"{case.shape}, {len(case.out)} rows, {cut}: error {error}")


def used_cut(shape: Shape, rows: int) -> Cut | None:
    """What a step takes; None: cuBLAS."""
    sizes = (rows, shape.in_size, shape.out_size, shape.parts)
    info = device_info(torch.device("cuda"))
    return split_config(info.capability, info.num_sms, *sizes) or linear_config(info.capability, *sizes)


def measure(name: str, all_rows: list[int], bandwidth: float) -> list[dict[str, Any]]:
    shape = SHAPES[name]
    own = weights(shape, 4 if name == "lm_head" else LAYERS)
    figures = []
    for rows in all_rows:
        case = Case(shape, rows)

        def ours(cut: Cut, case: Case = case) -> list[Callable[[], object]]:
            return [lambda weight=weight: case.run(weight, cut) for weight in own]

        times = {}
        for cut in cuts(shape, rows):
            check(Case(shape, rows), own[0], cut)  # a new one: what this cut does not write is NaN
            times[cut] = time_us(ours(cut))
        ranked = sorted(times, key=times.__getitem__)
        used = used_cut(shape, rows)
        x = case.x.values
        figures.append(
            {
                "map": name,
                "rows": rows,
                "floor_us": own[0].nbytes / bandwidth / 1e6,
                "cublas_us": time_us([lambda w=w, x=x: torch.nn.functional.linear(x, w) for w in own]),
                "used": asdict(used) if used else None,
                "best": [{**asdict(cut), "us": times[cut]} for cut in ranked[:8]],
            }
        )
    return figures


def chains(all_rows: list[int]) -> list[dict[str, float]]:
    """All maps of a step in one graph: ours as a step takes them, where it takes them, and cuBLAS' products alone."""
    figures = []
    for rows in all_rows:
        ours: list[Callable[[], object]] = []
        plain: list[Callable[[], object]] = []
        layer = [name for name in SHAPES if name != "lm_head"]
        cases = {name: Case(shape, rows) for name, shape in SHAPES.items()}
        used = {name: used_cut(shape, rows) for name, shape in SHAPES.items()}
        for name in [*layer * LAYERS, "lm_head"]:
            case, cut, weight = cases[name], used[name], weights(SHAPES[name], 1)[0]
            product = lambda x=case.x.values, w=weight: torch.nn.functional.linear(x, w)  # noqa: E731
            plain.append(product)
            ours.append(product if cut is None else lambda c=case, w=weight, cut=cut: c.run(w, cut))
        figures.append(
            {"rows": rows, "ours_us": time_us(ours) * len(ours), "cublas_us": time_us(plain) * len(plain)}
        )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="1,8,16,32,64")
    parser.add_argument("--warm", metavar="I/N", help="compile and check a share of all cuts, time nothing")
    parser.add_argument("--json", type=Path, help="write the report here")
    options = parser.parse_args()
    torch.manual_seed(0)
    all_rows = [int(rows) for rows in options.rows.split(",")]
    if options.warm:
        index, count = map(int, options.warm.split("/"))
        warm(all_rows, index, count)
        return
    bandwidth = copy_bandwidth()
    report: dict[str, Any] = {**describe_machine("triton"), "copy_tb_per_s": bandwidth, "maps": []}
    report["read_tb_per_s"] = read_bandwidth()
    for name in SHAPES:
        report["maps"] += (figures := measure(name, all_rows, bandwidth))
        for figure in figures:
            best = " ".join(f"{cut['us']:.2f}" for cut in figure["best"])
            print(
                f"{name:8} {figure['rows']:3} rows: floor {figure['floor_us']:.2f} "
                f"cuBLAS {figure['cublas_us']:.2f} ours {best}",
                flush=True,
            )
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    report["chains"] = chains(all_rows)
    for chain in report["chains"]:
        print(" ".join(f"{key} {value:.4g}" for key, value in chain.items()), flush=True)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
