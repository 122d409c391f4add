"""What an engine is asked to be, and how a request is to be sampled.

Both are frozen and checked on construction, so that no later code meets a nonsensical value.
Knows nothing of torch, models or threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from nanochat.errors import InvalidOption

Device = Literal["auto", "cuda", "cpu"]
DType = Literal["auto", "bfloat16", "float16", "float32"]
KVDType = Literal["auto", "int8"]
Weights = Literal["auto", "fp32", "bf16", "int8", "int4"]

MAX_TEMPERATURE = 2.0
"""As OpenAI's API has it. Far beyond, every token is as likely as any other: ``9`` is a slip for ``0.9``."""
MAX_REPETITION_PENALTY = 2.0
"""Beyond, answers are made of whatever hasn't been said yet."""


def as_written(value: object) -> str:
    """A value for a message, at most 80 characters; truth as settings files write it."""
    return str(value).lower() if isinstance(value, bool) else f"{value!r:.80}"


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidOption(message)


def _require_choice(name: str, value: str, kind: object) -> None:
    choices = get_args(kind)
    _require(value in choices, f"{name} must be one of {', '.join(choices)}, not {as_written(value)}.")


def _require_int(name: str, value: object, low: int, high: int | None = None) -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    above = is_int and value >= low  # type: ignore[operator]
    below = high is None or (is_int and value <= high)  # type: ignore[operator]
    bound = f"at least {low}" if high is None else f"between {low} and {high}"
    _require(above and below, f"{name} must be a whole number {bound}, not {as_written(value)}.")


def _require_number(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    """``low <= value <= high``, or ``low < value <= high`` with ``above``."""
    ok = isinstance(value, (int, float)) and not isinstance(value, bool)  # comparing also refuses a NaN
    ok = ok and (value > low if above else value >= low) and value <= high  # type: ignore[operator]
    bound = f"above {low:g}" if above else f"at least {low:g}"
    _require(ok, f"{name} must be a number {bound} and at most {high:g}, not {as_written(value)}.")


def _require_flag(name: str, value: object) -> None:
    _require(isinstance(value, bool), f"{name} must be true or false, not {as_written(value)}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that shapes an engine; see docs/usage.md for each option in a user's words."""

    model: str = ""
    """Empty for the default model; else a folder, a ``*.gguf`` file or a Hub id."""
    device: Device = "auto"
    dtype: DType = "auto"
    """Weights and activations. ``auto``: the widest type that is fast on the device."""
    weights: Weights = "auto"
    """Format of the linear maps' weights on a CPU. ``auto``: as compact as the model's file has them, but exact if
    ``dtype`` is float32."""
    kv_dtype: KVDType = "auto"
    """KV cache; ``auto`` means the same as ``dtype``."""
    block_size: int = 16
    """Tokens per KV block."""
    num_kv_blocks: int | None = None
    """None: sized from free memory."""
    max_model_len: int | None = None
    """Longest prompt plus answer, in tokens. None: the model's limit, or what fits the cache."""
    max_num_seqs: int = 64
    """Most requests in one step."""
    max_num_batched_tokens: int = 2048
    """Token budget of one step."""
    step_goal_ms: int = 100
    """While chats are running, prompts are cut so that a step takes about this long. 0: they are not."""
    threads: int | None = None
    """CPU threads that compute. None: the physical cores, one of them left to the screen where there are many."""
    gpu_memory_utilization: float = 0.9
    prefix_caching: bool = True
    cuda_graphs: bool = True
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        _require(isinstance(self.model, str), f"model must be text, not {self.model!r:.80}.")
        _require_choice("device", self.device, Device)
        _require_choice("dtype", self.dtype, DType)
        _require_choice("weights", self.weights, Weights)
        _require_choice("kv_dtype", self.kv_dtype, KVDType)
        _require_int("block_size", self.block_size, 1, 1024)
        if self.num_kv_blocks is not None:
            _require_int("num_kv_blocks", self.num_kv_blocks, 1, 2**31 - 1)  # block tables are int32
        if self.max_model_len is not None:
            _require_int("max_model_len", self.max_model_len, 2)
        _require_int("max_num_seqs", self.max_num_seqs, 1, 65536)
        _require_int("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        _require_int("step_goal_ms", self.step_goal_ms, 0, 3_600_000)
        if self.threads is not None:
            _require_int("threads", self.threads, 1, 1024)
        _require_number("gpu_memory_utilization", self.gpu_memory_utilization, 0, 1, above=True)
        _require_int("tensor_parallel_size", self.tensor_parallel_size, 1)
        _require_flag("prefix_caching", self.prefix_caching)
        _require_flag("cuda_graphs", self.cuda_graphs)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends."""

    temperature: float = 0.7
    """0 is greedy; at most ``MAX_TEMPERATURE``."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this; 0 keeps one token."""
    top_k: int = 0
    """Keep this many tokens; 0 keeps all."""
    min_p: float = 0.0
    """Drop tokens below this share of the likeliest token's probability."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that have occurred become less likely; above 0, at most ``MAX_REPETITION_PENALTY``."""
    max_tokens: int = 1024
    stop: tuple[str, ...] = ()
    """Texts that end the answer; they are not part of it."""
    seed: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    """Report the chosen token's log-probability and this many of the likeliest; None: none."""

    @property
    def is_plainly_greedy(self) -> bool:
        """Whether the likeliest token is taken as the model has it, and nothing else is asked for."""
        return self.temperature == 0 and self.repetition_penalty == 1 and self.logprobs is None

    def __post_init__(self) -> None:
        _require_number("temperature", self.temperature, 0, MAX_TEMPERATURE)
        _require_number("top_p", self.top_p, 0, 1)
        _require_int("top_k", self.top_k, 0)
        _require_number("min_p", self.min_p, 0, 1)
        _require_number("repetition_penalty", self.repetition_penalty, 0, MAX_REPETITION_PENALTY, above=True)
        _require_int("max_tokens", self.max_tokens, 1)
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        _require(
            isinstance(stop, (list, tuple)) and all(isinstance(text, str) and text for text in stop),
            "stop must be one or more texts that are not empty.",
        )
        object.__setattr__(self, "stop", tuple(stop))
        if self.seed is not None:
            _require_int("seed", self.seed, -(2**63), 2**63 - 1)
        if self.logprobs is not None:
            _require_int("logprobs", self.logprobs, 0, 20)
        _require_flag("ignore_eos", self.ignore_eos)
