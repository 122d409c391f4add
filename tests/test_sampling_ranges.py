"""A sampling option that can't work is refused in the same words wherever it is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nanochat.cli import main
from nanochat.errors import InvalidOption
from nanochat.server.errors import ApiError
from nanochat.server.parsing import parse_chat, parse_text
from nanochat.settings import load_settings
from nanochat.ui.restoring import _usable

WRONG: list[tuple[str, Any, str]] = [
    ("temperature", 9, "must be a number at least 0 and at most 2, not 9"),
    ("temperature", -0.5, "must be a number at least 0 and at most 2, not -0.5."),
    ("top_p", 1.5, "must be a number at least 0 and at most 1, not 1.5."),
    ("max_tokens", 0, "must be a whole number at least 1, not 0."),
    ("seed", 2**63, f"must be a whole number between {-(2**63)} and {2**63 - 1}, not {2**63}."),
]
ANYWHERE_ELSE: list[tuple[str, Any, str]] = [
    ("top_k", -2, "must be a whole number at least 0, not -2."),
    ("min_p", 1.1, "must be a number at least 0 and at most 1, not 1.1."),
    ("repetition_penalty", 7, "must be a number above 0 and at most 2, not 7."),
]


@pytest.mark.parametrize(("name", "value", "sentence"), WRONG)
def test_by_ask_before_any_model_is_loaded(
    name: str, value: Any, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = "--" + name.replace("_", "-")
    assert main(["ask", "Hi", "--model", "/nowhere", f"{flag}={value}"]) == 2
    assert f"{flag} {sentence}" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "value", "sentence"), [*WRONG, *ANYWHERE_ELSE])
@pytest.mark.parametrize("table", ["sampling", "presets.wild"])
def test_by_the_settings_file(tmp_path: Path, table: str, name: str, value: Any, sentence: str) -> None:
    file = tmp_path / "config.toml"
    if value < 2**63:  # TOML ends there
        file.write_text(f"[{table}]\n{name} = {value}\n")
        with pytest.raises(InvalidOption) as caught:
            load_settings(file)
        assert str(caught.value).startswith(f"In {file}: [{table}] {name} {sentence}")


@pytest.mark.parametrize(("name", "value", "sentence"), [*WRONG, *ANYWHERE_ELSE])
def test_by_the_server(name: str, value: Any, sentence: str) -> None:
    common = {"model": "m", name: value}
    for parse, body in (
        (parse_chat, {"messages": [{"role": "user", "content": "Hi"}]}),
        (parse_text, {"prompt": "Hi"}),
    ):
        with pytest.raises(ApiError) as caught:
            parse(common | body)
        assert (caught.value.status, caught.value.param) == (400, name)
        assert caught.value.message.startswith(f"{name} {sentence}")


@pytest.mark.parametrize(("name", "value", "sentence"), [*WRONG, *ANYWHERE_ELSE])
def test_in_a_saved_chat_it_is_left_out(name: str, value: Any, sentence: str) -> None:
    assert _usable({name: value, "ignore_eos": True}) == {"ignore_eos": True}
