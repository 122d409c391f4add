"""How well the engine predicts a text: against ``transformers``, and with an INT8 KV cache against a full one.

    python -m benchmarks.quality transformers FILE --limit-tokens 20000
    python -m benchmarks.quality kv FILE --dtype float32 --decode-tokens 4096
    python -m benchmarks.quality kv FILE --dtype bfloat16 --decode-tokens 4096
    python -m benchmarks.quality weights FILE --limit-tokens 20000 --stride 2048

``transformers`` scores the same windows of the same tokens in one forward pass each, without a cache. ``kv``
is what ``nanochat perplexity FILE --compare`` measures. ``weights`` scores every token with each format of the
weights, also where prompts would be computed with full ones. With ``--json`` the figures go to a file, together
with the machine, the versions and the date.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F

from benchmarks.machine import describe_machine
from nanochat.commands.perplexity import ProgressLine, format_report, read_text
from nanochat.engine.config import EngineConfig, Weights
from nanochat.engine.progress import Progress, ProgressCallback
from nanochat.engine.quality import QualityMeter, QualityOptions
from nanochat.engine.windows import sliding_windows
from nanochat.kernels import cpu_linear
from nanochat.kernels.native import linear as native_linear


def describe_command(options: argparse.Namespace) -> str:
    """What to type for the same figures; the text by its name alone."""
    given = {name: value for name, value in vars(options).items() if name not in ("what", "file", "json")}
    flags = [
        f"--{name.replace('_', '-')} {value}" for name, value in given.items() if value not in (None, "")
    ]
    return " ".join(["python -m benchmarks.quality", options.what, options.file.name, *flags])


def measure_kv(
    text: str, config: EngineConfig, options: QualityOptions, progress: ProgressCallback
) -> dict[str, Any]:
    """An INT8 cache against one of the weights' type."""
    report = QualityMeter(config, options, progress).measure(text)
    print(format_report(report))
    return report.to_json()


def measure_transformers(
    text: str, config: EngineConfig, options: QualityOptions, progress: ProgressCallback
) -> dict[str, Any]:
    """The engine's perplexity beside that of ``transformers`` for the same weights, tokens and windows."""
    meter = QualityMeter(config, options, progress)
    report = meter.measure(text)
    tokens = meter.model.tokenizer.encode(text)[: options.limit_tokens]
    theirs = transformers_perplexity(
        meter.model.folder, tokens, report.ctx, report.stride, progress, device=config.device
    )
    ours = report.prefill.caches[0].perplexity
    print(f"{report.model}, {report.dtype}, {report.tokens:,} tokens in windows of {report.ctx:,}")
    print(f"nanochat {ours:.6f}   transformers {theirs:.6f}   difference {ours / theirs - 1:+.5%}")
    return {**report.to_json(), "transformers_perplexity": theirs, "difference": ours / theirs - 1}


def measure_weights(
    text: str, config: EngineConfig, options: QualityOptions, progress: ProgressCallback
) -> dict[str, Any]:
    """Perplexity by format of the weights, on a CPU."""
    # Compact kernels are for a few rows, which would leave prefill to full weights.
    cpu_linear.INT4_MAX_ROWS = cpu_linear.INT8_MAX_ROWS = 2**31
    native_linear.MAX_FEW_ROWS = 2**31  # type: ignore[attr-defined]
    figures: dict[str, Any] = {}
    for weights in [config.weights] if config.weights != "auto" else get_args(Weights):
        meter = QualityMeter(replace(config, weights=weights, dtype="auto"), options, progress)
        report = meter.measure(text)
        figures[weights] = {
            "most_weights": meter.model.weights,
            "dtype": report.dtype,
            "tokens": report.prefill.tokens,
            "perplexity": report.prefill.caches[0].perplexity,
        }
        print(weights, figures[weights], flush=True)
    return {"formats": figures}


@torch.inference_mode()
def transformers_perplexity(
    folder: Path, tokens: list[int], ctx: int, stride: int, progress: ProgressCallback, *, device: str
) -> float:
    """Perplexity of ``tokens`` by ``transformers``, in float32, on the same device as the engine's."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    windows = sliding_windows(len(tokens), ctx, stride)
    total, count = 0.0, 0
    for number, (begin, end, first_scored) in enumerate(windows):
        progress(Progress("Scoring by transformers", number, len(windows)))
        targets = torch.tensor(tokens[first_scored:end], device=device)
        ids = torch.tensor([tokens[begin:end]], device=device)
        logits = model(ids, use_cache=False, logits_to_keep=len(targets) + 1).logits[0, :-1]
        total += float(F.cross_entropy(logits, targets, reduction="none").double().sum())
        count += len(targets)
    return math.exp(total / count)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("transformers", "kv", "weights"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", default="")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--weights", default="auto", choices=get_args(Weights), help="only this format")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--ctx", type=int)
    parser.add_argument("--stride", type=int)
    parser.add_argument("--limit-tokens", type=int)
    parser.add_argument("--decode-tokens", type=int)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    if options.what == "transformers" and options.dtype != "float32":
        parser.error("transformers is compared in float32, where figures have to be equal")
    if options.what == "weights" and options.device != "cpu":
        parser.error("only a CPU has formats of the weights to choose from")
    config = EngineConfig(
        model=options.model,
        device=options.device,
        dtype="auto" if options.weights != "auto" else options.dtype,
        weights=options.weights,
    )
    wanted = QualityOptions(
        compare=options.what == "kv",
        ctx=options.ctx,
        stride=options.stride,
        limit_tokens=options.limit_tokens,
        decode_tokens=0 if options.what == "weights" else options.decode_tokens,
    )
    measure = {"kv": measure_kv, "transformers": measure_transformers, "weights": measure_weights}[
        options.what
    ]
    with ProgressLine() as progress:
        figures = measure(read_text(options.file), config, wanted, progress)
    if options.json is not None:
        result = {
            "command": describe_command(options),
            **describe_machine("transformers", device=options.device),
            **figures,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
