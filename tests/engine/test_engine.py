"""The engine from outside: what any thread may call, and what comes back."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from nanochat.engine.config import EngineConfig, SamplingParams
from nanochat.engine.engine import Engine
from nanochat.engine.runner import Runner
from nanochat.errors import InvalidOption, ModelNotFound, NotEnoughMemory, PromptTooLong
from tests.engine.conftest import MakeEngine, wait_until

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
        with torch.inference_mode():  # whoever reads what hasn't been written shall notice
            for cache in engine._model.runner._caches:
                cache.k.fill_(float("nan"))
                cache.v.fill_(float("nan"))
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


class TestInt8:
    """The same bytes lie in the cache however a prompt came there: in chunks, twice, or from another request."""

    OPTIONS: ClassVar[dict[str, Any]] = {"kv_dtype": "int8", "block_size": 8}

    def test_lengths_just_past_a_block_and_a_full_pool(self, make_engine: MakeEngine) -> None:
        ample = make_engine(**self.OPTIONS, prefix_caching=False)
        tight = make_engine(**self.OPTIONS, num_kv_blocks=12, max_num_batched_tokens=7)
        given = [
            prompt[:length] for prompt, length in zip(prompts(8), (1, 7, 8, 9, 15, 16, 17, 20), strict=True)
        ]
        alone = [ample.submit(prompt, GREEDY).result(60).token_ids for prompt in given]
        handles = [tight.submit(prompt, GREEDY) for prompt in given]
        assert [handle.result(60).token_ids for handle in handles] == alone
        assert tight.stats().preemptions > 0

    def test_every_remainder_of_a_block_and_a_pool_of_which_no_block_is_free(
        self, make_engine: MakeEngine
    ) -> None:
        """Prompts that leave 1 to 8 tokens in a block, in a pool all of whose blocks each request gets, written by the one before it."""
        ample, exact = make_engine(**self.OPTIONS), make_engine(**self.OPTIONS, num_kv_blocks=4)
        for prompt in (prompts(1, length=length)[0] for length in range(9, 17)):
            to_the_end = SamplingParams(temperature=0.0, max_tokens=32 - len(prompt), ignore_eos=True)
            answers = [e.submit(prompt, to_the_end).result(60).token_ids for e in (ample, exact)]
            assert len(answers[0]) == to_the_end.max_tokens
            assert answers[0] == answers[1]

    def test_a_hit_and_a_reused_block(self, make_engine: MakeEngine) -> None:
        engine = make_engine(**self.OPTIONS, num_kv_blocks=9)
        first, other = prompts(2, length=26)
        miss = engine.submit(first, GREEDY).result(60)
        hit = engine.submit(first, GREEDY).result(60)
        assert (miss.metrics.cached_tokens, hit.metrics.cached_tokens) == (0, 24)
        engine.submit(other, SamplingParams(temperature=0, max_tokens=40)).result(60)  # evicts most of it
        again = engine.submit(first, GREEDY).result(60)
        assert again.metrics.cached_tokens < 24
        assert miss.token_ids == hit.token_ids == again.token_ids


class TestSampling:
    def test_a_seed_gives_the_same_tokens_whatever_else_runs(self, make_engine: MakeEngine) -> None:
        engine = make_engine(num_kv_blocks=40, block_size=8, max_num_batched_tokens=16)
        seeded = SamplingParams(temperature=1.5, top_p=0.95, seed=11, max_tokens=24, ignore_eos=True)
        alone = engine.submit([50, 51, 52], seeded).result(60).token_ids
        others = [engine.submit(prompt, SamplingParams(max_tokens=40)) for prompt in prompts(6)]
        handles = [engine.submit([50, 51, 52], seeded) for _ in range(2)]
        assert [handle.result(60).token_ids for handle in handles] == [alone] * 2
        assert {other.result(60).error for other in others} == {None}

    def test_without_a_seed_they_differ(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        params = SamplingParams(temperature=1.5, max_tokens=24, ignore_eos=True)
        assert len({tuple(engine.submit([50], params).result(60).token_ids) for _ in range(3)}) == 3

    @pytest.mark.parametrize(
        "options", [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}, {"temperature": 1e-300}]
    )
    def test_what_leaves_one_token_is_greedy(self, make_engine: MakeEngine, options: dict[str, Any]) -> None:
        engine = make_engine()
        params = SamplingParams(**({"temperature": 2.0, "max_tokens": 24, "seed": 1} | options))
        assert (
            engine.submit([50, 51], params).result(60).token_ids
            == engine.submit([50, 51], GREEDY).result(60).token_ids
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

    def test_events_carry_the_logprobs_and_times_of_their_tokens(self, make_engine: MakeEngine) -> None:
        handle = make_engine().submit(
            "Hi", SamplingParams(seed=1, max_tokens=12, ignore_eos=True, logprobs=1)
        )
        events = list(handle)
        assert all(len(event.logprobs) == len(event.token_ids) for event in events)
        assert [entry for event in events for entry in event.logprobs] == handle.result().logprobs
        times = [event.time_s for event in events if event.time_s is not None]
        assert len(times) == len(events)
        assert times == sorted(times)

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

    @pytest.mark.parametrize("length", [1, 3, 8])
    def test_a_stop_text_that_the_last_token_allowed_completes(
        self, make_engine: MakeEngine, length: int
    ) -> None:
        engine = make_engine()
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        whole = engine.submit("abc", params).result(60).text
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, stop=(whole[-1],))
        handle = engine.submit("abc", params)
        events = list(handle)
        assert "".join(event.text for event in events) == whole[: whole.index(whole[-1])]
        assert (events[-1].finish_reason, handle.result().finish_reason) == ("stop", "stop")

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
