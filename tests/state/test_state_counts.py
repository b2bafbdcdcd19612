"""Counts that add up whatever a store holds: any objects, any heartbeats, any times."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill import layout
from draftmill.canonical import canonical_json
from draftmill.state.plan import job_names
from draftmill.state.read import Reader
from draftmill.state.state import read_state, state_of
from draftmill.state.types import State
from tests.state.made_store import MadeStore
from tests.state.memory import Memory

NOW = 1_800_000_000.0
TOY = MadeStore(shards=6, rows=8, windows=2, kinds=2, failures=0, broken_audits=0, phase="started")
JOBS = job_names(TOY.graph)
BEGUN = {key: held for key, held in TOY.objects.items() if not key.startswith("progress/generate/")}

rows = st.integers(0, 20)
counts = st.one_of(rows, rows, rows, rows, st.none(), st.sampled_from([-2, 2**70, "many", float("nan"), float("inf")]))
speeds = st.one_of(st.none(), st.floats(0, 1e6))
times = st.one_of(st.none(), st.floats(NOW - 1e5, NOW + 1e5))


def beats_of(counts: Any, speeds: Any, times: Any) -> Any:
    names = ("total", "done", "useful", "rejected", "resumed", "tokens", "trained_tokens")
    return st.fixed_dictionaries(
        {},
        optional={
            **dict.fromkeys(names, counts),
            "state": st.sampled_from(["running", "done", "failed", ""]),
            "tokens_1m": speeds,
            "started": times,
            "updated": times,
            "gpus": st.lists(st.sampled_from(["GPU-1", "GPU-2"]), max_size=2),
            "unknown": st.text(),
        },
    )


beats = st.one_of(beats_of(rows, speeds, times), beats_of(counts, st.floats(), st.floats()))
ages = st.one_of(st.floats(-1e4, 1e6), st.sampled_from([0.0, 30.0, 59.0, 61.0, 601.0]))


@st.composite
def stores(draw: Any) -> Memory:
    """A started build, with any of its jobs done, at work, failed or silent."""
    store = Memory(BEGUN)
    for job in JOBS:
        kind = draw(st.sampled_from(["nothing", "done", "told", "told", "done and told"]))
        if "done" in kind:
            for key in TOY.graph.outputs(job.stage, job.subject or "0"):
                store.put(key, TOY.made_kinds[0].json if key.startswith("audits/") else b"", NOW - draw(ages))
        if "told" in kind:
            data = json.dumps(draw(beats)).encode()
            cut = draw(st.sampled_from([None] * 9 + [len(data) // 2]))
            store.put(layout.progress(job.stage, job.name), data[:cut], NOW - draw(ages))
    return store


def check(state: State) -> None:
    for stage in state.stages:
        jobs, rows = stage.jobs, stage.rows
        assert jobs.wanted == jobs.done + jobs.running + jobs.failed + jobs.interrupted + jobs.waiting
        assert 0 <= jobs.stale <= jobs.running
        assert rows.done == rows.useful + rows.rejected + rows.untold
        assert min(rows.useful, rows.rejected, rows.untold) >= 0
        assert rows.wanted is None or rows.done <= rows.wanted
        for rate in (stage.token_rate, stage.trained_rate, stage.row_rate):
            assert all(value is None or 0 <= value < math.inf for value in (rate.minute, rate.hour, rate.all))
        eta = stage.eta
        assert (eta.low is None) == (eta.reason is not None)
        assert eta.low is None or 0 <= eta.low <= eta.middle <= eta.high  # type: ignore[operator]
    assert all(lane.age >= 0 for lane in state.lanes)
    assert len({lane.id for lane in state.lanes}) == len(state.lanes)
    json.dumps(state.to_json(), allow_nan=False)


@given(stores(), st.floats(-1e5, 1e5))
@settings(max_examples=100, deadline=None)
def test_whatever_a_store_holds_the_counts_add_up(store: Memory, later: float) -> None:
    check(read_state(store, clock=lambda: NOW + later))


@given(stores())
@settings(max_examples=30, deadline=None)
def test_what_is_published_is_done_whatever_its_heartbeat_says(store: Memory) -> None:
    state = read_state(store, clock=lambda: NOW)
    for stage in ("generate", "audit", "evaluate"):
        jobs = [job for job in JOBS if job.stage == stage]
        present = store.objects.keys()
        done = [job for job in jobs if set(TOY.graph.outputs(stage, job.subject or "0")) <= present]
        assert state.stage(stage).jobs.done == len(done)


@given(stores())
@settings(max_examples=20, deadline=None)
def test_the_state_is_a_function_of_store_and_time(store: Memory) -> None:
    reader = Reader(store)
    first = state_of(reader.snapshot(), NOW)
    assert state_of(reader.snapshot(), NOW) == first == read_state(store, clock=lambda: NOW)


@pytest.mark.parametrize("phase", ["started", "generating", "training", "finished"])
@pytest.mark.parametrize("policy", ["keep", "window"])
def test_a_build_is_counted_in_every_phase_of_its_life(phase: Any, policy: str) -> None:
    made = MadeStore(shards=40, windows=4, phase=phase, changes={"hidden": {"policy": policy}})
    state = read_state(Memory(made.objects), clock=lambda: made.now)
    check(state)
    assert state.stage("generate").jobs.done == len(made.generated)
    assert state.stage("generate").jobs.wanted == state.plan.shards == 40
    if policy == "window":
        assert state.stage("extract").jobs.done == len(made.extracted)
        assert state.stage("train").jobs.done == made.trained
    assert state.finished == (phase == "finished" and policy == "window")


def test_rows_are_those_of_the_audits_and_of_running_jobs(made: MadeStore, memory: Memory) -> None:
    rows = read_state(memory, clock=lambda: made.now).stage("generate").rows
    kinds = [made.kind_of(shard) for shard in made.generated]
    running, failed = (made.lanes + 2) * (made.rows // 2), made.failures * 2
    assert rows.wanted == made.shards * made.rows
    assert rows.useful == sum(kind.rows for kind in kinds) + (made.lanes + 2) * (made.rows // 2 - 1) + failed
    assert rows.done == sum(kind.rows + kind.bad for kind in kinds) + running + failed


def test_rows_that_nobody_judged_are_untold(made: MadeStore, memory: Memory) -> None:
    shard = made.generated[0]
    del memory.objects[made.graph.audit(shard)]
    before = read_state(memory, clock=lambda: made.now).stage("generate").rows
    del memory.objects[layout.progress("generate", f"{shard}-{made.fp['generate']}")]
    rows = read_state(memory, clock=lambda: made.now).stage("generate").rows
    assert before.untold == 0
    assert (rows.untold, rows.done) == (made.rows, before.done)


def test_a_heartbeat_of_old_fields_is_understood(made: MadeStore, memory: Memory) -> None:
    old = {"stage": "generate", "name": "x", "unit": "rows", "state": "running", "total": 12, "done": 5, "tokens": 600}
    times = {
        "started": made.now - 100,
        "updated": made.now,
        "tokens_per_second": 6.0,
        "host": "h",
        "pid": 1,
        "resumed": 0,
    }
    shard = made.graph.train[-1]
    key = layout.progress("generate", f"{shard}-{made.fp['generate']}")
    memory.put(key, canonical_json(old | times).encode(), made.now)
    rows = read_state(memory, clock=lambda: made.now).stage("generate").rows
    assert rows.untold == 5
