"""From what a user names to a folder in Hugging Face form: a folder, a ``.gguf`` file, a Hub id, or nothing.

Knows nothing of what is inside the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nanochat.engine.models.config_reader import read_json_object
from nanochat.engine.models.weights import weight_files
from nanochat.engine.progress import ProgressCallback, ignore_progress
from nanochat.errors import ModelNotFound

DEFAULT_HUB_MODEL = "Qwen/Qwen3-0.6B"


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model on this machine, ready to be read."""

    path: Path
    """Folder with config.json, tokenizer files and ``*.safetensors``."""
    name: str
    """Short, for people: ``SmolLM2-135M-Instruct``."""


def resolve_model(spec: str, progress: ProgressCallback = ignore_progress) -> ResolvedModel:
    """Find, download or convert the model that ``spec`` names; empty: the default model.

    Raises:
        ModelNotFound: it isn't there, isn't complete or can't be downloaded.
        UnsupportedModel: a GGUF file that can't be converted.
    """
    path = Path(spec).expanduser()
    if spec and path.is_dir():
        return _from_folder(path)
    raise ModelNotFound(f"There is no model {spec!r}. Name a folder with a model in Hugging Face form.")


def _from_folder(folder: Path) -> ResolvedModel:
    read_json_object(folder / "config.json")
    weight_files(folder)
    folder = folder.resolve()
    return ResolvedModel(folder, folder.name)
