"""The KV cache as a picture: one cell a block, or a group of blocks when there are more than cells.

Pure functions from the engine's block map to cells and to text.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from textual.content import Content, Span

from nanochat.engine.stats import CACHED, FREE, BlockMap
from nanochat.ui.theme import tab_colour

Kind = Literal["free", "cached", "owned", "shared", "lost"]

GLYPHS: dict[Kind, str] = {"free": "·", "cached": "□", "owned": "■", "shared": "▣", "lost": "×"}


@dataclass(frozen=True, slots=True)
class Cell:
    """What a group of blocks is mostly used for. ``slot`` is the owning tab's colour."""

    kind: Kind
    slot: int | None = None


def group_size(num_blocks: int, num_cells: int) -> int:
    """Blocks a cell stands for."""
    return max(1, -(-num_blocks // max(1, num_cells)))


def cells(
    block_map: BlockMap, slots: Mapping[int, int], num_cells: int, lost: Collection[int] = ()
) -> list[Cell]:
    """At most ``num_cells`` cells in block order. ``slots`` maps request ids to tab colours.

    ``lost`` are blocks that a preemption has just taken from their chat; they outweigh all others.

    In a group, a block in use outweighs cached ones, and a cached one outweighs free ones: a short chat
    in a large cache must still be seen.
    """
    owner = block_map.owner
    size = group_size(len(owner), num_cells)
    made: dict[tuple[Kind, int | None], Cell] = {}
    """Equal cells are one object, and equal groups are looked at once: this runs several times a second."""

    def cell(kind: Kind, slot: int | None = None) -> Cell:
        return made.setdefault((kind, slot), Cell(kind, slot))

    known: dict[tuple[int, ...], Cell] = {}
    found = []
    for start in range(0, len(owner), size):
        group = owner[start : start + size]
        if (kept := known.get(group)) is None:
            kept = known[group] = cell(*_use(group, slots))
        found.append(kept)
    for index in {block // size for block in block_map.shared}:
        if found[index].kind == "owned":
            found[index] = cell("shared", found[index].slot)
    for index in {block // size for block in lost}:
        if index < len(found):  # another model's cache may be smaller
            found[index] = cell("lost")
    return found


def _use(group: tuple[int, ...], slots: Mapping[int, int]) -> tuple[Kind, int | None]:
    """What most of the blocks are used for, and by whom."""
    owners = set(group)
    users = [owner for owner in owners if owner not in (FREE, CACHED)]
    if users:
        return "owned", slots.get(max(users, key=lambda user: (group.count(user), -user)))
    return ("cached" if CACHED in owners else "free"), None


def draw(found: Sequence[Cell], width: int, numbers: Mapping[int, int] | None = None) -> list[Content]:
    """Rows of ``width`` cells.

    Where there are no colours, ``numbers`` gives each colour's tab: its last digit stands for its blocks.
    """
    return [_row(found[start : start + width], numbers or {}) for start in range(0, len(found), width)]


def _glyph(cell: Cell, numbers: Mapping[int, int]) -> str:
    if cell.kind == "owned" and cell.slot is not None and cell.slot in numbers:
        return str(numbers[cell.slot] % 10)
    return GLYPHS[cell.kind]


def _row(row: Sequence[Cell], numbers: Mapping[int, int]) -> Content:
    text: list[str] = []
    spans: list[Span] = []
    start = 0
    for cell, run in groupby(row):
        end = start + len(list(run))
        text.append(_glyph(cell, numbers) * (end - start))
        spans.append(Span(start, end, _style(cell)))
        start = end
    return Content("".join(text), spans)


def _style(cell: Cell) -> str:
    if cell.kind == "free":
        return "$map-free"
    if cell.kind == "lost":
        return "bold $background on $warning"
    if cell.kind == "cached":
        return "$map-cached"
    return tab_colour(cell.slot) if cell.slot is not None else "$foreground"
