"""Damaged and hostile files end in a sentence: a share of what ``benchmarks/fuzz.py`` tries, and its faults."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from nanochat.engine.models import config_reader
from nanochat.engine.models.config_reader import read_json_object
from nanochat.engine.models.weights import weight_files
from nanochat.engine.panics import panics_refused
from nanochat.engine.template_sandbox import literal_text
from nanochat.errors import HistoryError, ModelNotFound, UnsupportedModel
from nanochat.history import History
from nanochat.history.transfer import parse_json
from nanochat.stray_output import diverted
from tests.tiny_model import write_tiny_llama


def fuzz(count: int, *options: str) -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "benchmarks.fuzz", "--count", str(count), *options],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=Path(__file__).parents[1],
    )
    report = json.loads(finished.stdout)
    assert finished.returncode == 0, report["faults"]
    assert report["files"] >= count * 0.9


@pytest.mark.skipif(sys.platform != "linux", reason="the workers' memory is limited as Linux does it")
@pytest.mark.parametrize(("count", "seed"), [(100, 1), pytest.param(1_000, 2, marks=pytest.mark.slow)])
def test_every_damaged_file_loads_or_ends_in_a_sentence(count: int, seed: int) -> None:
    fuzz(count, "--seed", str(seed))


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TRIGGER more AFTER INSERT ON sessions BEGIN DELETE FROM messages; END",
        "DROP TRIGGER message_added",
        "DROP TABLE sessions; CREATE VIEW sessions AS WITH RECURSIVE n(id) AS (SELECT 1 UNION ALL SELECT id + 1 "
        "FROM n) SELECT id, 0.0 AS started_at FROM n",
    ],
)
def test_a_history_with_tables_that_are_not_ours_is_refused(tmp_path: Path, statement: str) -> None:
    """They could run for ever, or change what is saved."""
    path = tmp_path / "history.db"
    History(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.create_function("segmented", 1, str)
        connection.executescript(statement)
    with pytest.raises(HistoryError, match="altered by another program"):
        History(path)


def test_sqlites_own_tables_are_no_alteration(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    History(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("ANALYZE")
    History(path).close()


def test_a_history_with_impossible_times_and_numbers_is_read(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    with History(path) as history:
        chat = history.create_chat("Chat")
        history.add_message(chat, None, "question")
    with closing(sqlite3.connect(path)) as connection:
        connection.create_function("segmented", 1, str)
        connection.execute(
            "UPDATE chats SET created_at = 9e999, updated_at = 1e300, sampling = '{\"a\": NaN}'"
        )
        connection.execute("UPDATE messages SET created_at = -9e999, finished_at = 1e18")
        connection.commit()
    with History(path) as history:
        (found,) = history.list_chats()
        assert (found.created_at, dict(found.sampling)) == (0.0, {"a": None})
        (message,) = history.path(chat)
        assert (message.created_at, message.finished_at) == (0.0, 0.0)
        assert history.export_markdown(chat)
        assert parse_json(history.export_json(chat))


def test_deep_nesting_in_a_history_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    with History(path) as history:
        history.create_chat("Chat")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE chats SET sampling = ?", ("[" * 100_000,))
        connection.commit()
    with History(path) as history, pytest.raises(HistoryError, match="nested too deeply"):
        history.list_chats()


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="this system has no such device")
def test_a_model_whose_config_never_ends_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("/dev/zero")
    with pytest.raises(ModelNotFound, match=r"config\.json is no file"):
        read_json_object(tmp_path / "config.json")


def test_json_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_reader, "_MAX_JSON_BYTES", 10)
    (tmp_path / "config.json").write_text('{"a": "12345"}')
    with pytest.raises(ModelNotFound, match="too large to be a model's settings file"):
        read_json_object(tmp_path / "config.json")


@pytest.mark.parametrize(
    "name",
    ["../model", "/etc/passwd", "sub/model", "x" * 300, "a\0b", "a\nb", "model.safetensors/../../b"],
)
def test_weights_are_looked_for_in_the_models_folder_only(tmp_path: Path, name: str) -> None:
    for place in (tmp_path, tmp_path / "model"):
        place.mkdir(exist_ok=True)
        (place / "model.safetensors").touch()
    index = {"weight_map": {"a": f"{name}.safetensors"}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelNotFound, match="doesn't list weight files"):
        weight_files(tmp_path / "model")


def test_a_template_too_deep_to_walk_has_no_literal_text() -> None:
    assert literal_text("{{ " + "+".join(["1"] * 20_000) + " }}") == ""


def test_what_a_tokenizer_prints_does_not_reach_the_answer(tmp_path: Path) -> None:
    """The tokenizers' library prints the names of unknown settings, which may be escape sequences."""
    model = write_tiny_llama(tmp_path / "model")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["added_tokens"][0]["\x1b]52;c;ZXZpbA==\a"] = []
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    command = [sys.executable, "-m", "nanochat", "ask", "--json", "--max-tokens", "2", "--device", "cpu"]
    finished = subprocess.run(
        [*command, "--model", str(model), "--kv-blocks", "64", "Hi"],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "XDG_STATE_HOME": str(tmp_path),
            "XDG_CONFIG_HOME": str(tmp_path),
            "HOME": str(tmp_path),
        },
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout)["completion_tokens"] == 2
    assert "52;c" not in finished.stderr


def test_what_is_diverted_lands_in_a_private_log(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "app.log"
    with diverted(log):
        os.write(1, b"one ")
        os.write(2, b"two")
    assert log.read_text() == "one two"
    assert (log.stat().st_mode & 0o777, log.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_a_tokenizer_that_panics_on_a_text_is_told_in_a_sentence() -> None:
    """Found in a damaged file: it loads, and its native code counts past the end of its own vocabulary."""

    class PanicException(BaseException):  # named as the tokenizer's
        pass

    sentence = r"tokenizer fails on the text \(index out of bounds\)"
    with pytest.raises(UnsupportedModel, match=sentence), panics_refused():
        raise PanicException("index out of bounds")
    with pytest.raises(KeyboardInterrupt), panics_refused():
        raise KeyboardInterrupt
