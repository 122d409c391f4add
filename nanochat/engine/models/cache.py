"""The folder where downloaded and converted models are kept, each built once and whole or not at all.

Knows nothing of what a model is.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from nanochat.engine.progress import Progress, ProgressCallback
from nanochat.errors import ModelNotFound

CACHE_DIR_VARIABLE = "NANOCHAT_CACHE_DIR"

_MANIFEST = "nanochat-manifest.json"
_WORK_PREFIX = ".work-"
_LOCK_POLL_S = 0.2


def cache_root() -> Path:
    """Where models are kept; the environment may name another place. Doesn't create it."""
    chosen = os.environ.get(CACHE_DIR_VARIABLE)
    if chosen:
        return Path(os.path.expanduser(chosen))
    from platformdirs import user_cache_path

    return user_cache_path("nanochat")


def build_once(name: str, build: Callable[[Path], None], progress: ProgressCallback) -> Path:
    """The cache's folder ``name``; if it isn't there whole, ``build`` fills an empty folder that becomes it.

    The new folder appears under its name in one step, after its files have reached the disk, so neither a
    crash nor a second process ever leaves or sees a part of it. ``build`` may use its folder's parent
    for temporary files.

    Raises:
        ModelNotFound: the cache folder can't be written.
    """
    root = cache_root()
    target = root / name
    if _is_whole(target):
        return target
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(root, progress):
            if not _is_whole(target):  # another process may have built it meanwhile
                _build(root, target, build)
    except (FileExistsError, NotADirectoryError) as error:
        raise ModelNotFound(
            f"Models can't be kept in {root}: it, or what it lies in, is a file and no folder. Move that away, "
            f"or set {CACHE_DIR_VARIABLE} to a folder."
        ) from error
    except OSError as error:
        raise ModelNotFound(
            f"The model can't be kept in {root}: {error.strerror or error}. Make room or make it writable, or "
            f"set {CACHE_DIR_VARIABLE} to another folder."
        ) from error
    return target


def _build(root: Path, target: Path, build: Callable[[Path], None]) -> None:
    for leftover in root.glob(f"{_WORK_PREFIX}*"):  # of a process that died; the lock says it's nobody's
        shutil.rmtree(leftover, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=_WORK_PREFIX, dir=root))
    try:
        folder = work / "model"
        folder.mkdir(mode=0o700)
        build(folder)
        sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
        (folder / _MANIFEST).write_text(json.dumps(sizes, indent=2), encoding="utf-8")
        for path in (*folder.iterdir(), folder):
            _sync(path)
        if target.exists():
            os.replace(target, work / "damaged")
        os.replace(folder, target)
        _sync(root)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _is_whole(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):  # absent, not JSON, not an object: to be built again
        return False


@contextmanager
def _locked(root: Path, progress: ProgressCallback) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(root / ".lock")
    while True:
        try:
            lock.acquire(timeout=_LOCK_POLL_S)
            break
        except Timeout:
            progress(Progress("Waiting for another nanochat to prepare its model"))
    try:
        yield
    finally:
        lock.release()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
