"""The panel, the block map and the tabs' badges, drawn from snapshots."""

from __future__ import annotations

import dataclasses
import random
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from nanochat.backend.stats import BackendStats
from nanochat.engine.stats import CACHED, FREE, BlockMap, EngineStats, RequestRow, RequestState, SlowStep
from nanochat.ui.block_map import Cell, cells, draw, group_size
from nanochat.ui.chat import Chat, Phase
from nanochat.ui.snapshots import busy_label, state_label, take_snapshot, update_phases
from nanochat.ui.stats_panel import FLASH, History, Snapshot, TabRow, one_line, panel
from nanochat.ui.tab_bar import badge, tab_state


def row(request_id: int, state: RequestState = "decode", done: int = 0, total: int = 0) -> RequestRow:
    return RequestRow(request_id, state, 1000, done, total, 1183, 120, 512, 1, 70, 0.041, 118.0)


def stats(*rows: RequestRow, preemptions: int = 4) -> BackendStats:
    return BackendStats.of_engine(EngineStats(
        blocks_total=1024, blocks_used=612, blocks_cached=100, running=len(rows), waiting=1, preemptions=preemptions,
        prefix_query_tokens=1000, prefix_hit_tokens=870, prompt_tokens=9, generation_tokens=9, ttft_s=(0.03, 0.05),
        itl_s=(), decode_tok_s=352.0, prefill_tok_s=5120.0, steps=9, requests=rows,
    ))  # fmt: skip


def snapshot(num_tabs: int = 3, context: int = 1183) -> Snapshot:
    owner = tuple(random.Random(0).choices([FREE, CACHED, 1, 2, 3], k=1024))
    tabs = tuple(
        TabRow(number, number - 1, "prefill 43 %", 1183, 0.041, 118.0, number == 1)
        for number in range(1, num_tabs + 1)
    )
    return Snapshot(stats(), BlockMap(owner, frozenset({3, 4})), {1: 0, 2: 1, 3: 2}, tabs, context, 8192)


@pytest.mark.parametrize("width", [24, 36, 56])
@pytest.mark.parametrize("height", [8, 19, 31, 56])
@pytest.mark.parametrize("num_tabs", [1, 8, 30])
def test_the_panel_keeps_to_its_space(width: int, height: int, num_tabs: int) -> None:
    lines = panel(snapshot(num_tabs), History(), width, height)
    assert len(lines) <= height
    assert all(cell_len(line.plain) <= width for line in lines)


def test_the_panel_shows_its_figures() -> None:
    text = "\n".join(line.plain for line in panel(snapshot(), History(), 36, 31))
    for figure in (
        "612 / 1,024",
        "60 %",
        "87 %",
        "Preempted  4",
        "30 ms",
        "50 ms",
        "352 tok/s",
        "5,120 tok/s",
        "1,183 / 8,192",
    ):
        assert figure in text
    assert " 1 prefill 43 %  1,183   41 ms   118" in text


@pytest.mark.parametrize("width", [25, 33, 34])
def test_the_maps_legend_is_whole(width: int) -> None:
    lines = [line.plain for line in panel(snapshot(), History(), width, 31)]
    assert any(line.endswith(("▣ shared  □ cached", "▣ shared □ cached")) for line in lines)


def test_many_chats_leave_room_for_the_rest() -> None:
    many = snapshot(30)
    lines = [line.plain for line in panel(many, History(), 36, 31)]
    assert "1,183 / 8,192" in lines[-2]
    assert any(line.startswith(" 1 prefill") for line in lines)
    assert sum("prefill 43 %" in line for line in lines) < 30


@given(st.integers(0, 200))
def test_one_line_fits_any_width(width: int) -> None:
    assert cell_len(one_line(snapshot(), History(), width).plain) <= width


def test_preemptions_of_before_do_not_flash() -> None:
    history = History()
    for told in (7, None, 7):
        history.record(replace(stats(), preemptions=told))
        assert history.flash == 0
    history.record(stats(preemptions=8))
    assert history.flash == FLASH


def test_a_preemption_flashes_for_a_while() -> None:
    history = History()
    history.record(stats(preemptions=0))
    assert history.flash == 0
    history.record(stats(preemptions=1))
    assert history.flash == FLASH
    for _ in range(FLASH):
        history.record(stats(preemptions=1))
    assert history.flash == 0


def test_nothing_flashes_for_who_wants_little_motion() -> None:
    history = History(is_still=True)
    history.record(stats(preemptions=1))
    assert history.flash == 0


def test_the_blocks_that_a_preemption_takes_flash_for_a_while() -> None:
    history = History()

    def moment(owner: tuple[int, ...], state: RequestState, preemptions: int) -> Snapshot:
        now = stats(row(1, state), row(2), preemptions=preemptions)
        history.record(now)
        taken = Snapshot(now, BlockMap(owner, frozenset()), {1: 0, 2: 1}, (), 0, 8192)
        history.watch(taken)
        return taken

    moment((1, 2, 1, FREE), "decode", 0)
    assert history.lost == frozenset()
    taken = moment((FREE, 2, 2, FREE), "preempted", 1)
    assert history.lost == {0, 2}
    found = cells(taken.block_map, taken.slots, 4, history.lost)
    assert [cell.kind for cell in found] == ["lost", "owned", "lost", "free"]
    assert draw(found, 4)[0].plain == "×■×·"
    for _ in range(FLASH):
        moment((FREE, 2, 2, FREE), "preempted", 1)
    assert history.lost == frozenset()


def test_without_colours_blocks_bear_the_number_of_their_tab() -> None:
    taken = snapshot(num_tabs=3)
    text = "\n".join(line.plain for line in panel(taken, History(), 36, 31, has_colours=False))
    assert re.search(r"1 = \d+ blocks", text)
    kv_map = text.split("\n")[2:5]
    assert set("".join(kv_map)) <= set("123▣□·")
    assert "■" not in text


def test_cells_stand_for_blocks_in_order() -> None:
    block_map = BlockMap((FREE, CACHED, 7, 7, 8), frozenset({3}))
    assert cells(block_map, {7: 0, 8: 4}, 5) == [
        Cell("free"),
        Cell("cached"),
        Cell("owned", 0),
        Cell("shared", 0),
        Cell("owned", 4),
    ]


def test_in_a_group_blocks_in_use_outweigh_cached_and_these_free_ones() -> None:
    block_map = BlockMap((FREE, FREE, FREE, 7, FREE, CACHED, FREE, FREE, 8, 7, 7, FREE), frozenset())
    assert cells(block_map, {7: 0, 8: 1}, 3) == [Cell("owned", 0), Cell("cached"), Cell("owned", 0)]


@given(st.lists(st.sampled_from([FREE, CACHED, 1, 2]), min_size=1, max_size=300), st.integers(1, 80))
def test_the_map_covers_every_block_within_its_cells(owner: list[int], num_cells: int) -> None:
    found = cells(BlockMap(tuple(owner), frozenset()), {1: 0, 2: 1}, num_cells)
    size = group_size(len(owner), num_cells)
    assert len(found) == -(-len(owner) // size) <= num_cells
    assert any(cell.kind == "owned" for cell in found) == any(block > 0 for block in owner)
    assert sum(len(line) for line in draw(found, 7)) == len(found)


def test_a_block_of_a_request_without_a_tab_has_no_hue() -> None:
    assert cells(BlockMap((5,), frozenset()), {}, 1) == [Cell("owned", None)]


def busy_chat(phase: Phase = Phase.SUBMITTED) -> Chat:
    chat = Chat()
    chat.ask("question")
    chat.phase = phase
    return chat


def test_phases_follow_the_engine() -> None:
    chats = [busy_chat() for _ in range(5)]
    ids = {number: chat.id for number, chat in enumerate(chats, 1)}
    update_phases(
        chats,
        ids,
        stats(row(1, "queued"), row(2, "prefill", 300, 1200), row(3), row(4, "preempted"), row(99)),
    )
    assert [chat.phase for chat in chats] == [
        Phase.QUEUED,
        Phase.PREFILL,
        Phase.DECODE,
        Phase.PREEMPTED,
        Phase.SUBMITTED,
    ]
    assert chats[1].prefill_progress == 0.25
    assert [state_label(chat) for chat in chats] == [
        "queued",
        "prefill 25 %",
        "decode",
        "preempted",
        "waiting",
    ]
    assert len({badge(chat)[0] for chat in chats}) == 4
    assert tab_state(chats[1], 2, 1, False).label().plain == "◐ 2 question 25 %"


def test_a_snapshot_gives_each_block_its_chats_colour() -> None:
    first, second = busy_chat(), busy_chat()
    slots = {first.id: 0, second.id: 5}
    rows = {second.id: row(12)}
    taken = take_snapshot(
        [first, second], second, slots, {11: first.id, 12: second.id}, rows, stats(), None, 8192
    )
    assert taken.slots == {11: 0, 12: 5}
    assert taken.context_tokens == 1183
    assert [tab.slot for tab in taken.tabs] == [0, 5]


def test_the_header_says_how_much_runs() -> None:
    assert busy_label(stats(row(1), row(2))) == "2 running · 1 queued"
    assert busy_label(None) == ""


def test_a_step_that_takes_very_long_is_told_of() -> None:
    shown = snapshot()
    slow = dataclasses.replace(
        shown, stats=dataclasses.replace(shown.stats, slow_step=SlowStep(45.2, "step 7, 3 answers"))
    )
    text = " ".join(line.plain.strip() for line in panel(slow, History(), 28, 40))
    assert "one step has taken 45 s so far: step 7, 3 answers" in text
    assert one_line(slow, History(), 80).plain.startswith("one step has taken 45 s")
    assert "one step" not in one_line(shown, History(), 80).plain
