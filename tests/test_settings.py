"""The settings file: what it may say, and what wins over what."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanochat.errors import InvalidOption
from nanochat.settings import Settings, load_settings


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
