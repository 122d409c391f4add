"""Models by Hub id, through ``huggingface_hub``: its cache, its resumed downloads, its tokens.

Only settings, tokenizers and safetensors of a repository's top folder are fetched: never pickles or code.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from nanochat.engine.models.folder import check_folder
from nanochat.engine.progress import Progress, ProgressCallback
from nanochat.engine.tokenizer import TOKENIZER_FILES
from nanochat.errors import ModelNotFound

_WANTED = [
    "*.json",
    "*.safetensors",
    "*.jinja",
    *sorted({name for names in TOKENIZER_FILES for name in names}),
]
_UNWANTED = ["*/*", "consolidated*.safetensors"]


def cached_model(repo_id: str) -> Path | None:
    """The model's folder in the local cache if all of it is there; asks no network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(
                repo_id, local_files_only=True, allow_patterns=_WANTED, ignore_patterns=_UNWANTED
            )
        )
        check_folder(folder)
    except (LocalEntryNotFoundError, HFValidationError, OSError, ModelNotFound):
        return None
    return folder


def download_model(repo_id: str, progress: ProgressCallback) -> Path:
    """Fetch the model, going on where an earlier attempt was cut off; returns its folder.

    Raises:
        ModelNotFound: no such model, no permission, no network, or no safetensors in it.
    """
    from huggingface_hub import HfApi, snapshot_download

    progress(Progress(f"Looking up {repo_id}"))
    files = _asking(repo_id, lambda: HfApi().model_info(repo_id, files_metadata=True)).siblings or []
    sizes = {file.rfilename: file.size or 0 for file in files if _is_wanted(file.rfilename)}
    if not any(name.endswith(".safetensors") for name in sizes):
        raise ModelNotFound(
            f"{repo_id} has no .safetensors weights. Choose a version that has, or download one of its .gguf "
            "files and name that."
        )
    bar = _progress_class(f"Downloading {repo_id}", sum(sizes.values()), progress)
    folder = _asking(
        repo_id,
        lambda: snapshot_download(repo_id, allow_patterns=_WANTED, ignore_patterns=_UNWANTED, tqdm_class=bar),
    )
    return Path(folder)


def _is_wanted(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in _WANTED) and not any(
        fnmatch(name, pattern) for pattern in _UNWANTED
    )


def _asking(repo_id: str, request: Callable[[], Any]) -> Any:
    """Run a request to the Hub; what can go wrong becomes a sentence."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
    )

    try:
        return request()
    except GatedRepoError as error:
        raise ModelNotFound(
            f"{repo_id} is only for those who have accepted its terms. Accept them on its Hub page, then set "
            "HF_TOKEN to your access token."
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelNotFound(
            f"There is no model {repo_id!r}, neither as a folder here nor on the Hub. Check the spelling; for "
            "a private one, set HF_TOKEN to your access token."
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise ModelNotFound(
                f"The Hub doesn't let you have {repo_id}. Set HF_TOKEN to an access token that may read it."
            ) from error
        raise ModelNotFound(
            f"The Hub failed to send {repo_id} (status {status}). Try again; what has come is kept."
        ) from error
    except Exception as error:  # the client's HTTP library, another in each version, has its own errors
        raise ModelNotFound(
            f"There is no folder {repo_id} here, and it couldn't be fetched from the Hub "
            f"({type(error).__name__}). Check the name first, then the network and the disk's free space, and "
            "try again: what has come is kept."
        ) from error


def _progress_class(stage: str, total: int, progress: ProgressCallback) -> type:
    """A bar that draws nothing and reports the bytes that have come.

    The client has two byte counters, what the network brought and what was written; the further counts.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]

    furthest = 0

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            self._counts_bytes = options.get("unit") == "B"
            options.pop("name", None)
            super().__init__(*args, **(options | {"disable": True}))

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal furthest
            self.n += n or 0
            if self._counts_bytes and self.n > furthest:
                furthest = int(self.n)
                progress(Progress(stage, min(furthest, total), total, "B"))
            return None

    return Bar
