"""`draftmill run` over the real Snakemake: its lock after SIGKILL, and Ctrl-C in the middle of a job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from draftmill.gpu.processes import all_processes, descendants

pytestmark = pytest.mark.slow
DEADLINE = 240.0
SNAKEFILE = """
import os

rule all:
    input: "done.txt"

rule work:
    output: "done.txt"
    params: time=lambda w: 0 if os.path.exists("second") else 600
    shell: "touch started && sleep {params.time} && touch {output}"
"""


def wait_for_the_job(folder: Path, run: subprocess.Popen[str]) -> None:
    end = time.monotonic() + DEADLINE
    while not (folder / "started").exists():
        assert run.poll() is None, run.communicate()[1][-3000:]
        assert time.monotonic() < end, "the job did not start"
        time.sleep(0.02)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "Snakefile").write_text(SNAKEFILE)
    return tmp_path


def start(folder: Path) -> subprocess.Popen[str]:
    """Without `nolock`, as a profile of the user's own may be."""
    command = [sys.executable, "-m", "draftmill", "run", "--attempts", "3", "--", "--cores", "1"]
    command += ["--rerun-incomplete", "--workflow-profile", "none"]
    return subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def test_a_killed_snakemake_is_started_again_and_its_lock_removed(folder: Path) -> None:
    run = start(folder)
    wait_for_the_job(folder, run)
    (folder / "second").touch()
    snakemake = next(seen for seen in all_processes() if seen.parent == run.pid)
    os.kill(snakemake.pid, signal.SIGKILL)
    said = run.communicate(timeout=DEADLINE)[1]
    assert run.returncode == 0, said[-3000:]
    assert "draftmill run: Snakemake was killed by SIGKILL. Starting again in" in said
    assert (folder / "done.txt").exists()
    assert not any(seen.group == snakemake.pid for seen in all_processes())


def test_ctrl_c_in_the_middle_of_a_job_leaves_no_process_and_no_lock(folder: Path) -> None:
    run = start(folder)
    wait_for_the_job(folder, run)
    below = descendants(run.pid)
    run.send_signal(signal.SIGINT)
    said = run.communicate(timeout=DEADLINE)[1]
    assert run.returncode == 130, said[-3000:]
    assert "draftmill run: Stopped as asked; give the same command again to go on." in said
    assert not {seen.pid for seen in all_processes()} & below
    assert not list((folder / ".snakemake/locks").glob("*"))
