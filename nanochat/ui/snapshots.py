"""From a backend's statistics to what tabs, footers and the panel show. Pure but for the chats' live state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nanochat.backend.stats import BackendStats
from nanochat.engine.stats import BlockMap, RequestRow, RequestState
from nanochat.ui.chat import Chat, Phase
from nanochat.ui.stats_panel import Snapshot, TabRow

LONG_PREFILL = 256
"""Progress is shown for prompts with this many tokens at least; shorter ones are read in a moment."""

_PHASES: dict[RequestState, Phase] = {
    "queued": Phase.QUEUED,
    "prefill": Phase.PREFILL,
    "decode": Phase.DECODE,
    "preempted": Phase.PREEMPTED,
}


def update_phases(
    chats: Sequence[Chat], chat_ids: Mapping[int, int], stats: BackendStats
) -> dict[int, RequestRow]:
    """Bring each busy chat's phase up to date; returns the engine's rows by chat id.

    ``chat_ids`` maps live request ids to chat ids.
    """
    rows = {chat_ids[row.request_id]: row for row in stats.requests if row.request_id in chat_ids}
    for chat in chats:
        row = rows.get(chat.id)
        if row is None or not chat.is_busy:
            continue
        chat.phase = _PHASES[row.state]
        chat.live_rate = row.decode_tok_s
        is_prefill = chat.phase is Phase.PREFILL and row.prefill_total >= LONG_PREFILL
        chat.prefill_progress = row.prefill_done / row.prefill_total if is_prefill else None
        chat.prefill_tokens = (row.prefill_done, row.prefill_total) if is_prefill else None
    return rows


def take_snapshot(
    chats: Sequence[Chat],
    active: Chat,
    slots: Mapping[int, int],
    chat_ids: Mapping[int, int],
    rows: Mapping[int, RequestRow],
    stats: BackendStats,
    block_map: BlockMap | None,
    context_limit: int | None,
) -> Snapshot:
    """What the panel shows now. ``slots`` maps chat ids to tab colours."""
    return Snapshot(
        stats=stats,
        block_map=block_map,
        slots={request_id: slots[chat_id] for request_id, chat_id in chat_ids.items() if chat_id in slots},
        tabs=tuple(
            _tab_row(chat, number, slots[chat.id], rows.get(chat.id), chat is active)
            for number, chat in enumerate(chats, 1)
        ),
        context_tokens=context_tokens(active, rows.get(active.id)),
        context_limit=context_limit,
    )


def context_tokens(chat: Chat, row: RequestRow | None) -> int:
    """Tokens of a chat's context: of its live request, or else after its last answer."""
    return row.context_tokens if row is not None else chat.context_tokens


def _tab_row(chat: Chat, number: int, slot: int, row: RequestRow | None, is_active: bool) -> TabRow:
    last = chat.last_answer
    metrics = last.output.metrics if last is not None and last.output is not None else None
    if row is not None:
        ttft_s, rate = row.ttft_s, row.decode_tok_s
    elif metrics is not None:
        ttft_s, rate = metrics.ttft_s, metrics.decode_tok_s
    else:
        ttft_s = rate = None
    return TabRow(
        number=number,
        slot=slot,
        state=state_label(chat),
        context_tokens=context_tokens(chat, row),
        ttft_s=ttft_s,
        rate=rate,
        is_active=is_active,
        is_alarming=chat.phase is Phase.PREEMPTED or chat.has_failed,
    )


def state_label(chat: Chat) -> str:
    """A chat's state in a word."""
    if chat.phase is Phase.PREFILL and chat.prefill_progress is not None:
        return f"prefill {100 * chat.prefill_progress:.0f} %"
    if chat.is_busy:
        return "waiting" if chat.phase in (Phase.LOADING, Phase.SUBMITTED) else chat.phase.value
    if chat.has_failed:
        return "failed"
    return "done" if chat.is_unread else "idle"


def busy_label(stats: BackendStats | None) -> str:
    """``3 running · 1 queued``; empty when nothing runs."""
    if stats is None:
        return ""
    parts = [f"{stats.running} running"] if stats.running else []
    parts += [f"{stats.waiting} queued"] if stats.waiting else []
    return " · ".join(parts)
