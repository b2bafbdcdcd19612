"""Lanes: jobs that Snakemake starts by count get different GPUs."""

from pathlib import Path

import pytest

from draftmill.gpu.policy import GatePolicy

from ..gpu.lanes import overlaps, results, run_lanes
from .conftest import Host, uuid_of


@pytest.mark.slow
def test_jobs_of_one_build_run_on_different_gpus(host: Host, policy: GatePolicy, tmp_path: Path) -> None:
    host.show(4)
    host.set(1, ecc=2)
    folder = tmp_path / "build"
    folder.mkdir()
    assert run_lanes(folder, policy, jobs=5, limit=4, mode="pretend", seconds=0.5) == "snakemake"
    jobs = results(folder)
    assert len(jobs) == 5
    assert overlaps(jobs) == []
    assert {uuid for job in jobs for uuid in job["uuids"]} <= {uuid_of(0), uuid_of(2), uuid_of(3)}


@pytest.mark.slow
def test_jobs_of_two_gpus_share_none(host: Host, policy: GatePolicy, tmp_path: Path) -> None:
    host.show(4)
    folder = tmp_path / "build"
    folder.mkdir()
    run_lanes(folder, policy, jobs=3, limit=4, mode="pretend", seconds=0.3, gpus=2)
    jobs = results(folder)
    assert all(len(job["uuids"]) == 2 for job in jobs)
    assert overlaps(jobs) == []
