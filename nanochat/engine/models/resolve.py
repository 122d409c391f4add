"""From what a user names to a folder in Hugging Face form: a folder, a ``.gguf`` file, a Hub id, or nothing.

Knows nothing of what is inside the weights.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nanochat.engine.models.cache import build_once
from nanochat.engine.models.default_model import CACHE_NAME, DEFAULT_MODEL_NAME, build_default_model
from nanochat.engine.models.folder import check_folder
from nanochat.engine.models.gguf import convert_gguf
from nanochat.engine.models.hub import cached_model, download_model
from nanochat.engine.progress import ProgressCallback, ignore_progress
from nanochat.errors import ModelNotFound

DEFAULT_HUB_MODEL = "Qwen/Qwen3-0.6B"

MAX_SHOWN = 80
"""Characters of a model's name that a message repeats."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_QUANTISATION = re.compile(r"[.-](i?q\d\w*|[bf]*f?(16|32))$", re.IGNORECASE)
"""The end of a GGUF file's name that tells its number format: ``-Q4_K_M``, ``.BF16``."""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model on this machine, ready to be read."""

    path: Path
    """Folder with config.json, tokenizer files and ``*.safetensors``."""
    name: str
    """Short, for people: ``SmolLM2-135M-Instruct``."""


def resolve_model(spec: str, progress: ProgressCallback = ignore_progress) -> ResolvedModel:
    """Find, download or convert the model that ``spec`` names.

    Empty: ``DEFAULT_HUB_MODEL`` if all of it is in the Hub's local cache, else a small model that needs
    no Hub. ``progress`` may be called from other threads.

    Raises:
        ModelNotFound: it isn't there, isn't complete or can't be downloaded.
        UnsupportedModel: a GGUF file that can't be converted.
    """
    if not spec:
        return _default(progress)
    path = Path(os.path.expanduser(spec))
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError as error:  # a folder above that may not be entered, or a name too long to be one
        raise ModelNotFound(
            f"{_shown(spec)} can't be read: {error.strerror or error}; check the path."
        ) from error
    if is_folder:
        return _from_folder(path)
    if path.suffix.lower() == ".gguf":
        return _from_gguf(path, progress)
    if is_file:
        raise ModelNotFound(
            f"{spec} is neither a folder nor a .gguf file. Name the folder that holds the model."
        )
    if not _HUB_ID.fullmatch(spec):
        raise ModelNotFound(
            f"There is no {_shown(spec)}. Name a folder with a model, a .gguf file, or a Hub id such as "
            f"{DEFAULT_HUB_MODEL}."
        )
    folder = cached_model(spec)
    if folder is None:
        folder = download_model(spec, progress)
        check_folder(folder)
    return ResolvedModel(folder, spec.rpartition("/")[2])


def _shown(spec: str) -> str:
    """A name for a message, its middle left out if it is long: a path's end tells most."""
    return spec if len(spec) <= MAX_SHOWN else f"{spec[:20]}…{spec[21 - MAX_SHOWN :]}"


def _default(progress: ProgressCallback) -> ResolvedModel:
    folder = cached_model(DEFAULT_HUB_MODEL)
    if folder is not None:
        return ResolvedModel(folder, DEFAULT_HUB_MODEL.rpartition("/")[2])
    folder = build_once(CACHE_NAME, partial(build_default_model, progress=progress), progress)
    return ResolvedModel(folder, DEFAULT_MODEL_NAME)


def _from_folder(folder: Path) -> ResolvedModel:
    check_folder(folder)
    folder = folder.resolve()
    return ResolvedModel(folder, folder.name)


def _from_gguf(file: Path, progress: ProgressCallback) -> ResolvedModel:
    try:
        file = file.resolve(strict=True)
        status = file.stat()
    except OSError as error:
        raise ModelNotFound(f"{file} can't be read: {error.strerror or error}; check the path.") from error
    name = _QUANTISATION.sub("", file.stem) or file.stem
    identity = f"{file}\n{status.st_size}\n{status.st_mtime_ns}"
    key = f"{name[:64]}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    return ResolvedModel(build_once(key, partial(convert_gguf, file, progress=progress), progress), name)
