"""Options are checked where they are made."""

from __future__ import annotations

from typing import Any

import pytest

from nanochat import EngineConfig, SamplingParams
from nanochat.errors import InvalidOption, NanochatError


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"device": "tpu"}, "device must be one of auto, cuda, cpu, not 'tpu'."),
        ({"weights": "q4"}, "weights must be one of auto, fp32, bf16, int8, int4, not 'q4'."),
        ({"kv_dtype": "int4"}, "kv_dtype must be one of auto, int8"),
        ({"block_size": 0}, "block_size must be a whole number between 1 and 1024, not 0."),
        ({"block_size": True}, "block_size must be a whole number"),
        ({"num_kv_blocks": 0}, "num_kv_blocks must be a whole number between 1"),
        ({"max_model_len": 1}, "max_model_len must be a whole number at least 2"),
        ({"max_num_batched_tokens": "many"}, "not 'many'"),
        ({"gpu_memory_utilization": 0}, "above 0 and at most 1"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization must be a number"),
        ({"gpu_memory_utilization": 10**400}, "gpu_memory_utilization must be a number"),
        ({"num_kv_blocks": 2**31}, "num_kv_blocks must be a whole number between 1 and 2147483647"),
        ({"prefix_caching": "no"}, "prefix_caching must be true or false, not 'no'."),
        ({"cuda_graphs": 0}, "cuda_graphs must be true or false, not 0."),
        ({"model": 3}, "model must be text"),
    ],
)
def test_engine_options_that_cannot_work_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        EngineConfig(**options)
    assert sentence in str(caught.value)
    assert isinstance(caught.value, NanochatError)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"temperature": -0.1}, "temperature must be a number at least 0"),
        ({"temperature": 2.01}, "temperature must be a number at least 0 and at most 2, not 2.01."),
        ({"temperature": float("inf")}, "temperature must be a number"),
        ({"temperature": float("nan")}, "temperature must be a number"),
        ({"temperature": 10**400}, "temperature must be a number"),
        ({"top_p": 1.1}, "top_p must be a number at least 0 and at most 1"),
        ({"top_k": -1}, "top_k must be a whole number at least 0"),
        ({"min_p": 2}, "min_p must be a number"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a number above 0"),
        ({"repetition_penalty": 2.5}, "repetition_penalty must be a number above 0 and at most 2, not 2.5."),
        ({"max_tokens": 0}, "max_tokens must be a whole number at least 1"),
        ({"stop": ("",)}, "stop must be one or more texts that are not empty."),
        ({"stop": 5}, "stop must be one or more texts"),
        ({"stop": {"a": 1}}, "stop must be one or more texts"),
        ({"ignore_eos": "yes"}, "ignore_eos must be true or false, not 'yes'."),
        ({"seed": 2**63}, "seed must be a whole number"),
        ({"logprobs": 21}, "logprobs must be a whole number between 0 and 20"),
    ],
)
def test_sampling_options_that_cannot_work_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        SamplingParams(**options)
    assert sentence in str(caught.value)


def test_one_stop_text_may_be_given_bare() -> None:
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
