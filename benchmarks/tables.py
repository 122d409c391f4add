"""The tables of docs/kernels.md, from a report of `benchmarks.kernels`: what the page says is what was measured.

python -m benchmarks.tables benchmarks/results/kernels-h200.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Figures = list[dict[str, Any]]


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown."""
    lines = [f"| {' | '.join(line)} |" for line in (heads, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(heads)}", *lines[1:]])


def number(value: float | None) -> str:
    """Three digits, and no point from 100 on; a dash where there is none."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}"


def decode(figures: Figures) -> str:
    return table(
        ["rows × context", "BF16", "K and V at the copy bandwidth", "INT8", "ratio"],
        (
            [
                f"{f['rows']} × {f['context']:,}",
                *(number(f[key]) for key in ("bf16_us", "floor_us", "int8_us")),
                f"{f['int8_ratio']:.2f}",
            ]
            for f in figures
        ),
    )


def prefill(figures: Figures) -> str:
    return table(
        [
            "rows × queries on context",
            "BF16",
            "TFLOP/s",
            "PyTorch's FlashAttention, contiguous",
            "INT8",
            "ratio",
        ],
        (
            [
                prefill_shape(f),
                number(f["bf16_us"]),
                f"{f['bf16_tflops']:.0f}",
                number(f.get("sdpa_flash_us")),
                number(f["int8_us"]),
                f"{f['int8_ratio']:.2f}",
            ]
            for f in figures
        ),
    )


def int8_ways(figures: Figures) -> str:
    """How an INT8 context is read; empty for a report from before there was a choice."""
    keys = ("bf16_us", "int8_in_place_us", "int8_converted_us", "conversion_us")
    return table(
        [
            "rows × queries on context",
            "BF16",
            "INT8 in place",
            "converted",
            "of that, conversion",
            "as chosen, to BF16",
        ],
        (
            [
                prefill_shape(f),
                *(number(f[key]) for key in keys),
                f"{number(f['int8_us'])}, {f['int8_ratio']:.2f}",
            ]
            for f in figures
            if "conversion_us" in f
        ),
    )


def prefill_shape(figure: dict[str, Any]) -> str:
    rows, queries, context = (figure[key] for key in ("rows", "queries", "context"))
    return f"{rows} × {queries:,}" if queries == context else f"{queries:,} on {context - queries:,}"


def elementwise(figures: Figures) -> str:
    return table(
        ["op", "µs", "TB/s", "share of the copy bandwidth"],
        ([f["op"], number(f["us"]), f"{f['tb_per_s']:.1f}", f"{f['share_of_copy']:.3f}"] for f in figures),
    )


def sampling(figures: Figures) -> str:
    kinds = list(dict.fromkeys(f["kind"] for f in figures))
    times = {(f["rows"], f["kind"]): number(f["us"]) for f in figures}
    return table(
        ["rows", *kinds],
        (
            [str(rows), *(times[rows, kind] for kind in kinds)]
            for rows in dict.fromkeys(f["rows"] for f in figures)
        ),
    )


def splits(figures: Figures) -> str:
    """Those that lose by more than 3 %, and how many there are in all."""
    lost = [f for f in figures if f["worst_ratio"] > 1.03]
    rows = (
        [
            f"{f['rows']} × {f['context']:,}",
            number(f["split_us"]),
            number(f["single_us"]),
            f"{f['worst_ratio']:.2f}",
        ]
        for f in lost
    )
    heads = ["rows × context", "split", "one program a run", "worst of five ratios"]
    return table(heads, rows) + f"\n\n{len(figures) - len(lost)} of {len(figures)} are at most 3 % slower."


TABLES: dict[str, tuple[str, Callable[[Figures], str]]] = {
    "decode": ("decode", decode),
    "prefill": ("prefill", prefill),
    "how INT8 is read": ("prefill", int8_ways),
    "splits": ("splits", splits),
    "elementwise": ("elementwise", elementwise),
    "sampling": ("sampling", sampling),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", type=Path)
    options = parser.parse_args()
    report = json.loads(options.report.read_text())
    rates = f"copy {report['copy_tb_per_s']:.2f} TB/s, GEMM {report['gemm_tflops']:.0f} TFLOP/s"
    print(
        f"{report['hardware']}, {report['date']}, torch {report['torch']}, triton {report['triton']}; {rates}"
    )
    for title, (section, make) in TABLES.items():
        if section in report:
            print(f"\n## {title}\n\n{make(report[section])}")


if __name__ == "__main__":
    main()
