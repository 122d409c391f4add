"""What `benchmarks/engine.py` measures: a thing that serves prompts, and transformers as one of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch


@dataclass(frozen=True, slots=True)
class Served:
    """One request, done."""

    ttft_s: float
    token_s: Sequence[float]
    """When each of its tokens came, on a clock that all requests of a server share."""
    preemptions: int = 0


def decode_rate(served: Sequence[Served]) -> float:
    """Tokens a second of the time when all requests had their first; 0 where none came after that.

    What some requests were given while others still waited for their first is not counted: that time is not.
    """
    begin = max(each.token_s[0] for each in served)
    later = [at for each in served for at in each.token_s if at > begin]
    return len(later) / (max(later) - begin) if later else 0.0


class Server(Protocol):
    about: dict[str, Any]

    def serve(self, prompts: list[list[int]], outs: list[int], temperature: float) -> list[Served]:
        """Submit all, and generate exactly ``outs`` tokens for each."""

    def extras(self) -> dict[str, float]:
        """Further figures of the last run."""

    def close(self) -> None:
        """Free the device."""


class TransformersBatching:
    """Continuous batching of ``transformers``, with whatever attention it finds on this machine."""

    def __init__(self, folder: Path, max_seqs: int, max_batched_tokens: int) -> None:
        import transformers
        from transformers import AutoModelForCausalLM

        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
        self._limits = {"max_batch_tokens": max_batched_tokens, "max_requests_per_batch": max_seqs}
        self._manager: Any = None
        self._temperature = -1.0
        self.about = {"transformers": transformers.__version__, "options": dict(self._limits)}

    def serve(self, prompts: list[list[int]], outs: list[int], temperature: float) -> list[Served]:
        manager = self._manager_for(temperature)
        started = time.perf_counter()
        ids = [
            manager.add_request(prompt, max_new_tokens=out, record_timestamps=True, eos_token_id=-1)
            for prompt, out in zip(prompts, outs, strict=True)
        ]
        results: dict[str, Served] = {}
        while len(results) < len(ids):
            result = manager.get_result(timeout=60)
            if result is None:
                raise RuntimeError("transformers gave no result in a minute")
            if result.error:
                raise RuntimeError(result.error)
            if result.is_finished():
                token_s = result.timestamps or [time.perf_counter()] * len(result.generated_tokens)
                results[result.request_id] = Served(token_s[0] - started, token_s)
        self.about["attention"] = self._model.config._attn_implementation
        return [results[request_id] for request_id in ids]

    def _manager_for(self, temperature: float) -> Any:
        """How tokens are drawn is the manager's choice, not the request's."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        if self._manager is not None and temperature == self._temperature:
            return self._manager
        self.close()
        sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        config = GenerationConfig(max_new_tokens=1024, eos_token_id=-1, **sampling)
        batching = ContinuousBatchingConfig(allow_block_sharing=False)
        for name, value in self._limits.items():
            if hasattr(batching, name):  # which limits there are depends on the version
                setattr(batching, name, value)
        self._manager = self._model.init_continuous_batching(
            generation_config=config, continuous_batching_config=batching
        )
        self._manager.start()
        self._temperature = temperature
        return self._manager

    def extras(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        if self._manager is not None:
            self._manager.stop(block=True)
            self._manager = None
