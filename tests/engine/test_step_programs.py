"""Steps recorded as native programs against the same steps computed op by op with PyTorch."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from nanochat.engine.batch import HostBatch
from nanochat.engine.config import EngineConfig, SamplingParams
from nanochat.engine.engine import Engine
from nanochat.engine.loading import load_model
from nanochat.engine.memory import allocate_caches
from nanochat.engine.models.cpu_weights import prepare_weights
from nanochat.engine.models.decoder import Decoder
from nanochat.engine.models.families import load_model_config
from nanochat.engine.models.weights import load_decoder
from nanochat.engine.runner import Runner
from nanochat.engine.step_programs import FEW_TOKENS, StepPrograms, record_steps
from nanochat.kernels.cache import LayerCache
from nanochat.kernels.native import library
from tests.engine.models.random_models import CASES, random_tokens, write_random_model
from tests.native import require_native

CPU = torch.device("cpu")
BLOCK_SIZE = 4
MAX_MODEL_LEN = 120
MANY_TOKENS = 100
NATIVE = [name for name in CASES if "moe" not in name and "softcap" not in name and "factors" not in name]


@pytest.fixture(autouse=True)
def native() -> None:
    require_native()


def make_decoder(folder: Path, name: str, dtype: torch.dtype) -> Decoder:
    write_random_model(folder, CASES[name], head_dim=32)
    return load_decoder(folder, load_model_config(folder), CPU, dtype)


def make_caches(decoder: Decoder, kv_dtype: torch.dtype | None = None) -> list[LayerCache]:
    """Poisoned until written."""
    caches = allocate_caches(decoder.local, 64, BLOCK_SIZE, kv_dtype or decoder.dtype, CPU)
    for cache in caches:
        for tensor in (cache.k, cache.v, cache.k_scale, cache.v_scale):
            if tensor is not None:
                tensor.fill_(float("nan") if tensor.is_floating_point() else 127)
    return caches


class Sequences:
    """Steps of sequences whose blocks are dealt in a scrambled order: `HostBatch`es, as a plan gives them."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._free = list(range(64))
        self._random.shuffle(self._free)
        self._tables: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}

    def step(self, chunks: dict[int, list[int]], sampling: list[int]) -> HostBatch:
        """``chunks``: new tokens by sequence, decodes first; ``sampling``: those whose last token samples."""
        ids, positions, slots, starts = [], [], [], [0]
        for key, tokens in chunks.items():
            begin, table = self._lengths.get(key, 0), self._tables.setdefault(key, [])
            for position in range(begin, begin + len(tokens)):
                if position // BLOCK_SIZE == len(table):
                    table.append(self._free.pop())
                positions.append(position)
                slots.append(table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
            ids += tokens
            starts.append(len(ids))
            self._lengths[key] = begin + len(tokens)
        tables = np.zeros((len(chunks), max(len(self._tables[key]) for key in chunks)), np.int32)
        for row, key in enumerate(chunks):
            tables[row, : len(self._tables[key])] = self._tables[key]
        return HostBatch(
            input_ids=np.array(ids, np.int64),
            positions=np.array(positions, np.int64),
            slots=np.array(slots, np.int64),
            block_tables=tables,
            context_lens=np.array([self._lengths[key] for key in chunks], np.int32),
            query_starts=np.array(starts, np.int32),
            sample_rows=np.array(
                [starts[row + 1] - 1 for row, key in enumerate(chunks) if key in sampling], np.int64
            ),
        )


def by_pytorch(decoder: Decoder, caches: list[LayerCache], host: HostBatch) -> torch.Tensor:
    """The same step without a program: logits ``[S, vocab]``."""
    from nanochat.engine.batch import upload_batch

    num_decodes = int((np.diff(host.query_starts) == 1).sum())
    batch = upload_batch(host, num_decodes, CPU)
    hidden = decoder.forward(batch.input_ids, batch.positions, batch.slots, batch.attention, caches)
    return decoder.compute_logits(hidden[batch.sample_rows])


def steps_of(seed: int = 0) -> list[HostBatch]:
    """Two prompts, decodes of one to three sequences, chunks beside them, and one that outgrows a block table's start."""
    sequences = Sequences(seed)
    tokens = random_tokens(400, seed)
    take = lambda count: [tokens.pop() for _ in range(count)]  # noqa: E731
    return [
        sequences.step({0: take(9)}, [0]),
        sequences.step({0: take(1), 1: take(FEW_TOKENS - 1)}, [0, 1]),
        *(sequences.step({0: take(1), 1: take(1)}, [0, 1]) for _ in range(6)),
        sequences.step({1: take(1), 2: take(5)}, [1]),
        sequences.step({1: take(1), 2: take(1), 0: take(3)}, [1, 2, 0]),
        *(sequences.step({2: take(1), 0: take(1), 1: take(1)}, [2, 0, 1]) for _ in range(3)),
    ]


@pytest.mark.parametrize("name", NATIVE)
@torch.inference_mode()
def test_every_family_gives_the_logits_of_pytorch(name: str, tmp_path: Path) -> None:
    decoder = make_decoder(tmp_path, name, torch.float32)
    caches, other = make_caches(decoder), make_caches(decoder)
    found = library.find()
    assert found is not None
    programs = StepPrograms(decoder, caches, found, MAX_MODEL_LEN)
    for host in steps_of():
        assert programs.fits(host)
        (actual, best), expected = programs.run(host), by_pytorch(decoder, other, host)
        torch.testing.assert_close(actual, expected, atol=2e-4, rtol=2e-4)
        assert torch.equal(best, expected.argmax(-1))


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8])
@torch.inference_mode()
def test_every_format_gives_nearly_the_logits_of_pytorch(
    weights: str, kv_dtype: torch.dtype, tmp_path: Path
) -> None:
    decoder = make_decoder(tmp_path, "qwen3-biases-yarn", torch.bfloat16)
    plain = load_decoder(tmp_path, load_model_config(tmp_path), CPU, torch.bfloat16)
    prepare_weights(decoder, weights)  # type: ignore[arg-type]
    caches, other, third = (
        make_caches(decoder, kv_dtype),
        make_caches(decoder, kv_dtype),
        make_caches(decoder),
    )
    programs = record_steps(decoder, caches, library.find(), MAX_MODEL_LEN)
    assert programs is not None
    for host in steps_of(1):
        actual = programs.run(host)[0].clone()
        op_by_op, full = by_pytorch(decoder, other, host), by_pytorch(plain, third, host)
        scale = float(full.std())
        # Op by op the same kernels multiply, but BF16 and 8 bits round elsewhere.
        assert float((actual - op_by_op).abs().mean()) < 0.06 * scale
        assert float((actual - full).abs().mean()) < {"bf16": 0.05, "int8": 0.1, "int4": 0.5}[weights] * scale


def large_steps(seed: int = 0) -> list[HostBatch]:
    """Prompts of many tokens: whole, in chunks of which only the last samples, and beside decodes."""
    sequences = Sequences(seed)
    tokens = random_tokens(400, seed)
    take = lambda count: [tokens.pop() for _ in range(count)]  # noqa: E731
    return [
        sequences.step({0: take(70)}, [0]),
        sequences.step({1: take(40)}, []),
        sequences.step({0: take(1), 1: take(35), 2: take(3)}, [0, 2]),
        sequences.step({0: take(1), 2: take(1), 1: take(40)}, [0, 2, 1]),
        sequences.step({0: take(1), 1: take(1), 2: take(1)}, [0, 1, 2]),
    ]


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("instruction_set", ["amx", "avx2"])
@torch.inference_mode()
def test_large_steps_give_nearly_the_logits_of_pytorch(
    name: str, instruction_set: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = library.find(instruction_set)
    if found is None:
        pytest.skip(f"this processor has no {instruction_set}")
    monkeypatch.setattr(library, "find", lambda: found)
    dtype = torch.bfloat16 if library.rounds_to_bf16() else torch.float32
    decoder = make_decoder(tmp_path, name, dtype)
    plain = load_decoder(tmp_path, load_model_config(tmp_path), CPU, torch.float32)
    prepare_weights(decoder, "bf16")
    caches, other = make_caches(decoder), make_caches(plain)
    programs = StepPrograms(decoder, caches, found, MAX_MODEL_LEN, MANY_TOKENS)
    for host in large_steps():
        assert programs.fits(host)
        actual, best = programs.run(host)
        expected = by_pytorch(plain, other, host)
        assert torch.equal(best, actual.argmax(-1))
        if dtype == torch.float32:
            torch.testing.assert_close(actual, expected, atol=2e-4, rtol=2e-4)
        elif len(actual):
            assert float((actual - expected).abs().mean()) < 0.05 * float(expected.std())


@pytest.mark.parametrize("threads", [1, 2, 4])
@torch.inference_mode()
def test_a_rows_logits_do_not_depend_on_threads_or_on_the_rows_beside_it(
    threads: int, tmp_path: Path
) -> None:
    decoder = make_decoder(tmp_path, "llama", torch.bfloat16)
    prepare_weights(decoder, "int4")
    found = library.find()
    assert found is not None
    before = torch.get_num_threads()
    alone, together = (StepPrograms(decoder, make_caches(decoder), found, MAX_MODEL_LEN) for _ in range(2))
    one, many = Sequences(), Sequences()
    tokens = random_tokens(80)
    expected = []
    for token in tokens[:12]:
        expected.append(alone.run(one.step({0: [token]}, [0]))[0].clone())
    torch.set_num_threads(threads)
    for index, token in enumerate(tokens[:12]):
        host = many.step({5: tokens[index : index + 3], 0: [token], 7: [3]}, [0, 7])
        assert torch.equal(together.run(host)[0][0], expected[index][0])
    torch.set_num_threads(before)


@torch.inference_mode()
def test_contexts_beyond_the_rotary_tables_are_recorded_anew(tmp_path: Path) -> None:
    decoder = make_decoder(tmp_path, "llama", torch.float32)
    caches, other = make_caches(decoder), make_caches(decoder)
    decoder.reserve_positions(10)
    programs = record_steps(decoder, caches, library.find(), MAX_MODEL_LEN)
    assert programs is not None
    sequences = Sequences()
    for begin in range(0, 28, 7):
        host = sequences.step({0: random_tokens(60)[begin : begin + 7]}, [0])
        actual = programs.run(host)[0].clone()
        torch.testing.assert_close(actual, by_pytorch(decoder, other, host), atol=2e-4, rtol=2e-4)


def test_a_recording_that_fails_is_made_by_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = make_decoder(tmp_path, "llama", torch.float32)
    caches, other = make_caches(decoder), make_caches(decoder)
    decoder.reserve_positions(10)
    programs = record_steps(decoder, caches, library.find(), MAX_MODEL_LEN)
    assert programs is not None
    host = Sequences().step({0: random_tokens(15)}, [0])

    def fail(*_: object) -> torch.Tensor:
        raise MemoryError

    with monkeypatch.context() as patches:
        patches.setattr(decoder, "compute_logits", fail)
        with pytest.raises(MemoryError):
            programs.run(host)
    actual = programs.run(host)[0].clone()
    torch.testing.assert_close(actual, by_pytorch(decoder, other, host), atol=2e-4, rtol=2e-4)


def test_steps_that_are_too_large_or_sample_too_many_do_not_fit(tmp_path: Path) -> None:
    decoder = make_decoder(tmp_path, "llama", torch.float32)
    with torch.inference_mode():
        programs = record_steps(decoder, make_caches(decoder), library.find(), MAX_MODEL_LEN, MANY_TOKENS)
    assert programs is not None
    sequences = Sequences()
    assert not programs.fits(sequences.step({0: random_tokens(MANY_TOKENS + 1)}, [0]))
    sequences = Sequences()
    singles = {key: [5] for key in range(1, FEW_TOKENS + 2)}
    assert not programs.fits(sequences.step(singles, list(singles)))
    assert programs.fits(sequences.step({0: [5]}, []))
    with pytest.raises(ValueError, match="no recording"):
        programs.run(Sequences().step({0: random_tokens(MANY_TOKENS + 1)}, [0]))


@pytest.mark.parametrize("name", ["qwen3-moe", "gemma3-softcap"])
@torch.inference_mode()
def test_a_model_with_other_operations_keeps_pytorch(name: str, tmp_path: Path) -> None:
    decoder = make_decoder(tmp_path, name, torch.float32)
    assert record_steps(decoder, make_caches(decoder), library.find(), MAX_MODEL_LEN) is None
    assert record_steps(decoder, make_caches(decoder), None, MAX_MODEL_LEN) is None


def config(folder: Path, **options: object) -> EngineConfig:
    return EngineConfig(model=str(folder), device="cpu", num_kv_blocks=64, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_the_engine_answers_with_them(tiny_llama: Path, kv_dtype: str) -> None:
    prompts = [[7, 8, 9], random_tokens(50), [100] * 30]
    kinds = [
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, repetition_penalty=1.2),
        SamplingParams(temperature=0.7, seed=3, max_tokens=20, ignore_eos=True, logprobs=2),
    ]
    answers = []
    for steps_ahead in (0, 2):
        options = config(tiny_llama, dtype="bfloat16", kv_dtype=kv_dtype, prefix_caching=False)
        with Engine(options, debug=True, max_steps_ahead=steps_ahead) as engine:
            assert engine.compute_name == "cpu bf16 native"
            # One after the other, since which chats share a step is a matter of time otherwise.
            asked = [(prompt, params) for prompt in prompts for params in kinds]
            answers.append([engine.submit(*each).result(60).token_ids for each in asked])
            handles = [engine.submit(*each) for each in asked]
            assert all(len(handle.result(60).token_ids) == 20 for handle in handles)
    assert answers[0] == answers[1]


def test_whoever_asks_for_float32_gets_pytorch(tiny_llama: Path) -> None:
    for options in ({"dtype": "float32"}, {"weights": "fp32"}):
        model = load_model(config(tiny_llama, **options), lambda progress: None)
        assert not model.runner.is_native


def test_the_runner_computes_without_programs_too(tiny_llama: Path) -> None:
    model = load_model(config(tiny_llama, dtype="bfloat16"), lambda progress: None)
    assert model.runner.is_native
    plain = Runner(model.runner.decoder, model.runner._caches)
    with torch.inference_mode():
        plain.warm_up(40, 3)
        model.runner.warm_up(20, 3)
