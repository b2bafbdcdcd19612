"""A whole build through Snakemake whose answers come from a server, and what is left when it is killed again and again."""

import os
import random
import subprocess
import time

import pytest

from draftmill.schemas import COMPLETIONS, REJECTED, read_rows
from tests.sglang.servers import Phoenix, generated
from tests.tiny import Project

# Thirty were run; every run of the suite does a few.
KILLS = int(os.environ.get("DRAFTMILL_KILLS", "3"))
DEADLINE_S = 3000.0
FLUSH_ROWS, IN_FLIGHT, PROMPTS = 4, 8, 90

pytestmark = pytest.mark.slow


@pytest.fixture
def server(tmp_path):
    found = Phoenix(tmp_path / "record", "--token-seconds", "0.01", "--model", str(tmp_path / "project" / "target"))
    yield found
    found.end()


@pytest.fixture
def project(tmp_path, server):
    made = Project(tmp_path / "project", prompts=PROMPTS)
    limits = {"urls": [server.url], "in_flight": IN_FLIGHT, "backoff_seconds": 0.05}
    made.configure(
        target={"context_length": 256},
        generate={"engine": "sglang", "flush_rows": FLUSH_ROWS, "flush_seconds": 0.5, "sglang": limits},
    )
    return made


def whole(project):
    """Every prompt of the sources stands in exactly one row."""
    files = (project.folder / "build/completions").glob("*.parquet")
    good, bad = [], []
    for path in files:
        refused = path.name.endswith(".rejected.parquet")
        (bad if refused else good).extend(read_rows(path, REJECTED if refused else COMPLETIONS))
    assert bad == []
    assert len(good) == len({row["prompt_id"] for row in good}) == PROMPTS
    assert not [path for path in (project.folder / "build/journal").rglob("*") if path.is_file()]


def command(project):
    """A build up to the audits: the answers of the small server are no target's, so extraction would refuse them."""
    first, module, snakemake, *rest = project.command()
    return [first, module, snakemake, "audit_set", *rest]


def audits(project):
    return subprocess.run(
        command(project), cwd=project.folder, env=project.environment, capture_output=True, text=True, check=False
    )


def test_a_build_by_a_server_has_one_lane_and_asks_each_row_once(project, tmp_path):
    result = audits(project)
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
    whole(project)
    assert set(generated(tmp_path / "record").values()) == {1}
    assert sum(generated(tmp_path / "record").values()) == PROMPTS
    assert audits(project).returncode == 0
    assert sum(generated(tmp_path / "record").values()) == PROMPTS


@pytest.mark.timeout(3600)
@pytest.mark.chaos
def test_kills_of_snakemake_leave_every_prompt_exactly_once(project, tmp_path):
    rng, end, done = random.Random(f"builds {KILLS}"), time.monotonic() + DEADLINE_S, 0
    record = tmp_path / "record"
    log = (project.folder / "killed.log").open("ab")
    while done < KILLS:
        assert time.monotonic() < end
        before = sum(generated(record).values())
        build = subprocess.Popen(command(project), cwd=project.folder, env=project.environment, stdout=log, stderr=log)
        # Killed as soon as it has got a few rows further, so that thirty builds end with this many prompts.
        due = before + rng.randrange(0, 4)
        wait = time.monotonic() + rng.uniform(5.0, 20.0)
        while build.poll() is None and sum(generated(record).values()) <= due and time.monotonic() < wait:
            time.sleep(0.01)
        if build.poll() is not None:
            assert build.returncode == 0, (project.folder / "killed.log").read_text()[-3000:]
            break
        build.kill()
        build.wait()
        done += 1
    result = audits(project)
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
    whole(project)
    counts = generated(record)
    twice = sum(counts.values()) - len(counts)
    print(f"{done} kills of builds, {len(counts)} rows, {twice} generated twice")
    assert len(counts) == PROMPTS
    assert twice <= done * (FLUSH_ROWS + IN_FLIGHT)
