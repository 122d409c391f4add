"""Two apps on one history: nothing is lost, nothing is mixed."""

from __future__ import annotations

from pathlib import Path

from tests.ui.driver import ENDLESS, LONG, started
from tests.ui.test_history import saved_paths, streaming, tabs


async def test_two_instances_at_once_keep_their_own_chats(tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "history.db"
    async with (
        started(tiny_llama, history=file) as one,
        started(tiny_llama, history=file) as other,
    ):
        for turn in range(3):
            await one.say(f"one {turn}")
            await other.say(f"other {turn}")
            await one.until_idle()
            await other.until_idle()
        assert (tabs(one), tabs(other)) == (["one 0"], ["other 0"])
    paths = saved_paths(file)
    for name in ("one", "other"):
        questions = [message.text for message in paths[f"{name} 0"] if message.role == "user"]
        assert questions == [f"{name} {turn}" for turn in range(3)]
        assert all(message.state == "complete" for message in paths[f"{name} 0"])
    async with started(tiny_llama, history=file) as driver:
        assert tabs(driver) == ["one 0", "other 0"]


async def test_an_answer_that_another_instance_is_writing_is_left_to_it(
    tiny_llama: Path, long_llama: Path, tmp_path: Path
) -> None:
    file = tmp_path / "history.db"
    async with started(long_llama, history=file, sampling=ENDLESS, **LONG) as one:
        await one.say("Go")
        await streaming(one)
        async with started(tiny_llama, history=file) as other:
            await other.say("/search Go")
            await other.until_seen("newest first")
            await other.press("enter")
            await other.until(lambda: other.chat.title == "Go")
            await other.until_seen("another nanochat was still writing this")
            await other.say("/continue")
            await other.until_told("nothing to continue")
            assert not other.chat.is_busy
        await one.press("escape")
        await one.until_idle()
        text = one.answer_text()
    assert saved_paths(file)["Go"][1].text == text
