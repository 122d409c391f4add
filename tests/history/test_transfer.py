"""Export and import: what comes back, and what a hostile file can't do."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from nanochat.errors import HistoryError
from nanochat.history import History
from nanochat.history import transfer as transfer_module


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def branched(history: History) -> int:
    chat_id = history.create_chat(
        "Trip", system="Be brief.", model="tiny", sampling={"stop": ["x"], "seed": 3}
    )
    question = history.add_message(chat_id, None, "Where to?\x1b[31m")
    for number, text in enumerate(("Hawaii 火山", "```python\nprint(1)")):
        message_id = history.begin_answer(chat_id, question, "tiny")
        metrics = {"ttft_s": 0.0412, "decode_tok_s": 118.4, "prompt_tokens": 1060, "preemptions": number}
        history.finish_answer(
            message_id, text=text, token_ids=[7, 2**31], finish_reason="length", metrics=metrics
        )
        history.add_message(chat_id, message_id, f"More {number}")
    history.configure_chat(
        chat_id, system="Be brief.", model="tiny", sampling={"stop": ["x"], "seed": 3}, left_out_id=message_id
    )
    return chat_id


def test_json_brings_back_everything_but_the_ids(history: History) -> None:
    chat_id = branched(history)
    history.activate(history.tree(chat_id)[1].id)
    exported = history.export_json(chat_id)
    copy_id = history.import_json(exported)
    assert copy_id != chat_id
    assert history.export_json(copy_id) == exported
    assert history.export_json(history.import_json(exported.encode())) == exported
    assert [m.text for m in history.path(copy_id)] == ["Where to?\x1b[31m", "Hawaii 火山", "More 0"]
    assert not {m.id for m in history.tree(copy_id)} & {m.id for m in history.tree(chat_id)}
    assert len(history.search("火山")) == 3


@pytest.mark.parametrize(("dropped", "number"), [(0, None), (1, 2), (2, 4), (9, 4)])
def test_turns_left_out_by_number_in_an_older_file(
    history: History, dropped: int, number: int | None
) -> None:
    chat_id = history.create_chat("Chat")
    end: int | None = None
    for turn in range(3):
        end = history.begin_answer(chat_id, history.add_message(chat_id, end, str(turn)))
    content = json.loads(history.export_json(chat_id))
    assert content.pop("left_out") is None
    copy_id = history.import_json(json.dumps(content | {"dropped_turns": dropped}))
    ids = [None, *(message.id for message in history.path(copy_id))]
    assert history.chat(copy_id).left_out_id == ids[number or 0]


def test_json_holds_no_raw_control_character(history: History) -> None:
    chat_id = history.create_chat("\x9b31m\x7f")
    exported = history.export_json(chat_id)
    assert exported.removesuffix("\n").isprintable()
    assert json.loads(exported)["title"] == "\x9b31m\x7f"


def test_markdown(history: History) -> None:
    chat_id = branched(history)
    history.chat(chat_id)
    lines = history.export_markdown(chat_id).split("\n")
    assert lines[0] == "# Trip"
    assert lines[2].startswith("*tiny · 20")
    footer = "*tiny · TTFT 0.041 s · 118 tok/s · prompt 1,060 · preempted ×1 · length*"
    assert "\n".join(lines[4:]) == (
        "> Be brief.\n\n## You\n\nWhere to?␛[31m\n\n"
        f"## Assistant\n\n```python\nprint(1)\n```\n\n{footer}\n\n## You\n\nMore 1\n"
    )


def test_an_answer_that_streams_is_exported_as_interrupted(history: History) -> None:
    chat_id = history.create_chat("Chat")
    history.grow_answer(history.begin_answer(chat_id, None), "half")
    assert history.path(history.import_json(history.export_json(chat_id)))[0].state == "interrupted"


def minimal(**changes: Any) -> dict[str, Any]:
    message = {"id": 5, "parent": None, "role": "user", "text": "Hi", "created_at": 1.0}
    content: dict[str, Any] = {"format": "nanochat chat", "version": 1, "title": "T", "messages": [message]}
    content |= {"created_at": 1, "updated_at": 2.5}
    for key, value in changes.items():
        (message if key in ("id", "parent", "role", "text", "state") or key.startswith("m_") else content)[
            key.removeprefix("m_")
        ] = value
    return content


def test_what_may_be_left_out(history: History) -> None:
    (message,) = history.tree(history.import_json(json.dumps(minimal())))
    assert (message.state, message.token_ids, message.metrics, message.finished_at) == (
        "complete",
        (),
        {},
        None,
    )


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("{", "isn't valid JSON"),
        (b"\xff\xfe\xfd", "isn't valid JSON"),
        ('{"a": NaN}', "isn't valid JSON"),
        ('{"a": ' + "9" * 5000 + "}", "isn't valid JSON"),
        ("[]", "must be a JSON object"),
        ("{}", "isn't a chat that nanochat exported"),
        (minimal(version=2), "it has format version 2"),
        (minimal(version="9" * 100), "it has format version 99999999999999999999,"),
        (minimal(title=3), '"title" of the chat must be text'),
        (minimal(title="x" * 1001), '"title" of the chat must be text of at most 1,000'),
        (minimal(system=["x"]), '"system" of the chat must be text'),
        (minimal(sampling={"stop": [[]]}), '"sampling" of the chat must be an object of'),
        (minimal(sampling={"a": {"b": 1}}), '"sampling" of the chat'),
        (minimal(sampling={str(number): 1 for number in range(101)}), '"sampling" of the chat'),
        (minimal(sampling={"seed": 10**30}), '"sampling" of the chat'),
        (minimal(dropped_turns=-1), '"dropped_turns" of the chat'),
        (minimal(left_out=9), '"left_out" of the chat must be the id of a message'),
        (minimal(left_out=[]), '"left_out" of the chat must be the id of a message'),
        (minimal(created_at=True), '"created_at" of the chat must be a time'),
        (minimal(updated_at=1e300), '"updated_at" of the chat must be a time'),
        (minimal(messages={}), '"messages" of the chat must be a list'),
        (minimal(messages=[None]), "message 1 must be a JSON object"),
        (minimal(messages=[minimal()["messages"][0]] * 2), '"id" of message 2 must be a whole number'),
        (minimal(id=True), '"id" of message 1'),
        (minimal(parent=5), '"parent" of message 1 must be the id of an earlier message'),
        (minimal(role="system"), '"role" of message 1 must be one of user, assistant'),
        (minimal(role=["user"]), '"role" of message 1'),
        (minimal(state="done"), '"state" of message 1'),
        (minimal(text=None), '"text" of message 1'),
        (minimal(m_token_ids="abc"), '"token_ids" of message 1'),
        (minimal(m_token_ids=[2**32]), '"token_ids" of message 1'),
        (minimal(m_token_ids=[1.0]), '"token_ids" of message 1'),
        (minimal(m_token_ids=[True]), '"token_ids" of message 1'),
        (minimal(m_created_at="now"), '"created_at" of message 1'),
        (minimal(m_finished_at=-1), '"finished_at" of message 1'),
    ],
)
def test_refuses(history: History, data: str | bytes | dict[str, Any], sentence: str) -> None:
    with pytest.raises(HistoryError) as caught:
        history.import_json(data if isinstance(data, (str, bytes)) else json.dumps(data))
    assert sentence in str(caught.value)
    assert len(str(caught.value)) < 300
    assert history.list_chats() == []


def test_refuses_infinity_written_as_a_number(history: History) -> None:
    data = json.dumps(minimal(m_metrics={"a": 7})).replace("7", "1e999")
    with pytest.raises(HistoryError, match='"metrics" of message 1'):
        history.import_json(data)


def test_refuses_large_files(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_module, "MAX_FILE_BYTES", 2**20)
    with pytest.raises(HistoryError, match="the limit is 1 MiB"):
        history.import_json(b" " * (2**20 + 1))


def test_a_time_far_ahead_can_be_shown(history: History) -> None:
    content = minimal(created_at=transfer_module.MAX_TIME, updated_at=transfer_module.MAX_TIME)
    assert "2200-01-01" in history.export_markdown(history.import_json(json.dumps(content)))


def test_lone_surrogates_never_reach_the_database(history: History) -> None:
    content = minimal(title="\ud800", text="\udfff", sampling={"\ud800": "\udfff"})
    chat_id = history.import_json(json.dumps(content))
    history.export_json(chat_id).encode()
    assert history.chat(chat_id).title == "\ufffd"
