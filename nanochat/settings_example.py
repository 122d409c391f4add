"""A settings file with every option, its meaning and its default, made from the options themselves.

Every line that sets something is commented out, so that the file as printed changes nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any, get_args, get_type_hints

from nanochat.engine.config import EngineConfig, SamplingParams
from nanochat.settings import SAMPLING_OPTIONS, AppSettings

ENGINE_HELP = {
    "model": 'a folder, a .gguf file or a Hub id; "" is the default model',
    "device": "where to run",
    "dtype": "type of weights and activations; auto: the widest that is fast there",
    "weights": "format of the weights on a CPU; auto: as compact as the model's file has them",
    "kv_dtype": "type of the KV cache; auto: as dtype; int8 holds about twice the tokens",
    "block_size": "tokens per KV block",
    "num_kv_blocks": "KV blocks in the cache; left out: what fits the free memory",
    "max_model_len": "longest prompt plus answer, in tokens; left out: the model's limit, or what fits",
    "max_num_seqs": "most requests in one step",
    "max_num_batched_tokens": "most tokens in one step",
    "step_goal_ms": "while chats run, prompts are cut so that a step takes about so long; 0: they are not",
    "threads": "CPU threads that compute; left out: the physical cores, less one for the screen from four on",
    "gpu_memory_utilization": "share of the GPU's memory to use",
    "prefix_caching": "reuse the KV blocks of what was computed before",
    "cuda_graphs": "launch a step on a GPU as one CUDA graph where that is possible",
    "tensor_parallel_size": "number of GPUs",
}
SAMPLING_HELP = {
    "temperature": "up to 2; 0 always takes the likeliest token",
    "top_p": "keep the likeliest tokens whose probabilities reach this together; 1 keeps all",
    "top_k": "keep this many of the likeliest tokens; 0 keeps all",
    "min_p": "drop tokens below this share of the likeliest one's probability",
    "repetition_penalty": "above 1 and up to 2, tokens that have occurred become less likely",
    "max_tokens": "longest answer, in tokens",
    "stop": "texts that end an answer; they are not part of it",
    "seed": "the same seed gives the same answer; left out: a new one each time",
    "ignore_eos": "go on to max_tokens, whatever the model says",
}
APP_HELP = {
    "theme": "the colours; NO_COLOR in the environment leaves only greys",
    "panel": "how large the stats panel is at first; auto: what fits the screen",
    "reduced_motion": "nothing scrolls smoothly, slides or flashes",
    "screenshot_folder": "where F5 saves pictures; empty: your pictures folder",
    "export_folder": "where /export saves chats; empty: your documents folder",
    "clipboard": "how to copy; auto: through the terminal (OSC 52) and with a tool such as wl-copy",
}
SAMPLES: Mapping[str, Any] = {
    "num_kv_blocks": 1024,
    "max_model_len": 8192,
    "threads": 4,
    "seed": 1,
    "stop": ["END"],
}
"""Shown for options whose default can't be written in TOML, or says too little."""

HEADER = """\
# nanochat's settings. The command line wins over this file. Remove a # to set something; each line shows
# the default, or an example where there is none.
"""


def example(keys: Iterable[tuple[str, str, str]]) -> str:
    """The whole file.

    Args:
        keys: id, key names and help of every action that has a key.
    """
    parts = [
        HEADER,
        '# What every new chat tells the model first.\n# system = "Answer briefly."\n',
        _table("engine", "how the model runs", EngineConfig, ENGINE_HELP),
        _table(
            "sampling",
            "how answers are chosen; over what the model recommends",
            SamplingParams,
            SAMPLING_HELP,
        ),
        _table("app", "looks and habits", AppSettings, APP_HELP),
        "# Settings of a chat under a name: /preset precise. Any option of [sampling], and system.\n"
        '# [presets.precise]\n# system = "Answer briefly."\n# temperature = 0.0\n',
        _keys(keys),
    ]
    return "\n".join(parts)


def _table(name: str, about: str, kind: type[Any], help: Mapping[str, str]) -> str:
    hints = get_type_hints(kind)
    lines = [f"# {about[0].upper()}{about[1:]}.", f"[{name}]"]
    for option in dataclasses.fields(kind):
        if kind is SamplingParams and option.name not in SAMPLING_OPTIONS:
            continue
        choices = [choice for choice in get_args(hints[option.name]) if isinstance(choice, str)]
        about = help[option.name] + (f" ({', '.join(choices)})" if choices else "")
        value = SAMPLES.get(option.name, option.default)
        lines.append(f"# {f'{option.name} = {_toml(value)}':<34} # {about}")
    return "\n".join(lines) + "\n"


def _keys(keys: Iterable[tuple[str, str, str]]) -> str:
    lines = [
        '# Keys of the app, as "ctrl+g", "alt+left", "shift+f2", "f9", or a list of them.',
        "[keys]",
    ]
    for action, names, help in keys:
        value = names.split(",")
        lines.append(f"# {f'{action} = {_toml(value[0] if len(value) == 1 else value)}':<44} # {help}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """JSON's numbers, booleans, texts and lists of texts are TOML's too."""
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
