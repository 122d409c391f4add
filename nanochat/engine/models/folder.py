"""Whether a folder holds all the parts of a model in Hugging Face form; what is in them is looked at later."""

from __future__ import annotations

from pathlib import Path

from nanochat.engine.models.config_reader import read_json_object
from nanochat.engine.models.weights import weight_files
from nanochat.engine.tokenizer import has_tokenizer
from nanochat.errors import ModelNotFound


def check_folder(folder: Path) -> None:
    """Raises ModelNotFound, with a sentence, if settings, weights or tokenizer are missing."""
    read_json_object(folder / "config.json")
    weight_files(folder)
    if not has_tokenizer(folder):
        raise ModelNotFound(f"{folder} has no tokenizer (tokenizer.json). Download the model again.")
