"""The KV cache as a picture: one cell a block, or a group of blocks when there are more than cells.

Pure functions from the engine's block map to cells and to text.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    size = group_size(len(block_map.owner), num_cells)
    shared = sorted(block_map.shared)
    shared_groups = {block // size for block in shared}
    lost_groups = {block // size for block in lost}
    found = []
    for index, start in enumerate(range(0, len(block_map.owner), size)):
        group = block_map.owner[start : start + size]
        owners = set(group)
        users = [owner for owner in owners if owner not in (FREE, CACHED)]
        if index in lost_groups:
            found.append(Cell("lost"))
        elif users:
            owner = max(users, key=lambda user: (group.count(user), -user))
            kind: Kind = "shared" if index in shared_groups else "owned"
            found.append(Cell(kind, slots.get(owner)))
        else:
            found.append(Cell("cached" if CACHED in owners else "free"))
    return found


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
    text = "".join(_glyph(cell, numbers) for cell in row)
    spans = [Span(start, end, _style(row[start])) for start, end in _runs(row)]
    return Content(text, spans)


def _runs(row: Sequence[Cell]) -> Iterator[tuple[int, int]]:
    start = 0
    for index in range(1, len(row) + 1):
        if index == len(row) or row[index] != row[start]:
            yield start, index
            start = index


def _style(cell: Cell) -> str:
    if cell.kind == "free":
        return "$map-free"
    if cell.kind == "lost":
        return "bold $background on $warning"
    if cell.kind == "cached":
        return "$map-cached"
    return tab_colour(cell.slot) if cell.slot is not None else "$foreground"
