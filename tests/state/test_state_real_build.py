"""A real build, shown by Snakemake's own loggers rich and snkmt, and watched through its store meanwhile."""

from __future__ import annotations

import sqlite3
import subprocess
import time
from pathlib import Path

import pytest

from draftmill.state.jobs import picture_of
from draftmill.state.read import Reader
from draftmill.state.shards import shard_rows
from draftmill.state.state import state_of
from draftmill.state.types import State
from draftmill.store.local import LocalStore
from tests.tiny import Project

WAIT_S = 1500.0


@pytest.mark.slow
def test_a_real_build_is_followed_from_its_store_under_snakemakes_own_loggers(tmp_path: Path) -> None:
    project = Project(tmp_path / "project", prompts=40)
    # Long enough for a look at it while it is at work.
    project.configure(train={"epochs": 20})
    seen: list[State] = []
    reader = Reader(LocalStore(project.folder / "build"))
    loggers = ("--logger", "rich", "snkmt", "--logger-snkmt-db", str(tmp_path / "snkmt.db"))
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            project.command(*loggers), cwd=project.folder, env=project.environment, stdout=log, stderr=log
        )
        end = time.monotonic() + WAIT_S
        while process.poll() is None:
            assert time.monotonic() < end
            seen.append(state_of(reader.snapshot(), time.time()))
            time.sleep(0.2)
    assert process.returncode == 0, (tmp_path / "log").read_text()[-3000:]
    snapshot = reader.snapshot()
    last = state_of(snapshot, time.time())

    assert last.finished
    assert last.plan.basis == "build"
    assert [stage.name for stage in last.stages if stage.jobs.done != stage.jobs.wanted] == []
    rows = last.stage("generate").rows
    assert (rows.done, rows.untold) == (rows.wanted, 0)
    assert last.stage("generate").trained_tokens > 0
    assert not last.failures
    picture = picture_of(snapshot, time.time())
    assert picture is not None
    assert all(link.run and link.seconds for row in shard_rows(picture) for link in row.chain)

    done = [state.stage("generate").jobs.done for state in seen]
    assert done == sorted(done), "counts only rise while nothing is deleted"
    lanes = [lane for state in seen for lane in state.lanes if lane.state == "running"]
    assert {lane.stage for lane in lanes} >= {"generate", "train"}
    assert {lane.gate.verdict for lane in lanes if lane.gate is not None} == {"not_required"}
    assert any(state.stage("generate").jobs.running for state in seen)
    with sqlite3.connect(tmp_path / "snkmt.db") as database:
        told = database.execute("select name, total_job_count, jobs_finished from rules").fetchall()
        assert database.execute("select status from workflows").fetchall() == [("SUCCESS",)]
    wanted = {name: jobs for name, jobs, finished in told if jobs == finished}
    assert wanted["generate"] == last.stage("generate").jobs.wanted
    assert wanted["train"] == last.stage("train").jobs.wanted
