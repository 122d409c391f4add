"""Pages of vLLM and SGLang as they are documented, read and drawn; rates from one page to the next.

``pages/vllm.txt``: two engines behind one address, in the format of https://docs.vllm.ai/en/latest/design/metrics/
and of vLLM's ``vllm/v1/metrics/loggers.py``. ``pages/vllm_0.6.txt``: the names of
https://docs.vllm.ai/en/v0.6.6/serving/metrics.html. ``pages/sglang.txt``: the example of
https://docs.sglang.io/references/production_metrics.html, shortened. ``pages/sglang_ranks.txt``: later names of
SGLang, from two data-parallel groups, one of them of two ranks, with priorities.
"""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanochat.backend.remote.backend import completed
from nanochat.backend.remote.metrics import MAX_LINES, MEANS, SUMS, Histogram, Page, read_page
from nanochat.backend.remote.monitor import STALE_S, TTFT_WINDOW_S, Monitor, OwnFigures
from nanochat.backend.stats import BackendStats
from nanochat.ui.stats_panel import History, Snapshot, TabRow, one_line, panel

PAGES = Path(__file__).parent / "pages"
MODEL = "meta-llama/Llama-3.1-8B-Instruct"


def recorded(name: str) -> str:
    return (PAGES / f"{name}.txt").read_text(encoding="utf-8")


def page_of(name: str, model: str = MODEL) -> Page:
    page = read_page(recorded(name), model)
    assert page is not None
    return page


def figures(*pages: Page, step_s: float = 1.0) -> BackendStats:
    """After these pages, one after another."""
    monitor = Monitor()
    for number, page in enumerate(pages):
        monitor.feed(page, 100 + number * step_s)
    told = monitor.figures(100 + (len(pages) - 1) * step_s)
    assert told is not None
    return told


def drawn(stats: BackendStats, width: int = 36) -> str:
    tabs = (TabRow(1, 0, "decode", 1183, 0.041, 118.0, True),)
    snapshot = Snapshot(stats, None, {}, tabs, 1183, None)
    lines = panel(snapshot, History(), width, 31)
    return "\n".join([*(line.plain for line in lines), one_line(snapshot, History(), 100).plain])


class TestPages:
    def test_vllm(self) -> None:
        told = figures(page_of("vllm"))
        assert (told.running, told.waiting, told.preemptions) == (41, 3, 7)
        assert told.kv_share == pytest.approx(0.525)
        assert (told.kv_used, told.kv_total, told.kv_unit) == (28_350, 54_000, "blocks")
        assert told.hit_share == pytest.approx(730_000 / 1_000_000)
        assert told.ttft_p50_s is not None
        assert 0.06 < told.ttft_p50_s < 0.1
        assert told.ttft_p95_s is not None
        assert 0.25 < told.ttft_p95_s < 0.5
        assert told.decode_tok_s is None  # one page tells no rate

    def test_an_older_vllm(self) -> None:
        told = figures(page_of("vllm_0.6"))
        assert (told.running, told.waiting, told.preemptions) == (2, 1, 1)
        assert (told.kv_share, told.hit_share) == (0.25, 0.5)
        assert (told.kv_used, told.kv_total) == (None, None)  # its page says None too
        assert (told.decode_tok_s, told.prefill_tok_s) == (80.5, 120.0)

    def test_sglang(self) -> None:
        told = figures(page_of("sglang"))
        assert (told.running, told.waiting) == (162, 2826)
        assert (told.kv_share, told.hit_share) == (0.28, pytest.approx(0.0075, abs=1e-4))
        assert told.decode_tok_s == pytest.approx(86.5, abs=0.1)
        assert told.preemptions is None
        assert told.ttft_p95_s == 30.0  # beyond the last bound, nothing is known

    def test_sglangs_ranks_count_once_and_its_groups_together(self) -> None:
        told = figures(page_of("sglang_ranks"))
        assert (told.running, told.waiting, told.preemptions) == (10, 2, 48)
        assert told.kv_share == pytest.approx(0.5)
        assert (told.kv_used, told.kv_total, told.kv_unit) == (10_000, 20_000, "tokens")
        assert told.hit_share == pytest.approx(0.5)

    def test_of_several_models_ours_counts_and_an_unknown_name_means_all(self) -> None:
        both = recorded("vllm_0.6") + recorded("vllm_0.6").replace(MODEL, "other/model")
        for model, running in ((MODEL, 2), ("other/model", 2), ("called-otherwise", 4)):
            page = read_page(both, model)
            assert page is not None
            assert page.figures["running"] == running

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "<html>no such page</html>",
            "up 1\n",
            "vllm:num_requests_running{model_name=",
            "vllm:x{a=} 1",
            "vllm:",
        ],
    )
    def test_another_page_is_none(self, text: str) -> None:
        assert read_page(text) is None

    def test_what_no_figure_can_be_is_left_out(self) -> None:
        page = read_page(
            "vllm:num_requests_running NaN\nvllm:num_requests_waiting -3\nvllm:kv_cache_usage_perc 7\n"
        )
        assert page is not None
        assert dict(page.figures) == {"kv_share": 1.0}

    @given(st.text(alphabet=st.sampled_from('vlm:sg_{}="\\,\n 0123456789.eNa+I\u2028'), max_size=200))
    def test_no_page_breaks_anything(self, text: str) -> None:
        for line in (
            text,
            f"vllm:num_requests_running{text}",
            f'vllm:time_to_first_token_seconds_bucket{{le="{text}"}} 1',
        ):
            page = read_page(line)
            if page is not None:
                figures(page)


class TestPanel:
    def test_vllms_page_in_the_panel(self) -> None:
        before = page_of("vllm")
        grown = recorded("vllm").replace(" 402113.0", " 402513.0").replace(" 812345.0", " 813345.0")
        after = read_page(grown, MODEL)
        assert after is not None
        text = drawn(figures(before, after, step_s=2.0))
        for figure in (
            "28,350 / 54,000",
            "52 %",
            "Prefix hits  73 %",
            "Preempted  7",
            "200 tok/s",
            "500 tok/s",
        ):
            assert figure in text

    def test_sglangs_page_in_the_panel(self) -> None:
        text = drawn(figures(page_of("sglang")))
        for figure in ("KV cache", "28 %", "Preempted  —", "87 tok/s", "30.0 s"):
            assert figure in text
        assert "10,000 / 20,000" in drawn(figures(page_of("sglang_ranks")))

    @pytest.mark.parametrize("width", [24, 36, 56])
    def test_what_nobody_tells_is_a_dash(self, width: int) -> None:
        text = drawn(BackendStats(), width)
        assert "KV" in text
        assert text.count("—") >= 8
        assert "0 %" not in text


class TestHostilePages:
    """Whatever a page says, there are figures that can be drawn."""

    @pytest.mark.parametrize("number", ["1e308", "1e300", "1e400", "nan", "-1", "+Inf", "9007199254740993"])
    @pytest.mark.parametrize("bound", ["nan", "-1", "1e308", "1e-320", "-Inf", "x"])
    def test_numbers_that_are_none(self, number: str, bound: str) -> None:
        lines = [
            f'{name}{{engine="{engine}"}} VALUE'
            for names in (*SUMS.values(), *MEANS.values(), ("vllm:time_to_first_token_seconds_sum",))
            for name in names
            for engine in range(2)
        ]
        lines += [
            f'vllm:time_to_first_token_seconds_bucket{{le="{le}"}} VALUE' for le in (bound, "0.5", "+Inf")
        ]
        pages = [read_page("\n".join(lines).replace("VALUE", value) + "\n", MODEL) for value in ("0", number)]
        told = figures(*[page for page in pages if page is not None])
        assert "nan" not in drawn(told)
        assert "inf" not in drawn(told)
        assert len(drawn(told)) < 4_000

    def test_of_a_very_long_page_only_the_beginning_is_read(self) -> None:
        lines = (f'vllm:num_requests_running{{engine="{engine}"}} 1\n' for engine in range(2 * MAX_LINES))
        page = read_page("".join(lines), MODEL)
        assert page is not None
        assert page.figures["running"] == MAX_LINES


class TestRates:
    def test_rates_are_the_counters_growth_over_some_seconds(self) -> None:
        pages = [Page({"generation_tokens": 100.0 * number, "prompt_tokens": 10.0}) for number in range(10)]
        told = figures(*pages)
        assert told.decode_tok_s == pytest.approx(100.0)
        assert told.prefill_tok_s == 0.0

    def test_a_server_that_starts_anew_has_no_negative_rate(self) -> None:
        told = figures(Page({"generation_tokens": 1e6}), Page({"generation_tokens": 5.0}))
        assert told.decode_tok_s is None
        assert figures(
            Page({"generation_tokens": 1e6}),
            Page({"generation_tokens": 5.0}),
            Page({"generation_tokens": 25.0}),
        ).decode_tok_s == pytest.approx(20.0)

    def test_old_pages_are_not_shown(self) -> None:
        monitor = Monitor()
        assert monitor.figures(0.0) is None
        monitor.feed(page_of("vllm"), 100.0)
        assert monitor.figures(100.0 + STALE_S) is not None
        assert monitor.figures(100.1 + STALE_S) is None

    def test_times_to_first_token_are_of_the_last_minute(self) -> None:
        def page(fast: int, slow: int) -> Page:
            buckets = ((0.1, float(fast)), (10.0, float(fast + slow)), (math.inf, float(fast + slow)))
            return Page({}, ttft=Histogram(buckets, 0.05 * fast + 5.0 * slow))

        monitor = Monitor()
        monitor.feed(page(0, 1000), 0.0)
        monitor.feed(page(100, 1000), 1.0)
        told = monitor.figures(1.0)
        assert told is not None
        assert told.ttft_p95_s is not None
        assert told.ttft_p95_s <= 0.1
        assert told.ttft_s == (pytest.approx(0.05),)
        monitor.feed(page(100, 1000), 1.0 + 2 * TTFT_WINDOW_S)  # nothing since: the last ones are still told
        told = monitor.figures(1.0 + 2 * TTFT_WINDOW_S)
        assert told is not None
        assert told.ttft_p95_s is not None
        assert told.ttft_p95_s <= 0.1

    @given(st.integers(0, 2**32), st.sampled_from([0.5, 0.9, 0.95]))
    def test_a_quantile_lies_in_the_bucket_of_the_exact_one(self, seed: int, fraction: float) -> None:
        chance = random.Random(seed)
        values = sorted(chance.uniform(0, 30) for _ in range(chance.randint(1, 200)))
        bounds = [0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, math.inf]
        buckets = tuple((bound, float(sum(value <= bound for value in values))) for bound in bounds)
        estimate = Histogram(buckets, sum(values)).quantile(fraction)
        exact = values[max(0, math.ceil(fraction * len(values)) - 1)]
        upper = next(bound for bound in bounds if exact <= bound)
        lower = max([0.0, *(bound for bound in bounds if bound < upper)])
        assert estimate is not None
        assert lower <= estimate <= upper

    def test_our_own_rate_is_of_the_last_seconds(self) -> None:
        own = OwnFigures()
        for tick in range(31):
            own.tokens(1, 10 + tick / 10)
        own.first_token(0.25)
        told = own.figures(13.0)
        assert told.decode_tok_s == pytest.approx(10, rel=0.1)
        assert told.ttft_p50_s == 0.25
        assert own.figures(30.0).decode_tok_s == 0

    def test_what_the_server_tells_goes_before_what_is_measured_here(self) -> None:
        own = BackendStats(running=1, waiting=0, ttft_p50_s=0.2, decode_tok_s=9.0)
        told = completed(BackendStats(running=40, decode_tok_s=0.0), own)
        assert (told.running, told.waiting, told.decode_tok_s, told.ttft_p50_s) == (40, 0, 0.0, 0.2)
