"""Reads a folder of safetensors straight into a decoder's packed tensors.

Headers are checked against the model's shapes before anything is allocated, so that a damaged or hostile
file ends in a sentence and costs no memory. Never reads a pickle. Knows nothing of where files came from.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nanochat.engine.device import free_cpu_bytes, is_out_of_memory
from nanochat.engine.models.config_reader import read_json_object
from nanochat.engine.models.decoder import Decoder
from nanochat.engine.models.families import ModelConfig
from nanochat.engine.models.weight_map import Piece, destinations
from nanochat.engine.parallel import ALONE, Collectives
from nanochat.engine.progress import Progress, ProgressCallback, ignore_progress
from nanochat.errors import ModelNotFound, NotEnoughMemory, UnsupportedModel

_MAPPED_BYTES = 16 * 2**20
"""A file is mapped anew after this many bytes: pages read stay resident for as long as a mapping lives."""

_LONGEST_NAME = 200
"""Of a weight file; file systems refuse somewhat longer ones."""

_FLOAT_TYPES = frozenset({"F64", "F32", "F16", "BF16"})
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
_IGNORED_PARTS = ("vision_tower.", "multi_modal_projector.")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies and what its header says."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    """As safetensors names it: ``BF16``."""

    @property
    def num_bytes(self) -> int:
        size = {"F64": 8, "F32": 4}.get(self.dtype, 2)
        for length in self.shape:
            size *= length
        return size


def load_decoder(
    folder: Path,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    progress: ProgressCallback = ignore_progress,
    ranks: Collectives = ALONE,
) -> Decoder:
    """Build the decoder and fill it from ``folder``; weights of another float type are converted.

    A decoder that is divided among ``ranks`` gets its own part, and nothing else is read.

    Host memory: the weights themselves if ``device`` is the CPU, and at most a file or 16 MiB and one
    tensor, whichever is less.

    Raises:
        ModelNotFound: files are missing, cut short or damaged.
        UnsupportedModel: the tensors aren't those of this architecture, or aren't floating point.
        NotEnoughMemory: the weights don't fit the device.
    """
    stored = read_headers(weight_files(folder))
    config = _untied_if_they_differ(config, stored)
    check_tensors(folder, config, stored)
    decoder = _allocate(folder, config, device, dtype, ranks)
    pieces = dict(destinations(decoder, stored))
    total = sum(stored[name].num_bytes for name in pieces)
    done = 0

    def report(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(Progress("Loading the model", done, total, "B"))

    report(0)
    by_file: dict[Path, list[str]] = {}
    for name in pieces:
        by_file.setdefault(stored[name].file, []).append(name)
    for file, names in by_file.items():
        for group in _groups(names, stored):
            with _opened(file) as tensors:
                for name in group:
                    for piece in pieces[name]:
                        piece.target.copy_(_read(tensors, name, piece))
                    report(stored[name].num_bytes)
    return decoder


def _read(tensors: Any, name: str, piece: Piece) -> torch.Tensor:
    """That part of a stored tensor; the file is mapped, and only what is copied is read."""
    if piece.dim is None:
        return tensors.get_tensor(name)
    cut = [slice(None)] * piece.dim + [slice(piece.begin, piece.end)]
    return tensors.get_slice(name)[tuple(cut)]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model in ``folder``.

    Raises:
        ModelNotFound: there are none, some are missing, or there are only pickles.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        listed = read_json_object(index).get("weight_map")
        names = sorted(set(map(str, listed.values()))) if isinstance(listed, dict) else []
        if not names or not all(_is_plain_name(name) for name in names):
            raise ModelNotFound(f"{index} doesn't list weight files. Download the model again.")
        files = [folder / name for name in names]
    elif (folder / "model.safetensors").is_file():
        files = [folder / "model.safetensors"]
    else:
        # "consolidated" files hold the same weights a second time, in their maker's own layout.
        found = folder.glob("*.safetensors")
        files = sorted(file for file in found if not file.name.startswith("consolidated"))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelNotFound(
            f"{folder} is incomplete: {missing[0]} is missing"
            + (f", and {len(missing) - 1} more" if len(missing) > 1 else "")
            + ". Download the model again."
        )
    if not files:
        pickles = [file for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern)]
        if pickles:
            raise ModelNotFound(
                f"{folder} has its weights only as a pickle ({pickles[0].name}), which could run any code "
                "when opened. Choose a version with .safetensors files."
            )
        raise ModelNotFound(f"{folder} holds no .safetensors files. Download the model again.")
    return files


def _is_plain_name(name: str) -> bool:
    is_sane = len(name) <= _LONGEST_NAME and name.isprintable()
    return is_sane and name.endswith(".safetensors") and Path(name).name == name


def read_headers(files: list[Path]) -> dict[str, StoredTensor]:
    """Every tensor of ``files`` by name, without reading any data.

    Raises:
        ModelNotFound: a file is cut short or damaged.
    """
    stored: dict[str, StoredTensor] = {}
    for file in files:
        with _opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it isn't a mapping
                view = tensors.get_slice(name)
                stored[name] = StoredTensor(file, tuple(view.get_shape()), view.get_dtype())
    return stored


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            yield tensors
    except SafetensorError as error:
        raise ModelNotFound(
            f"{file} is damaged or only partly downloaded. Delete it and download the model again."
        ) from error
    except OSError as error:
        raise ModelNotFound(f"{file} can't be read: {error.strerror or error}.") from error


def _untied_if_they_differ(config: ModelConfig, stored: dict[str, StoredTensor]) -> ModelConfig:
    """A file with an output matrix of its own is believed over ``tie_word_embeddings``, as elsewhere."""
    head, embedding = stored.get("lm_head.weight"), stored.get("model.embed_tokens.weight")
    if not config.tie_word_embeddings or head is None or embedding is None or head.shape != embedding.shape:
        return config
    with _opened(head.file) as heads, _opened(embedding.file) as embeddings:
        same = torch.equal(
            heads.get_tensor("lm_head.weight"), embeddings.get_tensor("model.embed_tokens.weight")
        )
    return config if same else replace(config, tie_word_embeddings=False)


def check_tensors(source: Path, config: ModelConfig, stored: dict[str, StoredTensor]) -> None:
    """Compare names, shapes and types with those the model needs; allocates nothing.

    Raises:
        ModelNotFound: a tensor is missing.
        UnsupportedModel: a tensor has another shape or type, or isn't used by this architecture.
    """
    sketch = Decoder(config, torch.device("meta"), torch.float32)
    expected: set[str] = set()
    for name, [whole] in destinations(sketch, stored):
        tensor = stored.get(name)
        if tensor is None:
            raise ModelNotFound(
                f"{source} is incomplete or not a {config.architecture}: it has no tensor {name}. "
                "Download the model again."
            )
        if tensor.dtype not in _FLOAT_TYPES:
            raise UnsupportedModel(
                f"{source} holds {tensor.dtype} weights, quantised for another program. Choose the plain "
                "safetensors model or a GGUF file of it."
            )
        if tensor.shape != tuple(whole.target.shape):
            raise UnsupportedModel(
                f"{source} doesn't match its config.json: {name} is {list(tensor.shape)}, "
                f"not {list(whole.target.shape)}."
            )
        expected.add(name)
    unused = sorted(name for name in stored.keys() - expected if not _is_ignorable(name, config))
    if unused:
        raise UnsupportedModel(
            f"{source} holds weights that a {config.architecture} has no use for, such as "
            f"{repr(unused[0])[:100]}; running it without them would give wrong answers."
        )


def _is_ignorable(name: str, config: ModelConfig) -> bool:
    tied = config.tie_word_embeddings and name.endswith("lm_head.weight")
    return tied or name.endswith(_IGNORED_SUFFIXES) or any(part in name for part in _IGNORED_PARTS)


def _allocate(
    folder: Path, config: ModelConfig, device: torch.device, dtype: torch.dtype, ranks: Collectives
) -> Decoder:
    needed = Decoder(config, torch.device("meta"), dtype, ranks).weight_bytes
    too_large = NotEnoughMemory(
        f"The weights of {folder.name} need {needed / 2**30:.1f} GiB, which {device} doesn't have free. "
        "Close other programs or choose a smaller model."
    )
    # A CPU's memory is handed out on credit: the process would be ended while it fills it.
    if device.type == "cpu" and needed > free_cpu_bytes() // ranks.shard.size:
        raise too_large
    try:
        return Decoder(config, device, dtype, ranks)
    except Exception as error:
        if is_out_of_memory(error):
            raise too_large from error
        raise


def _groups(names: list[str], stored: dict[str, StoredTensor]) -> Iterator[list[str]]:
    """``names`` cut after every ``_MAPPED_BYTES``."""
    group: list[str] = []
    size = 0
    for name in names:
        group.append(name)
        size += stored[name].num_bytes
        if size >= _MAPPED_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group
