"""Finding messages in all chats, and long chats of which only a part is on the screen."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path

import pytest
from textual.widgets import OptionList

from nanochat.history import History, SearchHit
from nanochat.ui.message import AnswerMessage, UserMessage
from nanochat.ui.search_screen import MAX_LINES, Answered, Found, SearchScreen, rows
from nanochat.ui.transcript import MAX_WINDOW, WINDOW, Transcript
from tests.ui.driver import SHORT, Driver, started


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "data" / "history.db"


def import_chat(file: Path, title: str, texts: list[str], *, as_tab: bool = False) -> None:
    """A chat of these texts, of the user's and the model's in turn."""
    messages = [
        {
            "id": number,
            "parent": number - 1 if number else None,
            "active": True,
            "role": "assistant" if number % 2 else "user",
            "text": text,
            "token_ids": [],
            "created_at": 1.7e9 + number,
        }
        for number, text in enumerate(texts)
    ]
    head = {"format": "nanochat chat", "version": 1, "title": title, "created_at": 1.7e9, "updated_at": 1.7e9}
    with History(file) as history:
        chat_id = history.import_json(json.dumps({**head, "messages": messages}))
        if as_tab:
            history.save_tabs([chat_id], chat_id)


def numbered(count: int) -> list[str]:
    return [f"message {number}" + "\n\nmore lines\n\nof text" * (number % 3) for number in range(count)]


def shown_numbers(driver: Driver) -> list[int]:
    """Numbers of the messages that are widgets, in the order on the page."""
    widgets = driver.pane.query("UserMessage, AnswerMessage")
    messages = [widget.message for widget in widgets if isinstance(widget, (UserMessage, AnswerMessage))]
    texts = [message.text or message.answer.text for message in messages]
    return [int(text.split()[1]) for text in texts if text.startswith("message ")]


def is_in_view(driver: Driver, text: str) -> bool:
    return text in driver.screen_text()


def transcript(driver: Driver) -> Transcript:
    return driver.pane.query_one(Transcript)


class TestSearch:
    async def test_a_message_of_a_closed_chat_is_found_and_shown(self, tiny_llama: Path, file: Path) -> None:
        texts = numbered(300)
        texts[120] += " with the word xylophone"
        import_chat(file, "Music", texts)
        import_chat(file, "Other", ["nothing", "at all"])
        async with started(tiny_llama, history=file, hold=True) as driver:
            await driver.press("f9")
            await driver.until_seen("The chats used last")
            await driver.until_seen("Other")
            await driver.press(*"xyloph")
            await driver.until_seen("1 hit, newest first")
            await driver.until_seen("with the word xylophone")
            await driver.press("enter")
            await driver.until(lambda: driver.chat.title == "Music")
            await driver.until(lambda: is_in_view(driver, "message 120"))
            assert len(shown_numbers(driver)) <= WINDOW + 40
            await driver.press("f9", *"xyloph")
            await driver.until_seen("1 hit, newest first")
            await driver.press("enter")
            await driver.settle()
            assert [chat.title for chat in driver.app.main_screen.workspace.chats].count("Music") == 1

    async def test_it_is_in_view_though_answers_get_their_parts_late(
        self, tiny_llama: Path, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        compose, delays_s = AnswerMessage._compose, itertools.cycle([0.0, 0.05, 0.1, 0.15])

        async def late(self: AnswerMessage) -> None:
            await asyncio.sleep(next(delays_s))
            await compose(self)

        monkeypatch.setattr(AnswerMessage, "_compose", late)
        texts = numbered(60)
        texts[21] += " with the word xylophone"
        import_chat(file, "Music", texts)
        async with started(tiny_llama, history=file, hold=True) as driver:
            await driver.press("f9")
            await driver.press(*"xyloph")
            await driver.until_seen("1 hit, newest first")
            await driver.press("enter")
            await driver.until(lambda: is_in_view(driver, "message 21"))
            await driver.pilot.pause(1.0)
            assert is_in_view(driver, "message 21")

    async def test_a_hit_on_another_branch_goes_there(self, tiny_llama: Path, file: Path) -> None:
        with History(file) as history:
            chat = history.create_chat("Branches")
            question = history.add_message(chat, None, "Q")
            for text in ("the first answer", "the second answer"):
                answer = history.begin_answer(chat, question)
                history.finish_answer(answer, text=text, token_ids=[], finish_reason="stop")
        async with started(tiny_llama, history=file, hold=True) as driver:
            await driver.say("/search first")
            await driver.until_seen("the first answer")
            await driver.until_seen("1 hit")
            await driver.press("enter")
            await driver.until(lambda: driver.chat.title == "Branches")
            await driver.until_seen("‹ 1/2 ›")
        with History(file) as history:
            assert history.path(chat)[1].text == "the first answer"

    async def test_a_chat_is_listed_once_with_its_newest_hits(self, tiny_llama: Path, file: Path) -> None:
        import_chat(file, "Zebras", [f"zebra number {number}" for number in range(6)])
        import_chat(file, "Horses", ["a horse", "no zebra"])
        async with started(tiny_llama, history=file, hold=True) as driver:
            await driver.press("f9", *"zebra")
            await driver.until_seen("8 hits in 2 chats, newest first")
            screen = driver.screen_text()
            assert (screen.count("Zebras"), screen.count("Horses"), screen.count("6 hits")) == (1, 1, 1)
            assert [number for number in range(6) if f"zebra number {number}" in screen] == [3, 4, 5]
            await driver.press("down", "down", "enter")  # after the title, the second of the three
            await driver.until(lambda: driver.chat.title == "Zebras")
            await driver.until(lambda: is_in_view(driver, "zebra number 4"))

    async def test_a_chat_found_by_its_title_opens_as_it_was_left(self, tiny_llama: Path, file: Path) -> None:
        import_chat(file, "zebra or horse", ["zebra or horse", *numbered(60)[1:]])
        async with started(tiny_llama, history=file, hold=True) as driver:
            await driver.press("f9", *"zebra")
            await driver.until_seen("2 hits, newest first")
            await driver.press("enter")
            await driver.until(lambda: driver.chat.title == "zebra or horse")
            await driver.until(lambda: is_in_view(driver, "message 59"))
            await driver.press("f9", *"zebra")
            await driver.until_seen("2 hits, newest first")
            await driver.press("down", "enter")
            await driver.until(lambda: shown_numbers(driver)[:1] == [1])

    async def test_a_found_title_leads_to_no_message_that_is_not_saved_yet(
        self, tiny_llama: Path, file: Path
    ) -> None:
        import_chat(file, "Music", numbered(200), as_tab=True)
        async with started(tiny_llama, history=file, hold=True) as driver:
            await driver.until(lambda: is_in_view(driver, "message 199"))
            driver.chat.path[3].store_id = None
            assert driver.chat.store_id is not None
            driver.app.main_screen.open_saved(Found(driver.chat.store_id, None))
            await driver.settle()
            assert is_in_view(driver, "message 199")

    async def test_the_sentence_tells_how_many_chats_are_shown(self, tiny_llama: Path, file: Path) -> None:
        for number in range(60):
            import_chat(file, f"Chat {number}", ["a zebra", "two zebras"])
        async with started(tiny_llama, history=file, hold=True) as driver:
            await driver.press("f9", *"zebra")
            await driver.until_seen("120 hits in 60 chats, newest first; the first 25 chats are shown.")
            hits = driver.app.screen.query_one(OptionList)
            assert hits.option_count == 50
            await driver.press(*["backspace"] * 5)
            await driver.until_seen("The chats used last")
            assert hits.option_count == MAX_LINES

    def test_no_chat_is_cut_in_two(self) -> None:
        hits = [
            SearchHit(
                chat_id=chat_id,
                chat_title=f"Chat {chat_id}",
                message_id=chat_id * 3 + number,
                role="user",
                created_at=0.0,
                snippet="zebra",
                spans=(),
            )
            for chat_id in range(40)
            for number in range(3)
        ]
        listed = rows(hits)
        assert len(listed) == MAX_LINES - MAX_LINES % 3
        assert sum(row.num_hits for row in listed if row.is_first) == len(listed)

    async def test_nothing_found_and_leaving(self, tiny_llama: Path, file: Path) -> None:
        async with started(tiny_llama, history=file, hold=True) as driver:
            await driver.press("f9", *"zzz")
            await driver.until_seen("Nothing found")
            await driver.press("enter", "down", "escape")
            assert not isinstance(driver.app.screen, SearchScreen)
            assert driver.prompt.has_focus

    async def test_what_is_found_when_the_search_is_closed_is_of_no_use(
        self, tiny_llama: Path, file: Path
    ) -> None:
        async with started(tiny_llama, history=file, hold=True) as driver:
            await driver.press("f9")
            await driver.until_seen("The chats used last")
            screen = driver.app.screen
            assert isinstance(screen, SearchScreen)
            await driver.press("escape")
            await driver.until(lambda: driver.app.screen is driver.app.main_screen)
            screen.on_answered(Answered(screen._number, []))

    async def test_hits_are_shown_without_the_markup_and_codes_they_hold(
        self, tiny_llama: Path, file: Path
    ) -> None:
        import_chat(file, "[red]T\x1b[2J", ["find [bold]me[/] \x1b]0;title\x07", "x"])
        async with started(tiny_llama, history=file, hold=True) as driver:
            await driver.press("f9", *"find")
            await driver.until_seen("[bold]me[/]")
            assert "[red]T␛[2J" in driver.screen_text()
            assert "\x1b" not in driver.screen_text()


class TestLongChats:
    async def test_only_messages_near_the_view_are_widgets(self, tiny_llama: Path, file: Path) -> None:
        import_chat(file, "Long", numbered(2000), as_tab=True)
        async with started(tiny_llama, history=file, hold=True) as driver:
            await driver.until(lambda: is_in_view(driver, "message 1999"))
            assert len(shown_numbers(driver)) <= WINDOW + 20
            assert len(driver.chat.path) == 2000

    async def test_scrolling_up_brings_older_messages_and_nothing_jumps(
        self, tiny_llama: Path, file: Path
    ) -> None:
        import_chat(file, "Long", numbered(120), as_tab=True)
        async with started(tiny_llama, history=file, hold=True) as driver:
            await driver.until(lambda: is_in_view(driver, "message 119"))
            seen: list[int] = []
            for _ in range(80):
                rows = driver.screen_text()
                seen += [number for number in range(120) if f"message {number}\n" in rows.replace(" ", "\n")]
                await driver.press("pageup")
                await driver.settle()
                assert shown_numbers(driver) == sorted(shown_numbers(driver))
                assert len(shown_numbers(driver)) <= MAX_WINDOW
                if 0 in shown_numbers(driver) and transcript(driver).scroll_y == 0:
                    break
            assert shown_numbers(driver)[0] == 0
            for _ in range(100):
                await driver.press("pagedown")
                await driver.settle()
                assert len(shown_numbers(driver)) <= MAX_WINDOW
                if is_in_view(driver, "message 119"):
                    break
            assert shown_numbers(driver)[-1] == 119

    async def test_what_is_in_view_stays_when_messages_come_above(self, tiny_llama: Path, file: Path) -> None:
        import_chat(file, "Long", numbered(200), as_tab=True)
        async with started(tiny_llama, history=file, hold=True) as driver:
            await driver.until(lambda: is_in_view(driver, "message 199"))
            view = transcript(driver)
            first = shown_numbers(driver)[0]
            view.scroll_to(y=12, animate=False, immediate=True)
            widgets = view.query("UserMessage, AnswerMessage")
            fixed = next(widget for widget in widgets if widget.virtual_region.y >= view.scroll_y)
            place = fixed.virtual_region.y - view.scroll_y
            await driver.until(lambda: shown_numbers(driver)[0] < first)
            await driver.until(lambda: fixed.virtual_region.y - view.scroll_y == place)
            await driver.settle()
            assert fixed.virtual_region.y - view.scroll_y == place

    async def test_a_message_sent_from_far_up_is_shown_at_the_end(self, tiny_llama: Path, file: Path) -> None:
        import_chat(file, "Long", numbered(20), as_tab=True)
        sampling = SHORT | {"max_tokens": 4}
        async with started(tiny_llama, history=file, sampling=sampling) as driver:
            await driver.until(lambda: is_in_view(driver, "message 19"))
            for _ in range(10):
                await driver.press("pageup")
            await driver.say("My new question")
            await driver.until_seen("My new question")
            await driver.until_idle()
            assert driver.pane.query(AnswerMessage).last().message is driver.chat.last_answer

    async def test_a_branch_far_up_is_walked_without_losing_the_place(
        self, tiny_llama: Path, file: Path
    ) -> None:
        import_chat(file, "Long", numbered(100), as_tab=True)
        async with started(tiny_llama, history=file, hold=True) as driver:
            await driver.until(lambda: is_in_view(driver, "message 99"))
            from nanochat.ui.chat import Message

            chat = driver.chat
            other = Message("user", "another message 40")
            parent = chat.path[39]
            parent.children.append(other)
            other.parent = parent
            driver.app.main_screen._step_branch(chat, chat.path[40], 1)
            await driver.until_seen("another message 40")
            await driver.press("alt+left")
            await driver.until(lambda: is_in_view(driver, "message 40"))
            assert len(chat.path) == 100
