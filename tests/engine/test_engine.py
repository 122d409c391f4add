"""The engine from outside: what any thread may call, and what comes back."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from nanochat.engine.config import EngineConfig, SamplingParams
from nanochat.engine.detokenizer import Detokenizer
from nanochat.engine.engine import Engine
from nanochat.engine.live_request import LiveRequest
from nanochat.engine.runner import Runner
from nanochat.errors import EngineClosed, InvalidOption, ModelNotFound, NotEnoughMemory, PromptTooLong
from tests.engine.conftest import MakeEngine, assert_idle_and_consistent, wait_until

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


def prompts(count: int, length: int = 20) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count * 1000 + length)
    return [torch.randint(3, 259, (length + 3 * i,), generator=generator).tolist() for i in range(count)]


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> dict[tuple[int, ...], list[int]]:
    """``transformers``' greedy tokens of the prompts that the tests below use."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    answers = {}
    for prompt in prompts(8):
        output = model.generate(
            torch.tensor([prompt]), max_new_tokens=GREEDY.max_tokens, do_sample=False, pad_token_id=0
        )
        answers[tuple(prompt)] = output[0, len(prompt) :].tolist()
    return answers


class TestGreedyTokensEqualTransformers:
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"max_num_batched_tokens": 7},
            {"num_kv_blocks": 12, "block_size": 8},
            {"prefix_caching": False},
            {"block_size": 1, "num_kv_blocks": 700},
            {"max_num_seqs": 3, "max_num_batched_tokens": 16, "num_kv_blocks": 16, "block_size": 8},
        ],
        ids=["plain", "chunked", "preempted", "no prefix cache", "block of one", "all at once"],
    )
    def test_eight_at_once(
        self, make_engine: MakeEngine, expected: dict[tuple[int, ...], list[int]], options: dict[str, Any]
    ) -> None:
        engine = make_engine(**options)
        handles = [engine.submit(list(prompt), GREEDY) for prompt in expected]
        assert [handle.result(60).token_ids for handle in handles] == list(expected.values())
        if options.get("num_kv_blocks") == 12:
            assert engine.stats().preemptions > 0

    def test_each_alone_and_again_from_the_prefix_cache(
        self, make_engine: MakeEngine, expected: dict[tuple[int, ...], list[int]]
    ) -> None:
        engine = make_engine()
        for prompt, answer in expected.items():
            first = engine.submit(list(prompt), GREEDY).result(60)
            again = engine.submit(list(prompt), GREEDY).result(60)
            assert first.token_ids == again.token_ids == answer
            assert (first.metrics.cached_tokens, again.metrics.cached_tokens) == (
                0,
                (len(prompt) - 1) // 16 * 16,
            )


class TestPrompts:
    def test_text_messages_and_ids_are_the_same_prompt(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        messages = [{"role": "user", "content": "Hi"}]
        ids = engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        text = engine.tokenizer.decode(ids)
        outputs = [engine.submit(prompt, GREEDY).result(60) for prompt in (messages, ids, text)]
        assert len({tuple(output.token_ids) for output in outputs}) == 1
        assert {output.metrics.prompt_tokens for output in outputs} == {len(ids)}

    def test_what_is_no_prompt_is_refused(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        message = {"role": "user", "content": "Hi"}
        for prompt in ("", [], [-1], [10**6], None, 5, b"Hi", ["Hi"], [1.5], [[1]], message, [message, 5]):
            with pytest.raises(InvalidOption):
                engine.submit(prompt)  # type: ignore[arg-type]

    def test_ids_may_be_an_array_or_a_tensor(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        ids = torch.tensor([40, 41, 42])
        outputs = [engine.submit(prompt, GREEDY).result(60) for prompt in (ids, ids.numpy(), ids.tolist())]  # type: ignore[arg-type]
        assert len({tuple(output.token_ids) for output in outputs}) == 1

    def test_half_a_surrogate_pair_is_a_replacement_character(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        outputs = [engine.submit(text, GREEDY).result(60) for text in ("a\ud800b", "a\ufffdb")]
        assert outputs[0].token_ids == outputs[1].token_ids
        assert outputs[0].metrics.prompt_tokens == outputs[1].metrics.prompt_tokens

    def test_a_prompt_that_can_never_run_is_refused_with_both_numbers(self, make_engine: MakeEngine) -> None:
        engine = make_engine(num_kv_blocks=4)
        with pytest.raises(PromptTooLong) as caught:
            engine.submit([5] * 64)
        assert "64" in str(caught.value)
        assert "63" in str(caught.value)
        assert engine.submit([5] * 63, GREEDY).result(60).finish_reason == "length"

    def test_every_length_around_the_boundaries_runs(self, make_engine: MakeEngine) -> None:
        engine = make_engine(num_kv_blocks=8, max_num_batched_tokens=32)
        for length in (1, 15, 16, 17, 31, 32, 33, 64, 126, 127):
            output = engine.submit([7] * length, SamplingParams(max_tokens=2, ignore_eos=True)).result(60)
            assert output.finish_reason == "length"
            assert len(output.token_ids) == min(2, 128 - length)


class TestStreaming:
    def test_events_add_up_to_the_output(self, make_engine: MakeEngine) -> None:
        handle = make_engine().submit("Hello", GREEDY)
        events = list(handle)
        output = handle.result()
        assert "".join(event.text for event in events) == output.text
        assert [token for event in events for token in event.token_ids] == output.token_ids
        assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + [
            output.finish_reason
        ]

    async def test_events_can_be_awaited(self, make_engine: MakeEngine) -> None:
        handle = make_engine().submit("Hello", GREEDY)
        text = "".join([event.text async for event in handle])
        assert text == handle.result().text

    def test_metrics_tell_what_it_cost(self, make_engine: MakeEngine) -> None:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        metrics = make_engine().submit([9] * 30, params).result(60).metrics
        assert (metrics.prompt_tokens, metrics.cached_tokens, metrics.completion_tokens) == (30, 0, 8)
        assert metrics.ttft_s is not None
        assert 0 <= metrics.queue_s <= metrics.ttft_s
        assert metrics.decode_tok_s is not None
        assert metrics.decode_tok_s > 0

    def test_the_time_to_the_first_token_includes_encoding(
        self, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = make_engine()
        encode = engine.tokenizer.encode
        monkeypatch.setattr(engine.tokenizer, "encode", lambda text: (time.sleep(0.1), encode(text))[1])
        metrics = engine.submit("Hello", GREEDY).result(60).metrics
        assert metrics.ttft_s is not None
        assert metrics.ttft_s >= metrics.queue_s >= 0.1

    def test_logprobs_of_the_chosen_and_the_likeliest(self, make_engine: MakeEngine) -> None:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=3)
        output = make_engine().submit([9] * 5, params).result(60)
        assert output.logprobs is not None
        assert [entry.token_id for entry in output.logprobs] == output.token_ids
        for entry in output.logprobs:
            assert len(entry.top) == 3
            assert entry.top[0] == (entry.token_id, entry.logprob)


class TestStopping:
    def test_a_stop_text_ends_the_answer_and_is_not_in_it(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        whole = engine.submit("abc", params).result(60).text
        stop = whole[5:8]
        handle = engine.submit(
            "abc", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=(stop,))
        )
        assert "".join(event.text for event in handle) == whole[: whole.index(stop)]
        assert handle.result().finish_reason == "stop"

    def test_an_eos_token_ends_the_answer(self, make_engine: MakeEngine, tiny_llama: Path) -> None:
        engine = make_engine()
        free = engine.submit([40], SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)).result(60)
        eos = free.token_ids[3]
        object.__setattr__(engine._model, "eos_token_ids", frozenset({eos, 1}))
        handle = engine.submit([40], SamplingParams(temperature=0, max_tokens=10))
        text = "".join(event.text for event in handle)
        output = handle.result(60)
        assert output.finish_reason == "stop"
        length = free.token_ids.index(eos)
        assert output.token_ids == free.token_ids[: length + 1]
        # This token isn't special, so the tokenizer would spell it; it is no part of the answer all the same.
        assert text == output.text == engine.tokenizer.decode(free.token_ids[:length])

    def test_one_token_is_one_token(self, make_engine: MakeEngine) -> None:
        output = make_engine().submit([40], SamplingParams(max_tokens=1, ignore_eos=True)).result(60)
        assert (len(output.token_ids), output.finish_reason) == (1, "length")


class TestCancelling:
    LONG = SamplingParams(temperature=0, max_tokens=100_000, ignore_eos=True)

    def test_keeps_the_text_so_far_and_frees_the_blocks(self, make_engine: MakeEngine) -> None:
        engine = make_engine(num_kv_blocks=120)
        handle = engine.submit([40], self.LONG)
        wait_until(lambda: engine.stats().generation_tokens > 5)
        handle.cancel()
        handle.cancel()
        output = handle.result(60)
        assert output.finish_reason == "cancelled"
        assert len(output.token_ids) >= 5
        assert "".join(event.text for event in handle.poll()) == output.text
        assert engine.stats().blocks_used == 0
        handle.cancel()

    def test_a_queued_and_a_prefilling_request(self, make_engine: MakeEngine) -> None:
        engine = make_engine(max_num_seqs=1, max_num_batched_tokens=4, num_kv_blocks=120)
        prefilling = engine.submit([40] * 1500, self.LONG)
        queued = engine.submit([41], self.LONG)
        queued.cancel()
        prefilling.cancel()
        assert queued.result(60).finish_reason == prefilling.result(60).finish_reason == "cancelled"

    def test_others_go_on(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        alone = engine.submit([50, 51], GREEDY).result(60).token_ids
        other = engine.submit([40], self.LONG)
        handle = engine.submit([50, 51], GREEDY)
        other.cancel()
        assert handle.result(60).token_ids == alone

    def test_a_storm_of_cancels_from_many_threads(self, make_engine: MakeEngine) -> None:
        engine = make_engine(num_kv_blocks=24, block_size=8, max_num_batched_tokens=16)
        errors: list[BaseException] = []

        def worker(seed: int) -> None:
            try:
                for turn in range(12):
                    handle = engine.submit(
                        [3 + seed] * (1 + (seed * 7 + turn) % 40),
                        SamplingParams(max_tokens=1 + turn * 3, ignore_eos=True, seed=seed),
                    )
                    if turn % 3 == 0:
                        handle.cancel()
                    assert handle.result(60).finish_reason in ("length", "cancelled")
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=worker, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert errors == []


class TestFailing:
    def test_a_step_that_fails_ends_its_requests_and_nothing_else(
        self, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = make_engine()
        runner = type(engine._model.runner)
        run = runner.run

        def fail(self: Any, plan: Any) -> Any:
            raise RuntimeError("the lights went out")

        monkeypatch.setattr(runner, "run", fail)
        output = engine.submit("Hello", GREEDY).result(60)
        assert output.finish_reason == "error"
        assert output.error is not None
        assert "the lights went out" in output.error
        monkeypatch.setattr(runner, "run", run)
        assert engine.submit("Hello", GREEDY).result(60).finish_reason in ("length", "stop")

    def test_text_that_cannot_be_made_fails_that_request_only(
        self, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        accept = LiveRequest.accept

        def fail_for_one_prompt(live: LiveRequest, *args: Any) -> bool:
            if live.request.token_ids[0] == 40:
                raise ValueError("no such token")
            return accept(live, *args)

        monkeypatch.setattr(LiveRequest, "accept", fail_for_one_prompt)
        engine = make_engine()
        healthy, broken = engine.submit([50, 51], GREEDY), engine.submit([40], GREEDY)
        assert healthy.result(60).error is None
        assert broken.result(60).finish_reason == "error"
        assert "no such token" in str(broken.result().error)

    def test_text_that_cannot_even_be_flushed_leaves_no_handle_waiting(
        self, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(detokenizer: Detokenizer, token_ids: Any = ()) -> str:
            raise ValueError("no such token")

        engine = make_engine()
        with monkeypatch.context() as patches:
            patches.setattr(Detokenizer, "push", fail)
            patches.setattr(Detokenizer, "flush", fail)
            output = engine.submit([40], GREEDY).result(60)
        assert output.finish_reason == "error"
        assert len(output.token_ids) == 1
        assert engine.submit([40], GREEDY).result(60).error is None

    def test_a_panic_in_native_code_ends_every_handle(
        self, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Rust's panics reach Python as exceptions that aren't ``Exception``."""

        class PanicException(BaseException):
            pass

        def panic(*_: Any) -> Any:
            raise PanicException("index out of bounds")

        engine = Engine(EngineConfig(model=str(tiny_llama), device="cpu", dtype="float32", num_kv_blocks=16))
        monkeypatch.setattr(engine._model.runner, "run", panic, raising=True)
        output = engine.submit([40], GREEDY).result(60)
        assert output.finish_reason == "error"
        assert "index out of bounds" in str(output.error)
        with pytest.raises(EngineClosed, match="index out of bounds"):
            engine.submit([40])
        engine.close()

    def test_a_request_that_cannot_be_queued_leaves_no_handle_waiting(
        self, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whatever came in the same moment must not be lost on the way from the inbox to the scheduler."""

        def fail(request: Any) -> None:
            raise RuntimeError("lost count")

        engine = Engine(EngineConfig(model=str(tiny_llama), device="cpu", dtype="float32", num_kv_blocks=16))
        monkeypatch.setattr(engine._scheduler, "add", fail)
        with engine._inbox_condition:  # keeps the step thread waiting until all are there
            handles = [engine.submit([40 + number], GREEDY) for number in range(3)]
        assert [handle.result(60).finish_reason for handle in handles] == ["error"] * 3
        engine.close()

    @pytest.mark.parametrize(
        "error",
        [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nSee docs"), MemoryError()],
    )
    def test_a_step_without_memory_says_so_in_one_line_and_logs_no_traceback(
        self,
        make_engine: MakeEngine,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        error: Exception,
    ) -> None:
        def fail(*_: Any) -> Any:
            raise error

        engine = make_engine()
        with monkeypatch.context() as patches:
            patches.setattr(type(engine._model.runner), "run", fail)
            output = engine.submit("Hello", GREEDY).result(60)
        assert output.finish_reason == "error"
        assert "memory" in str(output.error)
        assert "--max-batched-tokens" in str(output.error)
        assert "\n" not in str(output.error)
        assert not [record for record in caplog.records if record.exc_info]
        assert engine.submit("Hello", GREEDY).result(60).error is None

    def test_a_scheduler_that_breaks_ends_every_handle(
        self, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = Engine(EngineConfig(model=str(tiny_llama), device="cpu", dtype="float32", num_kv_blocks=16))

        def fail(now: float) -> Any:
            raise RuntimeError("lost count")

        monkeypatch.setattr(engine._scheduler, "plan", fail)
        output = engine.submit("Hello", GREEDY).result(60)
        assert output.finish_reason == "error"
        wait_until(lambda: not engine._thread.is_alive())
        with pytest.raises(EngineClosed, match="lost count"):
            engine.submit("Hello")
        engine.close()


class TestClosing:
    def test_ends_what_runs_and_refuses_what_comes(self, make_engine: MakeEngine) -> None:
        engine = make_engine(num_kv_blocks=120)
        handles = [engine.submit([40], TestCancelling.LONG) for _ in range(3)]
        engine.close()
        engine.close()
        assert {handle.result(5).finish_reason for handle in handles} == {"cancelled"}
        with pytest.raises(EngineClosed):
            engine.submit([40])

    def test_a_process_that_forgets_it_ends_well(self, tiny_llama: Path) -> None:
        code = f"""
from nanochat import Engine, EngineConfig, SamplingParams
engine = Engine(EngineConfig(model={str(tiny_llama)!r}, device="cpu", num_kv_blocks=120))
handle = engine.submit([40], SamplingParams(max_tokens=1900, ignore_eos=True))
next(iter(handle))
"""
        command = [sys.executable, "-c", code]
        finished = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert (finished.returncode, finished.stderr) == (0, "")

    def test_as_a_context_manager(self, tiny_llama: Path) -> None:
        with Engine(EngineConfig(model=str(tiny_llama), device="cpu", num_kv_blocks=16)) as engine:
            engine.submit([40], GREEDY).result(60)
        assert not engine._thread.is_alive()
        assert_idle_and_consistent(engine)


class TestStats:
    def test_count_tokens_hits_and_blocks(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        engine.submit([9] * 40, params).result(60)
        engine.submit([9] * 40, params).result(60)
        stats = engine.stats()
        assert stats.blocks_total == 64
        assert stats.blocks_cached == 2
        assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (80, 32)
        assert (stats.prompt_tokens, stats.generation_tokens) == (40 + 8, 8)
        assert len(stats.ttft_s) == 2
        assert len(stats.itl_s) == 6

    def test_rows_and_map_show_a_live_request(self, make_engine: MakeEngine) -> None:
        engine = make_engine(num_kv_blocks=120)
        handle = engine.submit([40] * 40, TestCancelling.LONG)
        wait_until(lambda: engine.stats().generation_tokens > 3)
        row = engine.stats().requests[0]
        assert (row.request_id, row.state, row.prompt_tokens) == (handle.request_id, "decode", 40)
        owners = engine.block_map().owner
        assert len(owners) == 120
        assert owners.count(handle.request_id) >= row.blocks
        handle.cancel()
        handle.result(60)


class TestSizing:
    def test_a_length_over_the_cache_is_refused_with_what_fits(self, make_engine: MakeEngine) -> None:
        with pytest.raises(NotEnoughMemory, match="1,024 tokens would"):
            make_engine(max_model_len=1025)

    def test_a_length_over_the_model_is_refused_with_its_limit(self, make_engine: MakeEngine) -> None:
        with pytest.raises(InvalidOption, match="2,048"):
            make_engine(max_model_len=4096, num_kv_blocks=1000)

    def test_a_cache_beyond_memory_is_refused(self, make_engine: MakeEngine) -> None:
        with pytest.raises(NotEnoughMemory, match=r"free: [\d,]+ blocks would fit\. Ask for fewer"):
            make_engine(num_kv_blocks=2**31 - 1)

    def test_memory_that_runs_out_while_loading_is_a_sentence(
        self, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(runner: Runner) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory.")

        monkeypatch.setattr(Runner, "warm_up", fail)
        with pytest.raises(NotEnoughMemory, match="choose a smaller model"):
            make_engine()

    def test_left_alone_it_fits_the_model(self, make_engine: MakeEngine) -> None:
        assert make_engine(num_kv_blocks=None).max_model_len == 2048


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="nowhere"):
        Engine(EngineConfig(model=str(tmp_path / "nowhere")))
