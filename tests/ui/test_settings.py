"""A chat's own settings: commands, presets, the dialog, themes and motion, the model's particulars."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
from textual.widgets import Input, Select

from nanochat.errors import InvalidOption
from nanochat.settings import AppSettings, Preset
from nanochat.ui.line_input import TextInput
from nanochat.ui.sampling_commands import parse_setting, parse_settings, parse_value, show_value
from nanochat.ui.settings_dialog import HELP, SettingsDialog
from nanochat.ui.theme import THEMES
from tests.tiny_model import write_tiny_llama
from tests.ui.driver import ENDLESS, LONG, started


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("temperature 0.2", ("temperature", 0.2)),
        ("temperature=0.2", ("temperature", 0.2)),
        ("max-tokens = 8", ("max_tokens", 8)),
        ("stop a=b | ### ", ("stop", ("a=b", "###"))),
        ("stop é\\n", ("stop", ("é\n",))),
        ("stop \\\\n", ("stop", ("\\n",))),
        ("seed default", ("seed", None)),
    ],
)
def test_settings_are_read(text: str, setting: tuple[str, object]) -> None:
    assert parse_setting(text) == setting


@pytest.mark.parametrize("text", ["", "temperature", "logprobs 3", "top_k 1.5", "temperature hot", "=3"])
def test_what_is_no_setting(text: str) -> None:
    with pytest.raises(InvalidOption):
        parse_setting(text)


def test_values_are_shown_as_they_are_written() -> None:
    for name, value in (("stop", ("a\n", "b\\n", "\t")), ("temperature", 0.25), ("seed", 7)):
        assert parse_value(name, show_value(name, value)) == value


def test_several_settings_at_once() -> None:
    assert parse_settings("temperature=0 top-p=0.5 seed=default") == {"temperature": 0.0, "top_p": 0.5}


async def test_every_sampling_setting_reaches_the_engine(tiny_llama: Path) -> None:
    written = {
        "temperature": "0.5",
        "top_p": "0.9",
        "top_k": "7",
        "min_p": "0.1",
        "repetition_penalty": "1.1",
        "max_tokens": "5",
        "stop": "END | ###",
        "seed": "3",
    }
    async with started(tiny_llama) as driver:
        bridge = driver.app.main_screen.bridge
        assert bridge is not None
        seen = []
        submit = bridge.backend.engine.submit
        bridge.backend.engine.submit = lambda ids, params, **rest: (
            seen.append(params) or submit(ids, params, **rest)
        )  # type: ignore[method-assign]
        for name, value in written.items():
            await driver.say(f"/set {name} {value}")
        await driver.ask("Hello")
        (params,) = seen
        assert {name: show_value(name, getattr(params, name)) for name in written} == written


async def test_the_dialog_shows_and_changes_the_settings(tiny_llama: Path) -> None:
    async with started(tiny_llama, sampling={"temperature": 0.3}) as driver:
        await driver.say("/set top_k 5")
        await driver.press("f7")
        dialog = driver.app.screen
        assert isinstance(dialog, SettingsDialog)
        assert dialog.query_one("#top_k", Input).value == "5"
        assert dialog.query_one("#temperature", Input).placeholder == "0.3"
        assert dialog.query_one("#temperature", Input).has_focus
        await driver.press(*"hot", "enter")
        assert driver.app.screen is dialog
        await driver.until_seen("temperature must be a number")
        await driver.press("backspace", "backspace", "backspace", *"0.9")
        dialog.query_one("#system", TextInput).text = "Be brief.\nAlways."
        dialog.query_one("#top_k", Input).value = ""
        await driver.press("ctrl+s")
        await driver.until(lambda: driver.app.screen is not dialog)
        assert driver.chat.sampling == {"temperature": 0.9}
        assert driver.chat.system == "Be brief.\nAlways."
        assert "temperature 0.9 (this chat)" in driver.notices()[-1]
        await driver.press("f7")
        await driver.until_seen("Always.")
        await driver.press("escape")
        assert driver.chat.sampling == {"temperature": 0.9}


async def test_presets_by_command_and_in_the_dialog(tiny_llama: Path) -> None:
    presets = {"precise": Preset("Only facts.", {"temperature": 0.0}), "wild": Preset(None, {"top_k": 50})}
    async with started(tiny_llama, presets=presets) as driver:
        await driver.say("/preset")
        assert "precise, wild" in driver.notices()[-1]
        await driver.say("/preset nosuch")
        assert "no preset" in driver.notices()[-1]
        await driver.say("/set seed 4")
        await driver.say("/preset precise")
        assert (driver.chat.system, driver.chat.sampling) == ("Only facts.", {"temperature": 0.0})
        await driver.say("/settings")
        await driver.until(lambda: driver.app.screen.query("SelectOverlay"))
        driver.app.screen.query_one(Select).value = "wild"
        await driver.settle()
        await driver.press("ctrl+s")
        await driver.settle()
        assert (driver.chat.system, driver.chat.sampling) == ("Only facts.", {"top_k": 50})


async def test_settings_and_presets_that_cannot_work_change_nothing(tiny_llama: Path) -> None:
    async with started(tiny_llama, presets={"bad": Preset(None, {"top_p": 7})}) as driver:
        await driver.say("/set temperature 9")
        assert "temperature must be a number at least 0 and at most 2, not 9" in driver.notices()[-1]
        await driver.say("/compare temperature=0 | temperature=9")
        assert "temperature must be a number at least 0 and at most 2, not 9" in driver.notices()[-1]
        await driver.say("/preset bad")
        assert "top_p must be" in driver.notices()[-1]
        assert driver.chat.sampling == {}


async def test_the_system_prompt_can_be_taken_away(tiny_llama: Path) -> None:
    async with started(tiny_llama, hold=True, system="Be brief.") as driver:
        await driver.say("/system none")
        assert driver.chat.system is None


async def test_the_model_is_described(tiny_llama: Path) -> None:
    async with started(tiny_llama) as driver:
        await driver.say("/model")
        assert "tiny-llama on cpu" in driver.notices()[-1]
        assert "512 blocks of 16 tokens" in driver.notices()[-1]


async def test_themes_follow_one_another_or_are_named(tiny_llama: Path) -> None:
    async with started(tiny_llama, hold=True, look=AppSettings(theme="light")) as driver:
        seen = [driver.app.theme]
        for command in ("/theme", "/theme", "/theme light"):
            await driver.say(command)
            seen.append(driver.app.theme)
        assert seen == [f"nanochat-{name}" for name in ("light", "contrast", "dark", "light")]
        await driver.say("/theme pink")
        await driver.until_told("there are dark, light, contrast")


def _luminance(colour: str) -> float:
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one: str, other: str) -> float:
    """WCAG's contrast ratio of two colours."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.name)
def test_text_can_be_read_in_every_theme(theme) -> None:
    grounds = [theme.background, theme.surface, theme.panel]
    texts = [theme.foreground, theme.primary, theme.accent, theme.success, theme.warning, theme.error]
    texts += [theme.variables["muted"], *(theme.variables[f"tab-{number}"] for number in range(1, 10))]
    for text in texts:
        assert min(_contrast(text, ground) for ground in grounds[:2]) >= 4.0
        assert _contrast(text, grounds[2]) >= 3.5
    assert _contrast(theme.foreground, theme.background) >= 10


async def test_reduced_motion_turns_animation_off(tiny_llama: Path) -> None:
    async with started(tiny_llama, hold=True, look=AppSettings(reduced_motion=True)) as driver:
        assert driver.app.animation_level == "none"


async def test_the_panel_starts_in_the_size_that_was_chosen(tiny_llama: Path) -> None:
    async with started(tiny_llama, look=AppSettings(panel="off")) as driver:
        assert not driver.app.query_one("StatsPanel").display
        assert not driver.app.query_one("StatsLine").display


@pytest.mark.parametrize("is_set", [False, True])
async def test_no_color_leaves_only_greys(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, is_set: bool
) -> None:
    monkeypatch.setenv("NO_COLOR", "1") if is_set else monkeypatch.delenv("NO_COLOR", raising=False)
    async with started(tiny_llama, hold=True) as driver:
        strips = driver.app.screen._compositor.render_strips()
        styles = [segment.style for strip in strips for segment in strip]
        for part in ("color", "bgcolor"):
            colours = [getattr(style, part) for style in styles if style]
            triplets = {colour.triplet for colour in colours if colour and colour.triplet}
            assert len(triplets) > 1
            assert all(red == green == blue for red, green, blue in triplets) == is_set, part


async def test_another_model_takes_over_with_the_chats_so_far(tiny_llama: Path, tmp_path: Path) -> None:
    other = write_tiny_llama(tmp_path / "other-llama", seed=3)
    async with started(tiny_llama) as driver:
        first = await driver.ask("Hello")
        old = weakref.ref(driver.app.main_screen.bridge.backend.engine)
        await driver.say(f"/model {other}")
        await driver.until_seen("other-llama · cpu")
        again = await driver.ask("Hello")
        assert [message.model for message in driver.chat.path[1::2]] == ["tiny-llama", "other-llama"]
        assert driver.chat.path[1].output.text == first
        assert again != first
        gc.collect()
        assert old() is None, "the model that was loaded before still takes memory"


async def test_a_question_meanwhile_waits_for_the_other_model(tiny_llama: Path, tmp_path: Path) -> None:
    other = write_tiny_llama(tmp_path / "other-llama", seed=3)
    async with started(tiny_llama) as driver:
        driver.prompt.text = f"/model {other}"
        await driver.press("enter")
        await driver.say("Early")
        await driver.until_idle()
        assert driver.chat.path[1].model == "other-llama"
        assert driver.answer_text()


async def test_a_model_that_cannot_be_loaded_leaves_the_one_before(tiny_llama: Path, tmp_path: Path) -> None:
    async with started(tiny_llama) as driver:
        await driver.say(f"/model {tmp_path / 'nosuch'}")
        await driver.until(lambda: any("nosuch" in notice for notice in driver.notices()))
        await driver.until_ready()
        await driver.until_seen("tiny-llama · cpu")
        await driver.ask("Hello")
        assert driver.app.load_error is None


async def test_the_model_stays_while_a_chat_answers(long_llama: Path) -> None:
    async with started(long_llama, sampling=ENDLESS, **LONG) as driver:
        await driver.say("Go")
        await driver.say("/model default")
        await driver.until_told("1 chat still answering")
        assert driver.app.main_screen.bridge is not None


async def test_another_model_can_be_chosen_where_one_could_not_be_loaded(
    tiny_llama: Path, tmp_path: Path
) -> None:
    async with started(tmp_path / "nosuch", hold=True) as driver:
        driver.load()
        await driver.until_seen("/model NAME loads another")
        first = driver.app._loader
        await driver.say("/model")  # the same once more
        await driver.until(lambda: driver.app._loader is not first and driver.app.load_error)
        assert "nosuch" in str(driver.app.load_error)
        await driver.say(f"/model {tmp_path / 'neither'}")
        await driver.until(lambda: driver.app.load_error and "neither" in driver.app.load_error)
        await driver.say(f"/model {tiny_llama}")
        await driver.until_ready()
        assert await driver.ask("Hello")
        assert driver.app.load_error is None


async def test_without_a_model_no_answer_is_waited_for(tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "history.db"
    async with started(tiny_llama, history=file) as driver:
        await driver.ask("Hello")
    async with started(tmp_path / "nosuch", history=file, hold=True) as driver:
        driver.load()
        await driver.until(lambda: driver.app.load_error)
        await driver.until(lambda: driver.chat.path)
        await driver.until(lambda: any("/model NAME" in notice for notice in driver.notices()))
        for command in ("/again", "/continue", "/broadcast More", "/compare top_k=1 | top_k=2", "More"):
            driver.app.clear_notifications()
            driver.app.main_screen._told.clear()
            await driver.say(command)
            await driver.until_told("still no model")
        assert len(driver.app.main_screen.workspace.chats) == 1
        assert len(list(driver.chat.messages())) == 2
        assert not driver.chat.is_busy


async def test_the_dialog_keeps_what_it_has_no_field_for(tiny_llama: Path) -> None:
    presets = {"on": Preset(None, {"ignore_eos": True}), "off": Preset(None, {"top_k": 5})}
    async with started(tiny_llama, presets=presets) as driver:
        await driver.say("/preset on")
        for chosen, sampling in (
            (None, {"ignore_eos": True}),
            ("off", {"top_k": 5}),
            ("on", {"ignore_eos": True}),
        ):
            await driver.say("/settings")
            await driver.until(lambda: driver.app.screen.query("SelectOverlay"))
            if chosen is not None:
                driver.app.screen.query_one(Select).value = chosen
            await driver.settle()
            await driver.press("ctrl+s")
            await driver.settle()
            assert driver.chat.sampling == sampling


async def test_the_dialog_says_all_it_has_to_say_in_80_columns(tiny_llama: Path) -> None:
    async with started(tiny_llama, size=(80, 24)) as driver:
        await driver.press("f7")
        await driver.until_seen("Settings of this chat")
        screen = driver.screen_text()
        assert [hint for hint in HELP.values() if hint not in screen] == []
        assert "Cancel" in screen


async def test_the_settings_can_be_used_before_the_model_is_ready(tiny_llama: Path) -> None:
    async with started(tiny_llama, hold=True, sampling={"temperature": 0.3}) as driver:
        await driver.press("f7")
        dialog = driver.app.screen
        assert isinstance(dialog, SettingsDialog)
        assert dialog.query_one("#temperature", Input).placeholder == "0.3"
        assert dialog.query_one("#top_p", Input).placeholder == "the model's"
        dialog.query_one("#max_tokens", Input).value = "3"
        await driver.press("ctrl+s")
        await driver.until(lambda: driver.app.screen is not dialog)
        assert "max_tokens 3 (this chat)" in driver.notices()[-1]
        assert driver.notices()[-1].endswith("the rest as the model has it.")
        await driver.say("/set top_p 7")
        assert "top_p must be" in driver.notices()[-1]
        await driver.say("/set seed 5")
        assert driver.chat.sampling == {"max_tokens": 3, "seed": 5}
        driver.load()
        await driver.ask("Hello")
        assert driver.chat.path[-1].output.metrics.completion_tokens <= 3


async def test_settings_applied_as_they_are_change_and_note_nothing(tiny_llama: Path) -> None:
    async with started(tiny_llama) as driver:
        chat = driver.chat
        chat.system, chat.sampling = " Be brief.\n", {"temperature": 0.12345678901234, "stop": ("a\n", "b")}
        told = len(chat.notes)
        await driver.press("f7")
        await driver.until_seen("Settings of this chat")
        await driver.press("ctrl+s")
        await driver.until_told("as they were")
        assert len(chat.notes) == told
        assert (chat.system, chat.sampling) == (
            " Be brief.\n",
            {"temperature": 0.12345678901234, "stop": ("a\n", "b")},
        )


async def test_without_a_model_the_error_is_told_once_and_the_text_is_kept(tmp_path: Path) -> None:
    async with started(tmp_path / "nosuch", hold=True) as driver:
        driver.load()
        await driver.until(lambda: driver.app.load_error)
        await driver.say("First")
        await driver.until(lambda: driver.notices())
        await driver.press("enter")
        await driver.until_told("There is still no model to answer: /model tries again")
        await driver.press("enter")
        await driver.settle()
        assert sum("still no model" in told.message for told in driver.app._notifications) == 1
        assert sum("nosuch" in notice for notice in driver.notices()) == 1
        assert "/model NAME loads another" in driver.notices()[-1]
        assert driver.prompt.text == "First"
