"""What the soaks have in common: comparing an answer with an undisturbed one, and whether memory grows."""

from __future__ import annotations

import statistics

from nanochat.engine.outputs import RequestOutput

Sample = tuple[int, float]
"""Requests so far, and memory then in MiB."""


def difference(output: RequestOutput, expected: RequestOutput, was_cancelled: bool) -> str | None:
    """In what an output isn't the expected one; a cancelled one may end early."""
    if was_cancelled and output.finish_reason == "cancelled":
        whole = expected.token_ids[: len(output.token_ids)] == output.token_ids
        whole = whole and expected.text.startswith(output.text.rstrip("\ufffd"))
        return None if whole else f"cancelled with {output.token_ids}, alone {expected.token_ids}"
    for name in ("token_ids", "text", "finish_reason", "error"):
        ours, theirs = getattr(output, name), getattr(expected, name)
        if ours != theirs:
            return f"{name} {ours!r}, alone {theirs!r}"
    return None


def slope(points: list[Sample]) -> tuple[float, float]:
    """Growth of the later half of ``(x, y)`` in y per 10,000 x, and its standard error."""
    later = points[len(points) // 2 :]
    xs, ys = [x / 10_000 for x, _ in later], [y for _, y in later]
    line = statistics.linear_regression(xs, ys)
    residuals = [y - (line.slope * x + line.intercept) for x, y in zip(xs, ys, strict=True)]
    spread = sum((x - statistics.fmean(xs)) ** 2 for x in xs)
    error = (sum(r * r for r in residuals) / max(1, len(xs) - 2) / spread) ** 0.5
    return line.slope, error
