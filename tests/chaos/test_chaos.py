"""A small chaos in the suite, and the chaos itself: its schedule, and that it sees what it looks for."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftmill.store.s3 import S3Store
from draftmill.store.settings import S3Settings
from tests.chaos.chaos import BESIDE, OUTAGES, UNFINISHED, chaos, compare, digests, schedule
from tests.s3.project import S3Project
from tests.s3.weed import Weed


@given(st.integers(0, 10**6), st.integers(12, 400), st.integers(3, 30), st.integers(4, 8))
def test_a_seed_gives_one_schedule_with_every_kind_of_event(seed, objects, kills, outages):
    events = schedule(seed, objects, kills, outages, remote=True)
    assert events == schedule(seed, objects, kills, outages, remote=True)
    assert {event.what for event in events} == {"kill job", "kill snakemake", "kill server", *OUTAGES}
    assert len(events) == kills + outages
    assert [event.after for event in events] == sorted(event.after for event in events)
    assert all(event.after < objects - 4 for event in events)


def test_every_difference_is_named():
    wanted, found = {"a": "1", "b": "2"}, {"b": "3", "c": "4"}
    assert compare(wanted, found, ["journal/x"]) == [
        "missing: a",
        "nobody asked for: c",
        "different: b",
        "left over: journal/x",
    ]
    assert compare(wanted, wanted, []) == []


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(2400)
def test_three_kills_and_an_outage_leave_the_store_as_if_nothing_had_happened(tmp_path: Path) -> None:
    assert chaos(tmp_path, seed=5, shards=6, kills=3, outages=1, remote=True) == []


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(2400)
def test_two_builds_over_one_store_make_what_one_makes(weed: Weed, tmp_path: Path, monkeypatch) -> None:
    """Two builders at once, then a third that finds nothing to do; no job's work is published twice or mixed."""
    for name, value in weed.environment.items():
        monkeypatch.setenv(name, value)
    alone = S3Project(tmp_path / "alone", weed, "alone")
    pair = [S3Project(tmp_path / name, weed, "shared") for name in ("one", "two")]
    logs = [(project.folder / "build.log").open("wb") for project in pair]
    builds = [
        subprocess.Popen(project.command(), cwd=project.folder, env=project.environment, stdout=log, stderr=log)
        for project, log in zip(pair, logs, strict=True)
    ]
    end = time.monotonic() + 2000
    while any(build.poll() is None for build in builds) and time.monotonic() < end:
        time.sleep(0.5)
    said = [(project.folder / "build.log").read_text(errors="replace")[-3000:] for project in pair]
    assert [build.poll() for build in builds] == [0, 0], said
    alone.build()
    stores = [S3Store(weed.url(name), S3Settings(endpoint_url=weed.endpoint)) for name in ("alone", "shared")]
    assert compare(digests(stores[0]), digests(stores[1]), []) == []
    assert [key for key in stores[1].list() if key.startswith(UNFINISHED)] == []
    assert pair[0].plan() == pair[1].plan() == {}
    records = [key for key in stores[1].list() if key.startswith(BESIDE) and "generate" in key]
    assert records
