"""Which models a server has, and which of them is meant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import openai

from nanochat.backend.remote.errors import Explainer
from nanochat.errors import ModelNotFound
from nanochat.sanitize import SURROGATES

LIST_TIMEOUT_S = 20.0
MAX_MODELS = 1_000
MAX_NAMED = 8
"""Models named in a message."""
MAX_ID = 500
_MAX_CONTEXT = 2**31


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as its server calls it."""

    id: str
    context_limit: int | None = None
    """In tokens; vLLM, SGLang and nanochat's server tell it, others don't."""


async def served_models(client: openai.AsyncOpenAI) -> list[ServedModel]:
    """What the server lists. Errors are the client's."""
    page = await client.with_options(timeout=LIST_TIMEOUT_S).models.list()
    entries = getattr(page, "data", None)
    if not isinstance(entries, list):
        raise ValueError("the list of models is none")
    models = []
    for entry in entries[:MAX_MODELS]:
        name = getattr(entry, "id", None)
        if isinstance(name, str) and 0 < len(name) <= MAX_ID and not SURROGATES.search(name):
            models.append(ServedModel(name, _limit(getattr(entry, "max_model_len", None))))
    return models


def choose(models: Sequence[ServedModel] | None, wanted: str, explain: Explainer) -> ServedModel:
    """The model of this name, or the only one.

    Args:
        models: None if the server doesn't list them.

    Raises:
        ModelNotFound: there is none of this name, or several and none was named; names what there is.
    """
    if models is None:
        if wanted:
            return ServedModel(wanted)
        raise ModelNotFound(explain.no_list())
    if wanted:
        found = next((model for model in models if model.id == wanted), None)
        if found is not None:
            return found
        asked = explain.words(wanted, 80)
        raise ModelNotFound(f"{explain.place} has no model {asked}; it has: {_names(models, explain)}.")
    if len(models) == 1:
        return models[0]
    if not models:
        raise ModelNotFound(f"{explain.place} lists no model; it may still be loading one.")
    raise ModelNotFound(
        f"{explain.place} has several models; choose one with --model: {_names(models, explain)}."
    )


def _names(models: Sequence[ServedModel], explain: Explainer) -> str:
    names = [explain.words(model.id, 80) for model in models[:MAX_NAMED]]
    rest = len(models) - len(names)
    return ", ".join(names) + (f" and {rest} more" if rest else "") or "none"


def _limit(value: Any) -> int | None:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and 0 < value < _MAX_CONTEXT else None
