"""`draftmill run` over the repository's own Snakefile: a store that is down at the start, and a user's mistake."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.chaos.disks import fill
from tests.chaos.proxy import Proxy
from tests.s3.project import S3Project
from tests.s3.weed import Weed

pytestmark = pytest.mark.slow


@pytest.fixture
def proxy(weed: Weed) -> Iterator[Proxy]:
    found = Proxy(weed.port)
    yield found
    found.close()


def run(project: S3Project, *arguments: str, environment: Mapping[str, str] | None = None) -> tuple[int, str]:
    """`draftmill run` of the project's command; its status and what it said itself."""
    command = [sys.executable, "-m", "draftmill", "run", "--attempts", "8", "--", *project.command(*arguments)[3:]]
    result = subprocess.run(
        command,
        cwd=project.folder,
        env={**project.environment, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    lines = [line for line in result.stderr.splitlines() if line.startswith("draftmill run: ")]
    return result.returncode, "\n".join(lines) or result.stderr[-3000:]


def test_a_store_that_is_down_at_the_start_is_started_again_for(weed: Weed, proxy: Proxy, tmp_path: Path) -> None:
    project = S3Project(tmp_path, weed, "down", endpoint=proxy.endpoint)
    project.configure(s3={"endpoint_url": proxy.endpoint, "path_style": True, "wait_s": 1, "retries": 1})
    proxy.mode = "down"
    opened = threading.Event()

    def open_later() -> None:
        # The first Snakemake gives up on a store that refuses; the second one finds it.
        while not opened.wait(0.05):
            if proxy.refused >= 2:
                proxy.mode = "pass"
                return

    waiting = threading.Thread(target=open_later)
    waiting.start()
    status, said = run(project, "-n", "--quiet", "rules")
    opened.set()
    waiting.join()
    assert status == 0, said


def test_a_store_that_stays_down_is_named_and_given_up_in_the_end(weed: Weed, proxy: Proxy, tmp_path: Path) -> None:
    project = S3Project(tmp_path, weed, "down", endpoint=proxy.endpoint)
    project.configure(s3={"endpoint_url": proxy.endpoint, "path_style": True, "wait_s": 0, "retries": 1})
    proxy.mode = "down"
    command = [sys.executable, "-m", "draftmill", "run", "--attempts", "2", "--", *project.command("-n")[3:]]
    result = subprocess.run(
        command, cwd=project.folder, env=project.environment, capture_output=True, text=True, timeout=1500, check=False
    )
    lines = [line for line in result.stderr.splitlines() if line.startswith("draftmill run: ")]
    assert result.returncode == 1
    assert len(lines) == 2, result.stderr[-3000:]
    assert "draftmill run: the store did not answer: s3://bucket/down does not answer at" in lines[0]
    assert lines[1].startswith("draftmill run: Given up, 2 starts in a row finished no job.")


def test_a_mistake_in_the_configuration_is_said_once(weed: Weed, tmp_path: Path) -> None:
    project = S3Project(tmp_path, weed, "mistake")
    project.configure(pilot=1000)
    status, said = run(project, "-n")
    assert status == 1
    assert said.startswith("draftmill run: Not started again, because a person must act: pilot: 1000 is no train shard")
    assert said.count("\n") == 0


def test_a_full_local_disk_at_the_start_of_a_build_is_said_once(weed: Weed, disk: Path, tmp_path: Path) -> None:
    """What a build keeps on its own machine lies there, and files on their way to S3."""
    project = S3Project(tmp_path, weed, "full")
    project.configure()
    (project.folder / ".draftmill").symlink_to(disk)
    fill(disk)
    status, said = run(project, environment={"TMPDIR": str(disk)})
    assert status == 1
    assert said.startswith("draftmill run: Not started again, because a person must act: ")
    assert "run full: free some" in said
    assert said.count("\n") == 0
