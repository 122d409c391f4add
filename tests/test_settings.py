"""The settings file: what it may say, and what wins over what."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from nanochat import settings as settings_module
from nanochat.engine.config import EngineConfig, SamplingParams
from nanochat.errors import InvalidOption
from nanochat.settings import SAMPLING_OPTIONS, AppSettings, Preset, Settings, load_settings
from nanochat.settings_example import SAMPLES, example


def write(folder: Path, text: str) -> Path:
    file = folder / "config.toml"
    file.write_text(text)
    return file


def test_command_line_wins_over_file_over_default(tmp_path: Path) -> None:
    settings = load_settings(
        write(tmp_path, 'system = "Be brief."\n[engine]\nkv_dtype = "int8"\nblock_size = 32\n')
    )
    config = settings.engine_config({"block_size": 8})
    assert (config.kv_dtype, config.block_size, config.max_num_seqs) == ("int8", 8, 64)
    assert settings.system == "Be brief."


def test_sampling_merges_model_file_and_command_line(tmp_path: Path) -> None:
    settings = load_settings(write(tmp_path, "[sampling]\ntop_k = 5\n"))
    params = settings.sampling_params({"temperature": 0.6, "top_k": 20}, {"seed": 1})
    assert (params.temperature, params.top_k, params.seed) == (0.6, 5, 1)


def test_no_default_file_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert load_settings() == Settings()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[engine\n", "isn't valid TOML"),
        ("system = " + "[" * 5_000, "isn't valid TOML"),
        ("system = 1" + "0" * 5_000, "isn't valid TOML"),
        ("[sampling]\nstop = 5\n", "stop must be one or more texts"),
        ('[engine]\nprefix_caching = "no"\n', "prefix_caching must be true or false"),
        ("[engine]\nblocksize = 3\n", '[engine] "blocksize" in'),
        ("colour = 1\n", '"colour" in'),
        ("[engine]\nblock_size = 0\n", "block_size must be a whole number"),
        ("engine = 3\n", "must be a table"),
        ("system = 3\n", "must be text"),
        ("[sampling]\nlogprobs = 3\n", '[sampling] "logprobs" in'),
        ("[sampling]\ntop_p = 7\n", "[sampling] top_p must be"),
        ('[app]\ntheme = "pink"\n', "[app] theme must be one of dark, light, contrast"),
        ('[app]\nreduced_motion = "yes"\n', "[app] reduced_motion must be true or false"),
        ("[app]\nscreenshot_folder = 3\n", "[app] screenshot_folder must be text"),
        ("[app]\ncolour = 3\n", '[app] "colour" in'),
        ("presets = 3\n", "must be a table"),
        ("[presets]\nbrief = 3\n", '"presets.brief" in'),
        ("[presets.brief]\nsystem = 3\n", "[presets.brief] system must be text"),
        ("[presets.brief]\ntop_p = 7\n", "[presets.brief] top_p must be"),
        ("[presets.brief]\ntopp = 7\n", '[presets.brief] "topp" in'),
        ("[keys]\nquit = 3\n", "[keys] quit must be the name of a key"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        load_settings(write(tmp_path, text))
    assert sentence in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_named_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="check the path given to --config"):
        load_settings(tmp_path / "none.toml")


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="this system has no such device")
def test_a_file_without_end_is_refused() -> None:
    with pytest.raises(InvalidOption, match="/dev/zero can't be read: File too large"):
        load_settings(Path("/dev/zero"))


def test_a_mark_of_windows_at_the_beginning_is_no_mistake(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_bytes(b"\xef\xbb\xbf[sampling]\r\ntop_k = 7\r\n")
    assert load_settings(file).sampling == {"top_k": 7}


def test_a_number_without_end_is_told_without_advice_for_programmers(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="isn't valid TOML: a number in it is too long"):
        load_settings(write(tmp_path, f"[engine]\nblock_size = {'9' * 6000}\n"))


def test_a_configuration_folder_that_is_a_file_holds_no_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(settings_module, "default_config_file", lambda: tmp_path / "file" / "config.toml")
    assert load_settings() == Settings()


def uncommented(text: str) -> str:
    """The example with every option set."""
    lines = [
        line[2:] if line.startswith("# ") and (" = " in line or "[presets" in line) else line
        for line in text.split("\n")
    ]
    return "\n".join(lines)


def test_the_example_has_every_option_and_changes_nothing(tmp_path: Path) -> None:
    text = example([("new_chat", "ctrl+n", "open a tab"), ("next_chat", "f4,ctrl+pagedown", "go right")])
    plain = load_settings(write(tmp_path, text))
    assert plain == Settings(path=plain.path)
    full = load_settings(write(tmp_path, uncommented(text)))
    assert set(full.engine) == {option.name for option in dataclasses.fields(EngineConfig)}
    assert set(full.sampling) == set(SAMPLING_OPTIONS)
    assert full.app == AppSettings()
    assert full.presets["precise"].sampling == {"temperature": 0.0}
    assert full.keys == {"new_chat": "ctrl+n", "next_chat": "f4,ctrl+pagedown"}
    samples = {**SAMPLES, "stop": ("END",)}
    for kind, table in ((EngineConfig, full.engine), (SamplingParams, full.sampling)):
        values = kind(**table)
        for option in dataclasses.fields(kind):
            expected = samples.get(option.name, option.default)
            assert getattr(values, option.name) == expected or option.name == "logprobs"


def test_presets_and_looks_are_read(tmp_path: Path) -> None:
    text = '[app]\ntheme = "light"\nreduced_motion = true\n[presets."très précis"]\nsystem = "Kurz."\ntop_k = 3\n'
    settings = load_settings(write(tmp_path, text))
    assert (settings.app.theme, settings.app.reduced_motion) == ("light", True)
    assert settings.presets == {"très précis": Preset("Kurz.", {"top_k": 3})}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"\xff", "isn't text in UTF-8 (byte 0 can't be read); save it as UTF-8."),
        (b"[sampling]\ntemperature = true\n", "not true."),
        (b"[app]\ntheme = false\n", "not false."),
        (None, "can't be read: Is a directory; name another with --config."),
    ],
)
def test_messages_are_about_the_file_and_not_about_python(
    tmp_path: Path, content: bytes | None, sentence: str
) -> None:
    path = tmp_path
    if content is not None:
        path = tmp_path / "config.toml"
        path.write_bytes(content)
    with pytest.raises(InvalidOption) as caught:
        load_settings(path)
    assert str(path) in str(caught.value)
    assert str(caught.value).endswith(sentence)
