"""The estimator of tokens a second against loads whose rate is known, and the outlook's arithmetic."""

import heapq
import math
import random
import statistics
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill.engines.throughput import Interval, Measured, Row, best, bootstrap, judge, produced, window
from draftmill.errors import UserError
from draftmill.stages.bench_generate import loads_of, outlook
from tests.tiny import config_values


def simulated(count: int, in_flight: int, tokens: Sequence[int], speed: float = 50.0) -> list[Row]:
    """Rows on a server that gives each row in flight `speed` tokens a second."""
    free, rows = [0.0] * in_flight, list[Row]()
    for number in range(count):
        sent = heapq.heappop(free)
        size = tokens[number % len(tokens)]
        rows.append(Row(sent, sent + size / speed, size))
        heapq.heappush(free, rows[-1].done)
    return rows


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 400), min_size=3, max_size=40), st.integers(2, 32), st.integers(4, 12))
def test_the_rate_while_full_is_found_whatever_the_lengths(tokens: list[int], load: int, times: int) -> None:
    rows = simulated(load * times, load, tokens)
    begin, end = window(rows, load)
    if end <= begin:
        return
    found = judge(rows, load)
    assert found.rate.value == pytest.approx(load * 50.0, rel=1e-6)
    assert found.rate.low <= found.rate.value <= found.rate.high * (1 + 1e-9)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=20), st.integers(1, 8))
def test_every_token_falls_into_some_span(tokens: list[int], load: int) -> None:
    rows = simulated(len(tokens), load, tokens)
    last = max(row.done for row in rows)
    parts = [produced(rows, last * k / 7, last * (k + 1) / 7) for k in range(7)]
    assert sum(parts) == pytest.approx(sum(tokens))


def test_failures_are_counted_and_give_no_tokens() -> None:
    rows = simulated(64, 4, [100])
    rows += [Row(row.sent, row.done, 0, "timeout") for row in rows[:16]]
    found = judge(rows, 4)
    assert (found.rows, found.failures) == (80, 16)
    assert found.tokens_a_row.value == 100


def test_too_few_prompts_are_refused() -> None:
    with pytest.raises(UserError, match="4 prompts are too few to measure 8 in flight"):
        judge(simulated(4, 4, [10]), 8)


def test_the_interval_covers_the_mean_as_often_as_it_says() -> None:
    rng, hits = random.Random(1), 0
    for _ in range(60):
        values = [rng.gauss(10, 3) for _ in range(60)]
        found = bootstrap(values, rng)
        hits += found.low <= 10 <= found.high
    assert 52 <= hits <= 60, "95 % nominal"


def test_the_interval_is_as_wide_as_the_normal_law_has_it() -> None:
    """95 % of a normal law lie within 1.96 standard errors; 90 % were within 1.64."""
    rng = random.Random(2)
    values = [rng.gauss(10, 3) for _ in range(2000)]
    error = statistics.pstdev(values) / math.sqrt(len(values))
    found = bootstrap(values, rng)
    assert (found.high - found.low) / error == pytest.approx(2 * 1.96, rel=0.07)


def measured(load: int, rate: float) -> Measured:
    one = Interval(rate, rate * 0.9, rate * 1.1)
    return Measured(load, 100, 0, one, Interval(500, 450, 550), 1.0)


def test_the_smallest_load_near_the_best_is_recommended() -> None:
    found = [measured(64, 900), measured(128, 985), measured(256, 1000)]
    assert best(found).in_flight == 128


def test_hours_and_days_of_the_whole_set() -> None:
    from draftmill.config import parse

    sglang = {"server": {"gpus": 2}, "in_flight": 512}
    config = parse(config_values(device="cuda", generate={"engine": "sglang", "sglang": sglang}))
    found = outlook(measured(128, 1000), rows=7200, config=config, gpus=4)
    assert found.tokens.value == 7200 * 500
    assert found.gpu_hours.value == pytest.approx(2.0), "3.6 M tokens at 1000 a second on two GPUs"
    assert found.gpu_hours.low == pytest.approx(2.0 * 0.9 / 1.1)
    assert found.days.value == pytest.approx(2.0 / 4 / 24)
    assert loads_of(config) == [128, 256, 512]
