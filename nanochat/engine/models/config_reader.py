"""Reads values from a model's JSON files and says in a sentence what is wrong with them.

Model files are hostile input: a value is used only after its type and range have been checked here.
Knows nothing of what the values mean.
"""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanochat.bounded import read_at_most
from nanochat.errors import ModelNotFound, UnsupportedModel

_MAX_JSON_BYTES = 64 * 2**20  # the largest tokenizer files are half of this; anything larger isn't a model's


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ModelNotFound: it can't be read, is oversized, or holds something else.
    """
    try:
        if path.exists() and not path.is_file():  # reading it might never end
            raise ModelNotFound(f"{path} is no file. Download the model again.")
        value = json.loads(read_at_most(path, _MAX_JSON_BYTES).decode("utf-8"))
    except FileNotFoundError as error:
        raise ModelNotFound(
            f"{path.parent} holds no {path.name}. Name a folder with a model in Hugging Face form, "
            "a .gguf file or a Hub id."
        ) from error
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise ModelNotFound(
                f"{path} is too large to be a model's settings file. Download the model again."
            ) from error
        raise ModelNotFound(f"{path} can't be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:  # bad UTF-8 and bad JSON are ValueErrors
        raise ModelNotFound(f"{path} is not valid JSON. Download the model again.") from error
    if not isinstance(value, dict):
        raise ModelNotFound(f"{path} holds no JSON object. Download the model again.")
    return value


class ConfigReader:
    """Typed, bounded access to one mapping. ``null`` counts as absent."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self._values = values
        self._path = path

    def error(self, what: str) -> UnsupportedModel:
        """The error for a value that can't be used."""
        return UnsupportedModel(f"{self._path} can't be used: {what}.")

    def get(self, name: str) -> Any:
        """The value as it stands; None if absent."""
        return self._values.get(name)

    def inner(self, name: str) -> ConfigReader | None:
        """A nested object."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(f"{name} must be an object, not {_shown(value)}")
        return ConfigReader(value, self._path)

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """A whole number; one written as 4.0 is taken too."""
        value = self._present(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.error(f"{name} must be a whole number from {low} to {high}, not {_shown(value)}")
        return value

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number."""
        value = self._present(name, default)
        if not _is_number(value) or not low <= value <= high:
            raise self.error(f"{name} must be a number from {low:g} to {high:g}, not {_shown(value)}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """true or false."""
        value = self._present(name, default)
        if not isinstance(value, bool):
            raise self.error(f"{name} must be true or false, not {_shown(value)}")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        value = self._present(name, default)
        if not isinstance(value, str):
            raise self.error(f"{name} must be text, not {_shown(value)}")
        return value

    def numbers(self, name: str) -> tuple[float, ...] | None:
        """A list of finite numbers; None if absent."""
        value = self._list(name)
        if value is not None and not all(_is_number(item) for item in value):
            raise self.error(f"{name} must hold numbers only")
        return None if value is None else tuple(float(item) for item in value)

    def integers(self, name: str) -> tuple[int, ...] | None:
        """A list of whole numbers; None if absent."""
        value = self._list(name)
        if value is not None and not all(isinstance(item, int) for item in value):
            raise self.error(f"{name} must hold whole numbers only")
        return None if value is None else tuple(value)

    def texts(self, name: str) -> tuple[str, ...] | None:
        """A list of strings; None if absent."""
        value = self._list(name)
        if value is not None and not all(isinstance(item, str) for item in value):
            raise self.error(f"{name} must hold texts only")
        return None if value is None else tuple(value)

    def _list(self, name: str) -> list[Any] | None:
        value = self.get(name)
        if value is not None and not isinstance(value, list):
            raise self.error(f"{name} must be a list, not {_shown(value)}")
        return value

    def _present(self, name: str, default: Any) -> Any:
        value = self.get(name)
        value = default if value is None else value
        if value is None:
            raise self.error(f"{name} is missing")
        return value


def _is_number(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return abs(value) <= sys.float_info.max  # an integer may be beyond it, a NaN is not below it


def _shown(value: object) -> str:
    return repr(value)[:60]
