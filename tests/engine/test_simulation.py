"""The fixed cases and the replay of a trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanochat.engine.config import EngineConfig
from nanochat.engine.simulation import (
    TABLE,
    Arrival,
    Case,
    CostModel,
    Percentiles,
    Replay,
    ReplayResult,
    read_trace,
    run_case,
)
from nanochat.errors import InvalidOption

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
def test_no_case_is_worse_than_its_baseline(case: Case) -> None:
    result = run_case(case)
    assert result.rounds <= case.baseline_rounds
    assert result.preemptions <= case.baseline_preemptions
    assert result.leaked_blocks == 0


def test_blocks_are_taken_as_tokens_need_them() -> None:
    result = run_case(TABLE[0])
    assert result.upfront_blocks == 16
    assert result.peak_blocks <= 9


def replay(arrivals: list[Arrival], **options: int) -> ReplayResult:
    config = {"num_kv_blocks": 64, "block_size": 16, "max_num_batched_tokens": 64, **options}
    shared = config.pop("shared_prefix_tokens", 0)
    return Replay(arrivals, EngineConfig(**config), shared_prefix_tokens=shared).run()  # type: ignore[arg-type]


class TestReplay:
    def test_counts_steps_from_arrival_to_first_token(self) -> None:
        result = replay([Arrival(0.0, 130, 3)])
        assert result.ttft_steps == Percentiles(3, 3, 3, 3)  # chunks of 64, 64 and 2
        assert (result.steps, result.requests, result.answer_tokens) == (5, 1, 3)
        assert result.computed_tokens == 132

    def test_the_clock_follows_the_cost_model_and_skips_idle_time(self) -> None:
        config = EngineConfig(num_kv_blocks=64, max_num_batched_tokens=64)
        arrivals = [Arrival(0.0, 10, 1), Arrival(100.0, 30, 1)]
        result = Replay(arrivals, config, cost=CostModel(step_s=1.0, token_s=0.1)).run()
        assert result.simulated_s == 104.0
        assert result.ttft_s == Percentiles(2.0, 4.0, 4.0, 4.0)

    def test_answers_are_as_long_as_the_trace_says(self) -> None:
        result = replay([Arrival(0.1 * number, 5 + number, 1 + number % 7) for number in range(40)])
        assert result.answer_tokens == sum(1 + number % 7 for number in range(40))
        assert result.prompt_tokens == sum(5 + number for number in range(40))

    def test_a_prompt_longer_than_the_cache_is_refused(self) -> None:
        result = replay([Arrival(0.0, 1_024, 1), Arrival(0.0, 1_025, 1)])
        assert (result.requests, result.refused) == (1, 1)

    def test_refusing_all_ends(self) -> None:
        result = replay([Arrival(5.0, 5_000, 1)])
        assert (result.requests, result.refused, result.steps) == (0, 1, 0)
        assert result.ttft_steps == Percentiles(0, 0, 0, 0)

    def test_a_shared_prefix_is_computed_once(self) -> None:
        arrivals = [Arrival(float(number), 100, 2) for number in range(10)]
        assert replay(arrivals).prefix_hit_rate == 0
        assert replay(arrivals, shared_prefix_tokens=80).prefix_hit_rate == pytest.approx(0.72)

    def test_memory_pressure_is_counted(self) -> None:
        arrivals = [Arrival(0.0, 100, 200) for _ in range(12)]
        result = replay(arrivals, num_kv_blocks=40)
        assert result.preemptions > 0
        assert result.peak_blocks == 40
        assert result.computed_tokens > 12 * 299

    def test_needs_a_cache(self) -> None:
        with pytest.raises(InvalidOption, match="number of KV blocks"):
            Replay([], EngineConfig())


class TestReadTrace:
    def write(self, tmp_path: Path, text: str) -> Path:
        path = tmp_path / "trace.csv"
        path.write_text(text, encoding="utf-8")
        return path

    def test_times_count_from_the_first_and_lines_are_sorted(self, tmp_path: Path) -> None:
        text = HEADER + "2023-11-16 18:15:50.9951690,396,109\n2023-11-16 18:15:46.6805900,374,44\n"
        assert read_trace(self.write(tmp_path, text)) == [
            Arrival(0.0, 374, 44),
            Arrival(pytest.approx(4.314579), 396, 109),  # type: ignore[arg-type]
        ]

    @pytest.mark.parametrize(
        ("text", "sentence"),
        [
            ("", "holds no requests"),
            (HEADER, "holds no requests"),
            ("a,b\n1,2\n", "Line 2 .* needs TIMESTAMP"),
            (HEADER + "2023-11-16 18:15:46,1,2\nyesterday,1,2\n", "Line 3 .* needs TIMESTAMP"),
            (HEADER + "2023-11-16 18:15:46,many,2\n", "Line 2 .* two whole numbers"),
            (HEADER + "2023-11-16 18:15:46,1\n", "Line 2 .* two whole numbers"),
            (HEADER + "2023-11-16 18:15:46,0,2\n", "Line 2 .* length below 1"),
        ],
    )
    def test_says_what_is_wrong(self, tmp_path: Path, text: str, sentence: str) -> None:
        with pytest.raises(InvalidOption, match=sentence):
            read_trace(self.write(tmp_path, text))

    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(
            InvalidOption, match=r"none\.csv can't be read: No such file or directory; check the path\.$"
        ):
            read_trace(tmp_path / "none.csv")

    def test_a_file_that_is_no_text(self, tmp_path: Path) -> None:
        path = tmp_path / "trace.csv"
        path.write_bytes(b"\xff\xfe\x00")
        with pytest.raises(InvalidOption, match="isn't text in UTF-8; name a CSV file"):
            read_trace(path)
