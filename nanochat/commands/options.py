"""Options that every command with an engine shares, and their merging with the settings file."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

from nanochat.backend.opening import BackendConfig
from nanochat.backend.remote.config import RemoteConfig
from nanochat.engine.config import Device, DType, EngineConfig, KVDType, Weights
from nanochat.errors import InvalidOption, WrongUsage
from nanochat.settings import Settings, load_settings

EARLY = "early:"
"""Begins the names of options written before a command."""
CONNECT_OPTIONS = frozenset({"connect", "api_key_env", "model", "system", "config"})
"""What can be said about a server."""


def add_engine_options(
    parser: argparse.ArgumentParser, leave_out: Collection[str] = (), *, prefix: str = ""
) -> None:
    """Add them. Their defaults are absent, so that the settings file can say what the command line doesn't.

    The parsed arguments' ``engine_options`` tells which there are, as flags by name.

    Args:
        leave_out: fields that mean nothing to this command; it refuses the options for them.
        prefix: put before the names of the parsed values.
    """
    group = parser.add_argument_group("model and engine")
    flags: dict[str, str] = {}
    parser.set_defaults(engine_options=flags)

    def option(flag: str, dest: str, help: str, **how: object) -> None:
        if dest in leave_out:
            return
        flags[dest] = flag
        group.add_argument(flag, dest=prefix + dest, help=help, default=argparse.SUPPRESS, **how)  # type: ignore[arg-type]

    option(
        "--model", "model", "a folder, a .gguf file or a Hub id; left out: the default model", metavar="MODEL"
    )
    option("--kv", "kv_dtype", "type of the KV cache", choices=get_args(KVDType))
    option("--device", "device", "where to run", choices=get_args(Device))
    option("--dtype", "dtype", "type of weights and activations", choices=get_args(DType))
    option("--weights", "weights", "format of the weights on a CPU", choices=get_args(Weights))
    option("--max-model-len", "max_model_len", "longest prompt plus answer, in tokens", type=int, metavar="N")
    option("--kv-blocks", "num_kv_blocks", "KV blocks in the cache", type=int, metavar="N")
    option("--block-size", "block_size", "tokens per KV block", type=int, metavar="N")
    option("--max-seqs", "max_num_seqs", "most requests in one step", type=int, metavar="N")
    option("--max-batched-tokens", "max_num_batched_tokens", "most tokens in one step", type=int, metavar="N")
    option(
        "--step-goal-ms",
        "step_goal_ms",
        "how long a step may take while chats are running",
        type=int,
        metavar="N",
    )
    option("--threads", "threads", "CPU threads that compute", type=int, metavar="N")
    option(
        "--gpu-memory-utilization",
        "gpu_memory_utilization",
        "share of the GPU's memory to use",
        type=float,
        metavar="X",
    )
    option("--tp", "tensor_parallel_size", "number of GPUs", type=int, metavar="N")
    option("--no-prefix-cache", "prefix_caching", "compute every prompt in full", action="store_false")
    option("--no-cuda-graphs", "cuda_graphs", "launch GPU kernels one by one", action="store_false")
    option("--system", "system", "system prompt", metavar="TEXT")
    option("--config", "config", "settings file (TOML)", type=Path, metavar="FILE")


def add_connect_options(parser: argparse.ArgumentParser, *, prefix: str = "") -> None:
    """Add those for a server instead of an engine of our own, after :func:`add_engine_options`."""
    group = parser.add_argument_group("a server instead")
    flags = parser.get_default("engine_options")
    for flag, dest, metavar, help in (
        ("--connect", "connect", "URL", "chat with this server of OpenAI's API; --model is as it calls it"),
        ("--api-key-env", "api_key_env", "NAME", "environment variable that holds the server's key"),
    ):
        flags[dest] = flag
        group.add_argument(flag, dest=prefix + dest, metavar=metavar, help=help, default=argparse.SUPPRESS)


def backend_config(args: argparse.Namespace) -> tuple[Settings, BackendConfig]:
    """The settings file named or found, and the engine to load or the server to connect with.

    Raises:
        WrongUsage: an option has a value that can't work, or no effect beside another.
        InvalidOption: the settings file holds one, or the key isn't where it should be.
    """
    flags: Mapping[str, str] = args.engine_options
    if not hasattr(args, "connect"):
        if hasattr(args, "api_key_env"):
            raise WrongUsage(f"{flags['api_key_env']} has no effect without {flags['connect']}.")
        return engine_config(args)
    for name, flag in flags.items():
        if hasattr(args, name) and name not in CONNECT_OPTIONS:
            raise WrongUsage(f"{flag} has no effect with {flags['connect']}: the server decides it.")
    with from_command_line({**flags, "url": flags["connect"]}):
        remote = RemoteConfig(
            url=args.connect,
            model=getattr(args, "model", ""),
            api_key_env=getattr(args, "api_key_env", ""),
        )
    remote.key()  # what is wrong with it is better told before the screen is taken
    return load_settings(getattr(args, "config", None)), remote


def engine_config(args: argparse.Namespace) -> tuple[Settings, EngineConfig]:
    """The settings file named or found, and the engine options of both.

    Raises:
        WrongUsage: an option has a value that can't work.
        InvalidOption: the settings file holds one.
    """
    given = {name: value for name, value in vars(args).items() if name in EngineConfig.__dataclass_fields__}
    with from_command_line(args.engine_options):
        EngineConfig(**given)
    settings = load_settings(getattr(args, "config", None))
    return settings, settings.engine_config(given)


@contextmanager
def from_command_line(flags: Mapping[str, str]) -> Iterator[None]:
    """Inside, only values from the command line are checked: a wrong one is wrong usage, told by its flag.

    Args:
        flags: by the names with which the checks' messages begin.
    """
    try:
        yield
    except InvalidOption as error:
        name, blank, rest = str(error).partition(" ")
        raise WrongUsage(flags.get(name, name) + blank + rest) from error
