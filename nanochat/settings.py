"""The user's TOML file, merged with the command line. Knows no engine, no terminal.

The file lies at ``nanochat/config.toml`` in the user's configuration folder (on Linux
``~/.config/nanochat/config.toml``)::

    system = "Answer briefly."

    [engine]          # fields of EngineConfig
    kv_dtype = "int8"

    [sampling]        # fields of SamplingParams
    temperature = 0.2

A command-line option wins over the file, the file over the built-in default.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanochat.engine.config import EngineConfig, SamplingParams
from nanochat.errors import InvalidOption


@dataclass(frozen=True, slots=True)
class Settings:
    """What the file says; empty where it says nothing."""

    engine: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None

    def engine_config(self, overrides: Mapping[str, Any]) -> EngineConfig:
        """The file's engine options under the command line's."""
        return EngineConfig(**{**self.engine, **overrides})

    def sampling_params(self, defaults: Mapping[str, Any], overrides: Mapping[str, Any]) -> SamplingParams:
        """The model's recommendation under the file's under the command line's."""
        return SamplingParams(**{**defaults, **self.sampling, **overrides})


def default_config_file() -> Path:
    """Where the file lies if the user names no other."""
    from platformdirs import user_config_path

    return user_config_path("nanochat") / "config.toml"


def load_settings(file: Path | None = None) -> Settings:
    """Read the user's file; nothing is wrong if the default one isn't there.

    Raises:
        InvalidOption: the named file is missing, isn't TOML, or holds an option that doesn't exist.
    """
    path = file if file is not None else default_config_file()
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if file is None:
            return Settings()
        raise InvalidOption(f"There is no settings file {path}; check the path given to --config.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOption(f"The settings file {path} can't be read: {error}.") from error
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers with thousands of digits, and deep nesting
        raise InvalidOption(f"The settings file {path} isn't valid TOML: {error}.") from error
    return _parse(content, path)


def _parse(content: Mapping[str, Any], path: Path) -> Settings:
    _refuse_unknown(content, {"engine", "sampling", "system"}, path, "")
    system = content.get("system")
    if system is not None and not isinstance(system, str):
        raise InvalidOption(f'"system" in {path} must be text.')
    tables: dict[str, Mapping[str, Any]] = {}
    for name, kind in (("engine", EngineConfig), ("sampling", SamplingParams)):
        table = content.get(name, {})
        if not isinstance(table, dict):
            raise InvalidOption(f'"{name}" in {path} must be a table: write [{name}] on a line of its own.')
        _refuse_unknown(table, {option.name for option in dataclasses.fields(kind)}, path, f"[{name}] ")
        try:
            kind(**table)
        except InvalidOption as error:
            raise InvalidOption(f"In {path}: {error}") from None
        tables[name] = table
    return Settings(engine=tables["engine"], sampling=tables["sampling"], system=system)


def _refuse_unknown(table: Mapping[str, Any], known: set[str], path: Path, where: str) -> None:
    unknown = sorted(set(table) - known)
    if unknown:
        raise InvalidOption(
            f'{where}"{unknown[0]}" in {path} is no option; there are: {", ".join(sorted(known))}.'
        )
