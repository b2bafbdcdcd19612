"""Lanes: jobs that Snakemake starts by count get different GPUs."""

import json
import subprocess
import sys
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


# The first try of the job sees a stranger take its GPU after the launch; what it then does is the gate's.
TAKEN_JOB = """
import json, sys
from pathlib import Path
from draftmill.gpu import gate
from draftmill.gpu.policy import GatePolicy
policy, attempt, output, state, tried, first = sys.argv[1:]
with gate.lease(GatePolicy.model_validate_json(policy), "cuda", gpus=1, run_id="r", stage="s", shard="a") as held:
    with open(tried, "a") as log:
        print(*held.uuids, file=log)
    if attempt == "1":
        with open(state, "a") as shown:
            print(f"proc {int(held.uuids[0] != first)} 1 62277025792 c", file=shown)
    held.attest()
    Path(output).write_text(json.dumps(held.uuids))
"""
TAKEN_SNAKEFILE = """
rule all:
    input: "out.json"

rule before:
    output: "before.txt"
    shell: "echo kept > {{output}}"

rule job:
    input: "before.txt"
    output: "out.json"
    retries: 1
    resources: gpu=1, attempt=lambda w, attempt: attempt
    params: policy={policy!r}
    shell: "{python} job.py {{params.policy:q}} {{resources.attempt}} {{output}} {state} tried.txt {first}"
"""


@pytest.mark.slow
def test_a_gpu_that_turns_busy_fails_its_job_and_the_retry_takes_another(
    host: Host, policy: GatePolicy, tmp_path: Path
) -> None:
    folder = tmp_path / "build"
    folder.mkdir()
    values = {"policy": policy.model_dump_json(), "python": sys.executable, "state": host.path, "first": uuid_of(0)}
    (folder / "Snakefile").write_text(TAKEN_SNAKEFILE.format(**values))
    (folder / "job.py").write_text(TAKEN_JOB)
    command = [sys.executable, "-m", "snakemake", "--cores", "2", "--resources", "gpu=2"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-2000:]
    tried = (folder / "tried.txt").read_text().split()
    assert len(tried) == 2
    assert len(set(tried)) == 2, "the retry took another GPU"
    assert json.loads((folder / "out.json").read_text()) == [tried[1]]
    assert tried[0] in said, "the first try's verdict names its GPU"
    assert (folder / "before.txt").read_text() == "kept\n"
