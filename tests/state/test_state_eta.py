"""The ETA: an interval that holds the truth, scales with what is left and with lanes, and an honest unknown."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill.state.cost import cost_of
from draftmill.state.documents import Beat, Server
from draftmill.state.eta import LEAST_JOBS, NOT_BEGUN, RECENT_JOBS, own_pace, recent_work, stage_eta, whole_eta
from draftmill.state.jobs import JobView, after_waits
from draftmill.state.plan import JobName
from draftmill.state.rates import Work, busy_seconds, last_hour, overall, rate_of
from draftmill.state.state import _own_rows, _own_tokens, read_state
from draftmill.state.types import Eta, JobState
from tests.core.builds import configuration
from tests.state.made_store import MadeStore
from tests.state.memory import Memory

NOW = 1_000_000.0


def view(
    state: JobState = "done",
    *,
    rows: int = 100,
    done: int | None = None,
    seconds: float = 100.0,
    ago: float = 0.0,
    resumed: int = 0,
    tokens: int = 0,
    number: int = 0,
    tokens_1m: float | None = None,
    stage: str = "generate",
) -> JobView:
    ended = NOW - ago
    begun = None if state == "waiting" else ended - seconds
    beat = (
        None if state == "waiting" else Beat(total=rows, done=rows, resumed=resumed, tokens=tokens, tokens_1m=tokens_1m)
    )
    done = {"done": rows, "waiting": 0}.get(state, rows // 2) if done is None else done
    return JobView(
        JobName(stage, f"{number}", f"{number}"),
        state,
        rows,
        done,
        None,
        None,
        tokens,
        0,
        begun,
        None if begun is None else ended,
        None if begun is None else ended,
        beat,
    )


def eta_of(views: list[JobView]) -> Eta:
    return stage_eta("generate", views, NOW)[0]


paces = st.floats(0.01, 50)


@given(st.lists(paces, min_size=LEAST_JOBS, max_size=60), st.integers(1, 300), st.integers(1, 8))
@settings(max_examples=100, deadline=None)
def test_the_interval_lies_within_what_the_slowest_and_the_fastest_job_would_give(
    sample: list[float], waiting: int, lanes: int
) -> None:
    finished = [view(seconds=100 * pace, ago=10.0 * place) for place, pace in enumerate(sample)]
    live = [view("running", done=0) for _ in range(lanes)]
    found = eta_of([*finished, *live, *(view("waiting") for _ in range(waiting))])
    assert found.low is not None
    assert found.middle is not None
    assert found.high is not None
    rows, recent = 100 * (waiting + lanes), sample[:RECENT_JOBS]
    slack = 1 + 1e-9
    assert found.low <= found.middle <= found.high
    assert min(recent) * rows / lanes <= found.low * slack
    # A lane cannot end before its longest job.
    assert found.high <= max(max(recent) * rows / lanes, max(recent) * 100) * slack
    assert found.lanes == lanes


@given(st.lists(paces, min_size=LEAST_JOBS, max_size=40), st.integers(1, 100), st.floats(0.1, 10))
@settings(max_examples=60, deadline=None)
def test_jobs_that_are_so_much_slower_take_so_much_longer(sample: list[float], waiting: int, factor: float) -> None:
    def found(scale: float) -> Eta:
        finished = [view(seconds=100 * pace * scale, ago=place) for place, pace in enumerate(sample)]
        return eta_of([*finished, view("running"), *(view("waiting") for _ in range(waiting))])

    one, other = found(1.0), found(factor)
    assert other.middle == pytest.approx((one.middle or 0) * factor, rel=1e-6)
    assert other.high == pytest.approx((one.high or 0) * factor, rel=1e-6)


def test_the_interval_holds_the_truth_in_nineteen_of_twenty_builds() -> None:
    hits, builds = 0, 300
    for seed in range(builds):
        made = random.Random(seed)
        finished = [view(seconds=made.lognormvariate(5, 0.4), ago=place) for place in range(20)]
        found = eta_of([*finished, view("running", done=0), *(view("waiting") for _ in range(30))])
        truth = sum(made.lognormvariate(5, 0.4) for _ in range(31))
        hits += (found.low or 0) <= truth <= (found.high or 0)
    assert 0.88 <= hits / builds <= 0.99


def test_the_newest_jobs_decide() -> None:
    slow = [view(seconds=1000.0, ago=1000.0 + place) for place in range(200)]
    fast = [view(seconds=10.0, ago=float(place)) for place in range(RECENT_JOBS)]
    assert recent_work([*slow, *fast]) == [(10.0, 100)] * RECENT_JOBS


def test_a_resumed_job_is_timed_by_the_rows_it_did_itself() -> None:
    assert recent_work([view(rows=100, seconds=50.0, resumed=75)]) == [(50.0, 25)]
    assert recent_work([view(rows=100, seconds=50.0, resumed=100)]) == []


def test_a_job_that_was_resumed_for_one_last_row_hardly_counts() -> None:
    short = [view(rows=100, seconds=60.0, resumed=99, ago=float(place)) for place in range(4)]
    finished = [*short, *(view(ago=10.0 + place) for place in range(16))]
    found = eta_of([*finished, view("running", done=0), *(view("waiting") for _ in range(99))])
    assert 100 * 100 <= (found.middle or 0) <= 100 * 100 * (4 * 60 + 16 * 100) / (4 + 16 * 100)


class Running:
    """The generate jobs that a lane leaves which answers one row after another without a break, on one GPU or server.

    A shard's rows take the server `shard_s`; a job goes on for `tail_s` behind its last row, and the next one begins `gap_s`
    later. Meanwhile rows of coming shards are answered.
    """

    def __init__(self, jobs: int, shard_s: float, tail_s: float, gap_s: float, on: dict[str, Any]) -> None:
        self.views, free = list[JobView](), 0.0
        for number in range(jobs):
            begun, full = free, (number + 1) * shard_s
            ended = max(full, begun) + tail_s
            # The rows that were there when the job came.
            found = min(max(int(100 * (begun - number * shard_s) / shard_s), 0), 100)
            beat = Beat(total=100, done=100, tokens=500, found=found, **on)
            job = JobName("generate", f"{number}", f"{number}")
            times = (NOW + begun, NOW + ended, NOW + ended)
            self.views.append(JobView(job, "done", 100, 100, 100, 0, 500, 0, *times, beat))
            free = ended + gap_s
        self.now, self.took = NOW + ended, ended
        self.views = after_waits(self.views)


# The server limits the first two, Snakemake's jobs the last.
RUNS = [
    Running(40, *seconds, on)
    for seconds in ((100.0, 10.0, 5.0), (12.0, 2.0, 5.0), (4.0, 1.0, 6.0))
    for on in ({"gpus": ("GPU-a",)}, {"server": Server(uuid="http://a:1")})
]


@pytest.mark.parametrize("run", RUNS)
def test_jobs_whose_rows_were_answered_ahead_are_timed_by_what_the_lane_does(run: Running) -> None:
    rest = [view("waiting") for _ in range(99)]
    found, left = stage_eta("generate", [*run.views, view("running", done=0), *rest], run.now)
    assert found.middle == pytest.approx(100 * run.took / 40, rel=0.03)
    assert left is not None
    cost = cost_of(run.views, {"generate": left}, configuration({"device": "cuda"}))
    assert cost.gpu_hours == pytest.approx(run.took / 3600)
    assert (cost.expected_low or 0) < run.took * 140 / 40 / 3600 < (cost.expected_high or 0)


@pytest.mark.parametrize("run", RUNS)
def test_rates_count_rows_that_were_answered_ahead_in_the_time_that_they_took(run: Running) -> None:
    for amount, total in ((_own_rows, 100), (_own_tokens, 500)):
        found = rate_of(run.views, amount, run.now)
        assert found.all == pytest.approx(40 * total / run.took)
        assert found.hour == pytest.approx(40 * total / run.took, rel=0.2)


def test_a_job_that_runs_is_timed_by_the_rows_that_were_answered_under_it() -> None:
    live = replace(view("running", rows=100, done=90, seconds=10.0), beat=Beat(total=100, done=90, found=70))
    assert own_pace(live) == (0.5, 20, 10)


@pytest.mark.parametrize(
    ("views", "reason"),
    [
        ([view("waiting")], NOT_BEGUN),
        ([*[view() for _ in range(4)], view("running"), view("waiting")], "4 of 5 jobs that it takes are finished"),
        ([*[view() for _ in range(9)], view("waiting")], "nothing of it is at work"),
        ([*[view() for _ in range(9)], view("interrupted", ago=5000)], "nothing of it is at work"),
        ([*[view() for _ in range(9)], view("stale", ago=300)], "stalled: no sign of life for 5 min"),
    ],
)
def test_what_is_not_known_is_said_with_its_reason(views: list[JobView], reason: str) -> None:
    found = eta_of(views)
    assert (found.low, found.middle, found.high, found.reason) == (None, None, None, reason)


def test_no_stage_ends_before_its_longest_job() -> None:
    live = [view("running", rows=1000, done=0), view("running", rows=10, done=0)]
    assert eta_of([*(view() for _ in range(9)), *live]).middle == pytest.approx(1000.0)


def test_a_finished_stage_takes_no_more_time() -> None:
    assert eta_of([view(), view()]) == Eta(0.0, 0.0, 0.0, covers=("generate",))


def test_a_single_long_job_is_timed_by_itself() -> None:
    found = eta_of([view("running", rows=100, done=25, seconds=50.0)])
    assert found.middle == pytest.approx(150.0, rel=0.02)
    assert (found.low, found.high) == (
        pytest.approx(150 * (1 - 1.96 / 5), rel=0.02),
        pytest.approx(150 * (1 + 1.96 / 5), rel=0.02),
    )
    assert eta_of([view("running", rows=100, done=4, seconds=50.0)]).reason


def test_stages_that_share_lanes_add_up_and_unmeasured_ones_are_named() -> None:
    finished = [view() for _ in range(10)]
    generate = [*finished, *(view("running", done=0) for _ in range(2)), *(view("waiting") for _ in range(18))]
    extract = [
        *(view(seconds=50.0, stage="extract") for _ in range(10)),
        *(view("waiting", stage="extract") for _ in range(20)),
    ]
    left = {}
    for name, views in (("generate", generate), ("extract", extract)):
        work = stage_eta(name, views, NOW)[1]
        assert work is not None
        left[name] = work
    found = whole_eta(left, ["generate", "extract", "train"], [*generate, *extract], NOW)
    assert found.middle == pytest.approx((20 * 100 + 20 * 50) / 2)
    assert (found.covers, found.leaves_out, found.lanes) == (("generate", "extract"), ("train",), 2)


def test_work_counts_by_its_share_of_the_last_hour() -> None:
    assert last_hour([Work(NOW - 7200, NOW, 7200.0)], NOW) == pytest.approx(1.0)
    assert last_hour([Work(NOW - 5400, NOW - 1800, 3600.0)], NOW) == pytest.approx(0.5)
    assert last_hour([Work(NOW - 9000, NOW - 8000, 5.0)], NOW) == 0.0
    assert last_hour([Work(NOW - 60, NOW, 600.0)], NOW) == pytest.approx(10.0)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=12))
def test_busy_time_is_the_union_of_spans(spans: list[tuple[int, int]]) -> None:
    ordered = [(min(span), max(span)) for span in spans]
    seconds = {second for start, end in ordered for second in range(start, end)}
    assert busy_seconds(ordered) == len(seconds)


def test_a_pause_does_not_slow_the_overall_rate() -> None:
    work = [Work(0.0, 100.0, 1000.0), Work(50.0, 100.0, 500.0), Work(1e6, 1e6 + 100, 500.0)]
    assert overall(work) == pytest.approx(10.0)


def test_the_minute_is_what_live_jobs_say_of_themselves() -> None:
    live = [view("running", tokens=500, tokens_1m=7.0), view("running", tokens=200, seconds=100.0)]
    silent = view("stale", tokens=900, tokens_1m=50.0, ago=100)
    found = rate_of([*live, silent], lambda one: one.tokens, NOW)
    assert found.minute == pytest.approx(9.0)
    assert rate_of([view("waiting")], lambda one: one.tokens, NOW).minute is None


def test_cost_has_a_price_and_an_expectation() -> None:
    made = MadeStore(changes={"resources": {"gpu_hour_price": 2.5}})
    cost = read_state(Memory(made.objects), clock=lambda: made.now).cost
    seconds = sum(made._seconds("generate", place) + 21 for place in range(len(made.generated)))
    assert cost.gpu_hours > seconds / 3600
    assert cost.spent == pytest.approx(cost.gpu_hours * 2.5)
    assert cost.gpu_hours < (cost.expected_low or 0) <= (cost.expected_high or 0)
    assert cost.total_high == pytest.approx((cost.expected_high or 0) * 2.5)


def test_a_build_on_the_cpu_costs_no_gpu() -> None:
    made: Any = MadeStore(shards=12, windows=2, changes={"device": "cpu"})
    assert read_state(Memory(made.objects), clock=lambda: made.now).cost.gpu_hours == 0
