"""Load a model folder's tokenizer and what the folder says of ending and sampling.

Knows the files of a folder in Hugging Face form; nothing of models, requests or chat templates. The files
are hostile input: no code from the folder is ever run, and a broken file gives a sentence, not a traceback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanochat.engine.chat_template import ChatTemplate
from nanochat.engine.models.config_reader import read_json_object
from nanochat.engine.panics import is_panic
from nanochat.errors import InvalidOption, ModelNotFound, UnsupportedModel, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = (
    ("tokenizer.json",),
    ("tokenizer.model",),
    ("vocab.json", "merges.txt"),
    ("tekken.json",),
    ("tiktoken.model",),
)
"""Each line is all that a tokenizer can be made from."""

_NO_LIMIT = int(1e30)
"""What ``transformers`` takes for it."""


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder.

    ``tokenizer.json`` holds the whole tokenizer as the model was trained with it, so it is read as it
    stands. ``AutoTokenizer`` gives the same for most families at twice the import time; for some classes
    (``GPT2Tokenizer``, ``LlamaTokenizer``) it keeps only the vocabulary and rebuilds the steps around it,
    which loses for instance SmolLM2's splitting of digits. A folder with only older files goes through it
    all the same. Code that comes with the model (``trust_remote_code``) is never run.

    Raises:
        ModelNotFound: the folder or its tokenizer files aren't there.
        UnsupportedModel: the files can't be read, or need code that comes with the model.
    """
    if not folder.is_dir():
        raise ModelNotFound(f"There is no model folder {folder}; check the path.")
    if not has_tokenizer(folder):
        raise ModelNotFound(
            f"{folder} has no tokenizer (tokenizer.json); the download may be incomplete, so fetch it again."
        )
    load = _load_fast if (folder / "tokenizer.json").is_file() else _load_with_auto
    try:
        tokenizer = load(folder)
    except BaseException as error:
        if not _is_load_failure(error):
            raise
        raise UnsupportedModel(_why_unusable(folder, error)) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UnsupportedModel(
            f"The tokenizer in {folder} has no fast form (tokenizer.json); choose a model that has one."
        )
    # Settings of the training run, which may lie in tokenizer.json, must not cut or pad prompts.
    backend.no_truncation()
    backend.no_padding()
    # The engine says in its own words when a prompt is too long; a log line would garble the screen.
    tokenizer.model_max_length = _NO_LIMIT
    return tokenizer


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder has files that a tokenizer can be made from."""
    return any(all((folder / name).is_file() for name in names) for names in TOKENIZER_FILES)


def _load_fast(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)


def _load_with_auto(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


def _why_unusable(folder: Path, error: BaseException) -> str:
    if "trust_remote_code" in str(error):
        return f"The tokenizer in {folder} needs code that comes with the model, which is never run."
    reason = one_line(error) or type(error).__name__
    return f"The tokenizer in {folder} can't be read ({reason}); fetch the model again or choose another."


def _is_load_failure(error: BaseException) -> bool:
    return isinstance(error, Exception) or is_panic(error)


def eos_token_ids(folder: Path, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every token id that ends an answer.

    They are those of ``generation_config.json``, ``config.json`` and the tokenizer, and the token with which
    the chat template ends an answer: converted and fine-tuned models often name only the base model's.

    Raises:
        ModelNotFound: one of the files isn't JSON.
    """
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        settings = _read_settings(folder / name)
        text_settings = settings.get("text_config")
        for source in (settings, text_settings if isinstance(text_settings, dict) else {}):
            found.update(_token_ids(source.get("eos_token_id")))
    found.update(_token_ids(tokenizer.eos_token_id))
    end_of_turn = ChatTemplate(tokenizer).end_of_turn
    if end_of_turn is not None:
        found.update(_token_ids(tokenizer.convert_tokens_to_ids(end_of_turn)))
    return frozenset(found)


def default_sampling(folder: Path) -> dict[str, float | int]:
    """The sampling settings that ``generation_config.json`` recommends; only those present and usable.

    Keys are names of :class:`~nanochat.engine.config.SamplingParams`. A file that says ``do_sample: false``
    asks for greedy decoding, which is a temperature of 0.

    Raises:
        ModelNotFound: the file isn't JSON.
    """
    from nanochat.engine.config import SamplingParams

    settings = _read_settings(folder / "generation_config.json")
    found: dict[str, float | int] = {}
    kinds: dict[str, Callable[[float], float | int]] = {
        "temperature": float,
        "top_p": float,
        "top_k": int,
        "min_p": float,
        "repetition_penalty": float,
    }
    for name, convert in kinds.items():
        value = settings.get(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            continue
        try:
            converted = convert(value)
            SamplingParams(**{name: converted})  # type: ignore[arg-type]
        except (InvalidOption, ValueError, OverflowError):
            continue  # a value that can't be used is no recommendation
        found[name] = converted
    if settings.get("do_sample") is False:
        found["temperature"] = 0.0
    return found


def _token_ids(value: object) -> Iterable[int]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool) and item >= 0]


def _read_settings(file: Path) -> dict[str, Any]:
    """A JSON file that a model may have or not."""
    return read_json_object(file) if file.is_file() else {}
