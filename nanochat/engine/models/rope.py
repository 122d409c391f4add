"""Rotary position embeddings: from a model's ``config.json`` to a table of cosines and sines.

Knows nothing of attention, layers or caches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from nanochat.engine.models.config_reader import ConfigReader

RopeScaling = Literal["default", "linear", "llama3", "yarn", "factors"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """One kind of rotary embedding; hashable, so that layers of the same kind share one table."""

    theta: float
    rotary_dim: int
    """Leading dimensions of a head that rotate; even."""
    scaling: RopeScaling = "default"
    factor: float = 1.0
    """linear, llama3, yarn: how many times longer the context became."""
    original_max_position: int = 0
    """llama3, yarn: context length before scaling, in tokens."""
    low_freq_factor: float = 1.0
    """llama3 only, as is the next."""
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    """yarn only, as are the next three."""
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """Multiplies cos and sin."""
    truncate: bool = True
    """Whether the bounds of the ramp are rounded to whole dimensions."""
    factors: tuple[float, ...] = ()
    """factors only: one divisor for each of the ``rotary_dim / 2`` frequencies."""


def inverse_frequencies(rope: RopeConfig) -> torch.Tensor:
    """Radians per position, ``[rotary_dim / 2]`` float32 on the CPU."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.scaling == "linear":
        return frequencies / rope.factor
    if rope.scaling == "llama3":
        return _llama3(rope, frequencies)
    if rope.scaling == "yarn":
        return _yarn(rope, frequencies)
    if rope.scaling == "factors":
        return frequencies / torch.tensor(rope.factors, dtype=torch.float32)
    return frequencies


def cos_sin_table(rope: RopeConfig, num_positions: int, device: torch.device) -> torch.Tensor:
    """``[num_positions, rotary_dim]`` float32: cosines in the first half of a row, sines in the second."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope))
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor).to(device)


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: long wavelengths are stretched, short ones kept, a linear blend in between."""
    turns = rope.original_max_position * frequencies / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


def _yarn(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """YaRN's "NTK by parts" (Peng et al. 2023, section 3.2): a ramp over the dimensions of a head."""

    def dimension_turning(turns: float) -> float:
        ratio = rope.original_max_position / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension_turning(rope.beta_fast), dimension_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001  # as the reference does, so that the ramp has a slope
    dimensions = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    stretched = ((dimensions - low) / (high - low)).clamp(0.0, 1.0)
    return stretched * frequencies / rope.factor + (1 - stretched) * frequencies


def rope_from_config(config: ConfigReader, head_dim: int, *, local: bool) -> RopeConfig:
    """The rotary embedding of a model's windowed (``local``) or full layers.

    transformers 4 has ``rope_theta`` and ``rope_scaling``; 5 has both in ``rope_parameters``, which may
    be nested by layer type. Gemma 3's older files name the local base ``rope_local_base_freq``, and
    their scaling applies to the full layers only.

    Raises:
        UnsupportedModel: the scaling is unknown or a value is out of range.
    """
    parameters = config.inner("rope_parameters") or config.inner("rope_scaling")
    nested = parameters.inner("sliding_attention" if local else "full_attention") if parameters else None
    theta = _theta(config, "rope_theta")
    if nested is not None:
        parameters = nested
    if local and config.get("rope_local_base_freq") is not None:
        theta = _theta(config, "rope_local_base_freq")
        parameters = nested
    if parameters is None:
        return RopeConfig(theta=theta, rotary_dim=head_dim)
    share = parameters.number("partial_rotary_factor", 0, 1, default=1.0)
    if share != 1:
        raise config.error(f"partial_rotary_factor {share:g} isn't supported")
    return _scaled(config, parameters, _theta(parameters, "rope_theta", theta), head_dim)


def _theta(config: ConfigReader, name: str, default: float | None = None) -> float:
    return config.number(name, 1.001, 1e15, default=default)


def _scaled(config: ConfigReader, parameters: ConfigReader, theta: float, head_dim: int) -> RopeConfig:
    kind = parameters.text("rope_type", default=parameters.text("type", default="default"))
    if kind in ("default", "dynamic"):
        # "dynamic" changes nothing up to max_position_embeddings, and no sequence here grows past that.
        return RopeConfig(theta=theta, rotary_dim=head_dim)
    if kind == "linear":
        return RopeConfig(theta=theta, rotary_dim=head_dim, scaling="linear", factor=_factor(parameters))
    max_position = config.integer("max_position_embeddings", 1, 2**28)
    original = parameters.integer(
        "original_max_position_embeddings",
        1,
        2**28,
        default=config.integer("original_max_position_embeddings", 1, 2**28, default=max_position),
    )
    if kind == "llama3":
        low = parameters.number("low_freq_factor", 1e-6, 1e6)
        high = parameters.number("high_freq_factor", 1e-6, 1e6)
        if high <= low:
            raise config.error("rope's high_freq_factor must be above its low_freq_factor")
        return RopeConfig(
            theta=theta,
            rotary_dim=head_dim,
            scaling="llama3",
            factor=_factor(parameters),
            original_max_position=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    if kind == "yarn":
        return _yarn_config(parameters, theta, head_dim, original, max_position)
    if kind == "longrope":
        return _longrope_config(config, parameters, theta, head_dim, original, max_position)
    raise config.error(
        f"rope type {kind[:40]!r} isn't one of default, linear, dynamic, llama3, yarn and longrope"
    )


def _factor(parameters: ConfigReader, default: float | None = None) -> float:
    return parameters.number("factor", 1e-3, 1e6, default=default)


def _yarn_config(
    parameters: ConfigReader, theta: float, head_dim: int, original: int, max_position: int
) -> RopeConfig:
    factor = _factor(parameters, default=max_position / original)
    inferred = _yarn_attention_factor(
        factor,
        parameters.number("mscale", 0, 1e6, default=0.0),
        parameters.number("mscale_all_dim", 0, 1e6, default=0.0),
    )
    return RopeConfig(
        theta=theta,
        rotary_dim=head_dim,
        scaling="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=parameters.number("beta_fast", 1e-6, 1e6, default=32.0),
        beta_slow=parameters.number("beta_slow", 1e-6, 1e6, default=1.0),
        attention_factor=parameters.number("attention_factor", 0, 1e6, default=inferred),
        truncate=parameters.flag("truncate", default=True),
    )


def _longrope_config(
    config: ConfigReader,
    parameters: ConfigReader,
    theta: float,
    head_dim: int,
    original: int,
    max_position: int,
) -> RopeConfig:
    factors = parameters.numbers("long_factor") or ()
    if factors != parameters.numbers("short_factor"):
        # Cached keys keep the frequencies they were rotated with, so these can't change as a text grows.
        raise config.error("longrope with different short and long factors isn't supported")
    if len(factors) != head_dim // 2 or min(factors) <= 0:
        raise config.error("longrope needs one factor above 0 for each pair of dimensions")
    stretch = _factor(parameters, default=max_position / original)
    inferred = math.sqrt(1 + math.log(stretch) / math.log(max(original, 2))) if stretch > 1 else 1.0
    return RopeConfig(
        theta=theta,
        rotary_dim=head_dim,
        scaling="factors",
        factors=factors,
        attention_factor=parameters.number("attention_factor", 0, 1e6, default=inferred),
    )


def _yarn_attention_factor(factor: float, mscale: float, mscale_all_dim: float) -> float:
    """YaRN's temperature on the attention scores, as a factor of cos and sin."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return scale(mscale) / scale(mscale_all_dim)
    return scale(1.0)
