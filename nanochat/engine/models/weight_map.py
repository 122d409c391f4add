"""Which tensor of a model's files goes where in a decoder's packed tensors, and which part of it a rank takes.

Knows the names that Hugging Face models have; reads no files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from nanochat.engine.models.decoder import Decoder
from nanochat.engine.models.layers import DecoderLayer, Linear, MoE
from nanochat.engine.models.shard import Ranges


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a packed tensor, and the part of a stored one that fills it."""

    target: torch.Tensor
    dim: int | None = None
    """The stored dimension that is cut; None: the whole tensor is taken."""
    begin: int = 0
    end: int = 0


def destinations(decoder: Decoder, names: Iterable[str]) -> Iterator[tuple[str, list[Piece]]]:
    """Each tensor's name in files that hold ``names``, and the pieces of it that the decoder takes.

    What of a target no stored element fills is set to zero.
    """
    stored = frozenset(names)
    prefix, head = _prefixes(stored)
    shard, config = decoder.shard, decoder.config
    rows = [shard.own(config.vocab_size)]
    yield f"{prefix}embed_tokens.weight", _cut(decoder.embedding, 0, rows)
    for index, layer in enumerate(decoder.layers):
        yield from _layer(f"{prefix}layers.{index}.", decoder, layer, stored)
    yield f"{prefix}norm.weight", _whole(decoder.norm.weight)
    if not config.tie_word_embeddings:
        yield head, _cut(decoder.lm_head.weight, 0, rows)


def _prefixes(stored: frozenset[str]) -> tuple[str, str]:
    """What stands before the decoder's names, and the output matrix's name.

    Models that also see have their decoder one level down, in two ways of naming.
    """
    for prefix, head in (
        ("language_model.model.", "language_model.lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
    ):
        if f"{prefix}embed_tokens.weight" in stored:
            return prefix, head
    return "model.", "lm_head.weight"


def _layer(
    prefix: str, decoder: Decoder, layer: DecoderLayer, stored: frozenset[str]
) -> Iterator[tuple[str, list[Piece]]]:
    attention, config, shard = layer.attention, decoder.config, decoder.shard
    queries = [shard.own(config.num_heads * config.head_dim)]
    keys = shard.head_ranges(shard.kv_heads(config), config.head_dim)
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    yield from _columns(prefix, parts, attention.sizes, attention.qkv, (queries, keys, keys))
    yield from _rows(f"{prefix}self_attn.o_proj", attention.out, queries, shard.rank)
    if attention.q_norm is not None and attention.k_norm is not None:
        yield f"{prefix}self_attn.q_norm.weight", _whole(attention.q_norm)
        yield f"{prefix}self_attn.k_norm.weight", _whole(attention.k_norm)
    yield f"{prefix}input_layernorm.weight", _whole(layer.attention_norm.weight)
    if layer.attention_out_norm is not None and layer.mlp_out_norm is not None:
        yield f"{prefix}post_attention_layernorm.weight", _whole(layer.attention_out_norm.weight)
        yield f"{prefix}pre_feedforward_layernorm.weight", _whole(layer.mlp_norm.weight)
        yield f"{prefix}post_feedforward_layernorm.weight", _whole(layer.mlp_out_norm.weight)
    else:
        yield f"{prefix}post_attention_layernorm.weight", _whole(layer.mlp_norm.weight)
    if isinstance(layer.mlp, MoE):
        yield from _experts(f"{prefix}mlp.", decoder, layer.mlp, stored)
        return
    inner, part = [shard.own(config.intermediate_size)], decoder.local.intermediate_size
    names = ("mlp.gate_proj", "mlp.up_proj")
    yield from _columns(prefix, names, (part, part), layer.mlp.gate_up, (inner, inner))
    yield from _rows(f"{prefix}mlp.down_proj", layer.mlp.down, inner, shard.rank)


def _columns(
    prefix: str, names: tuple[str, ...], sizes: tuple[int, ...], linear: Linear, own: tuple[Ranges, ...]
) -> Iterator[tuple[str, list[Piece]]]:
    """Maps packed into one, of whose outputs a rank has some."""
    for name, part, ranges in zip(names, linear.weight.split(sizes), own, strict=True):
        yield f"{prefix}{name}.weight", _cut(part, 0, ranges)
    if linear.bias is not None:
        for name, part, ranges in zip(names, linear.bias.split(sizes), own, strict=True):
            yield f"{prefix}{name}.bias", _cut(part, 0, ranges)


def _rows(name: str, linear: Linear, own: Ranges, rank: int) -> Iterator[tuple[str, list[Piece]]]:
    """A map of whose inputs a rank has some; the ranks' outputs are added up, so the bias is one rank's alone."""
    yield f"{name}.weight", _cut(linear.weight, 1, own)
    if linear.bias is not None:
        yield f"{name}.bias", _whole(linear.bias) if rank == 0 else _cut(linear.bias, 0, [])


def _experts(
    prefix: str, decoder: Decoder, moe: MoE, stored: frozenset[str]
) -> Iterator[tuple[str, list[Piece]]]:
    total = decoder.config.moe.intermediate_size if decoder.config.moe is not None else 0
    begin, end = decoder.shard.own(total)
    yield f"{prefix}gate.weight", _whole(moe.router.weight)
    if f"{prefix}experts.gate_up_proj" in stored:  # all experts in one tensor
        gates, ups = moe.gate_up.chunk(2, dim=1)
        halves = _cut(gates, 1, [(begin, end)]) + _cut(ups, 1, [(total + begin, total + end)])
        yield f"{prefix}experts.gate_up_proj", halves if decoder.shard.size > 1 else _whole(moe.gate_up)
        yield f"{prefix}experts.down_proj", _cut(moe.down, 2, [(begin, end)])
        return
    for expert in range(moe.down.shape[0]):
        gate, up = moe.gate_up[expert].chunk(2)
        yield f"{prefix}experts.{expert}.gate_proj.weight", _cut(gate, 0, [(begin, end)])
        yield f"{prefix}experts.{expert}.up_proj.weight", _cut(up, 0, [(begin, end)])
        yield f"{prefix}experts.{expert}.down_proj.weight", _cut(moe.down[expert], 1, [(begin, end)])


def _whole(target: torch.Tensor) -> list[Piece]:
    return [Piece(target)]


def _cut(target: torch.Tensor, dim: int, ranges: Ranges) -> list[Piece]:
    """Fill ``target`` along ``dim`` from ``ranges`` of the stored tensor, one after the other, then with zeros."""
    places = [0]
    for begin, end in ranges:
        places.append(places[-1] + end - begin)
    if places[-1] < target.shape[dim]:
        target.narrow(dim, places[-1], target.shape[dim] - places[-1]).zero_()
    return [
        Piece(target.narrow(dim, place, after - place), dim, begin, end)
        for (place, after), (begin, end) in zip(pairwise(places), ranges, strict=True)
    ]
