"""The user's TOML file, merged with the command line. Knows no engine, no terminal.

The file lies at ``nanochat/config.toml`` in the user's configuration folder (on Linux
``~/.config/nanochat/config.toml``). ``nanochat config --example`` prints one with every option; see
:mod:`nanochat.settings_example`. A command-line option wins over the file, the file over the built-in
default.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from nanochat.bounded import read_at_most
from nanochat.engine.config import EngineConfig, SamplingParams, as_written
from nanochat.errors import InvalidOption, has_long_number

MAX_BYTES = 2**20
"""Of a settings file."""

ThemeName = Literal["dark", "light", "contrast"]
PanelSize = Literal["auto", "full", "narrow", "off"]
ClipboardWay = Literal["auto", "terminal"]

SAMPLING_OPTIONS = tuple(
    option.name for option in dataclasses.fields(SamplingParams) if option.name != "logprobs"
)
"""What [sampling] may hold: all but what neither the app nor a command would show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppSettings:
    """The app's looks and habits: the table [app]."""

    theme: ThemeName = "dark"
    panel: PanelSize = "auto"
    reduced_motion: bool = False
    screenshot_folder: str = ""
    """Empty: the user's pictures."""
    export_folder: str = ""
    """Empty: the user's documents."""
    clipboard: ClipboardWay = "auto"

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for option in dataclasses.fields(self):
            value, kind = getattr(self, option.name), hints[option.name]
            if choices := get_args(kind):
                if value not in choices:
                    raise InvalidOption(
                        f"{option.name} must be one of {', '.join(choices)}, not {as_written(value)}."
                    )
            elif not isinstance(value, kind):
                what = "true or false" if kind is bool else "text"
                raise InvalidOption(f"{option.name} must be {what}, not {as_written(value)}.")


@dataclass(frozen=True, slots=True)
class Preset:
    """Settings of a chat under a name: a table [presets.NAME]."""

    system: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the file says; empty where it says nothing."""

    engine: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None
    app: AppSettings = field(default_factory=AppSettings)
    presets: Mapping[str, Preset] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    """Keys by action; the app checks both names."""
    path: Path | None = None
    """The file, if there is one."""

    def engine_config(self, overrides: Mapping[str, Any]) -> EngineConfig:
        """The file's engine options under the command line's."""
        return EngineConfig(**{**self.engine, **overrides})

    def sampling_params(self, defaults: Mapping[str, Any], overrides: Mapping[str, Any]) -> SamplingParams:
        """The model's recommendation under the file's under the command line's."""
        return SamplingParams(**{**defaults, **self.sampling, **overrides})


def user_path(written: str) -> Path:
    """A path as people write it: ``~`` is their home folder. One of an unknown user's stays as it is."""
    return Path(os.path.expanduser(written))


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
        text = read_at_most(path, MAX_BYTES).decode("utf-8-sig")  # editors on Windows begin it with a mark
    except (FileNotFoundError, NotADirectoryError):
        if file is None:
            return Settings()
        raise InvalidOption(f"There is no settings file {path}; check the path given to --config.") from None
    except UnicodeDecodeError as error:
        raise InvalidOption(
            f"The settings file {path} isn't text in UTF-8 (byte {error.start:,} can't be read); save it as UTF-8."
        ) from error
    except OSError as error:
        raise InvalidOption(
            f"The settings file {path} can't be read: {error.strerror or error}; name another with --config."
        ) from error
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers with thousands of digits, and deep nesting
        why = "a number in it is too long" if has_long_number(error) else f"{error!s:.200}"
        raise InvalidOption(f"The settings file {path} isn't valid TOML: {why}.") from error
    return _parse(content, path)


def _parse(content: Mapping[str, Any], path: Path) -> Settings:
    _refuse_unknown(content, {"engine", "sampling", "system", "app", "presets", "keys"}, path, "")
    system = content.get("system")
    if system is not None and not isinstance(system, str):
        raise InvalidOption(f'"system" in {path} must be text.')
    presets = {}
    for name, preset in _table(content, "presets", path).items():
        where = f"presets.{name}"
        options = dict(_table({where: preset}, where, path))
        told = options.pop("system", None)
        if told is not None and not isinstance(told, str):
            raise InvalidOption(f"In {path}: [{where}] system must be text, not {told!r:.60}.")
        _checked(options, SamplingParams, {*SAMPLING_OPTIONS}, where, path, also=("system",))
        presets[name] = Preset(told, options)
    engine, sampling, app = (_table(content, name, path) for name in ("engine", "sampling", "app"))
    _checked(
        engine, EngineConfig, {option.name for option in dataclasses.fields(EngineConfig)}, "engine", path
    )
    _checked(sampling, SamplingParams, {*SAMPLING_OPTIONS}, "sampling", path)
    look = _checked(
        app, AppSettings, {option.name for option in dataclasses.fields(AppSettings)}, "app", path
    )
    keys = {name: _keys(name, value, path) for name, value in _table(content, "keys", path).items()}
    return Settings(engine, sampling, system, look, presets, keys, path)


def _table(content: Mapping[str, Any], name: str, path: Path) -> Mapping[str, Any]:
    table = content.get(name, {})
    if not isinstance(table, dict):
        raise InvalidOption(f'"{name}" in {path} must be a table: write [{name}] on a line of its own.')
    return table


def _checked(
    table: Mapping[str, Any],
    kind: type[Any],
    known: set[str],
    name: str,
    path: Path,
    also: tuple[str, ...] = (),
) -> Any:
    """What the table makes; a mistake in it is told with the file and the table's name."""
    _refuse_unknown(table, known, path, f"[{name}] ", also)
    try:
        return kind(**table)
    except InvalidOption as error:
        raise InvalidOption(f"In {path}: [{name}] {error}") from None


def _keys(name: str, value: Any, path: Path) -> str:
    keys = [value] if isinstance(value, str) else value
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise InvalidOption(
            f'In {path}: [keys] {name} must be the name of a key, such as "ctrl+g", or a list.'
        )
    return ",".join(keys)


def _refuse_unknown(
    table: Mapping[str, Any], known: set[str], path: Path, where: str, also: tuple[str, ...] = ()
) -> None:
    unknown = sorted(set(table) - known)
    if unknown:
        raise InvalidOption(
            f'{where}"{unknown[0][:60]}" in {path} is no option; there are: {", ".join(sorted({*known, *also}))}.'
        )
