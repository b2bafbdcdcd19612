"""SIGKILL of Snakemake in the middle of each long stage: the next call finishes, and the store is as if undisturbed."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftmill.store.journal import Journal
from draftmill.store.local import LocalStore
from tests.tiny import Project
from tests.waiting import until

pytestmark = pytest.mark.slow
DEADLINE = 900.0


def jobs_of(folder: Path) -> list[int]:
    """Pids of live processes whose command line names the project's folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            continue
        if str(folder).encode() in line and state != "Z" and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def kill_when(project: Project, true: Callable[[], bool], what: str) -> None:
    """Start a build, SIGKILL Snakemake alone once the condition holds, and see that its jobs end by themselves."""
    log = (project.folder / "killed.log").open("ab")
    build = subprocess.Popen(project.command(), cwd=project.folder, env=project.environment, stdout=log, stderr=log)

    def ended_or_true() -> bool:
        assert build.poll() is None, f"the build ended before {what}"
        return true()

    until(ended_or_true, what, DEADLINE)
    os.kill(build.pid, signal.SIGKILL)
    build.wait()
    until(lambda: not jobs_of(project.folder), "the end of the killed build's jobs", DEADLINE)


def unfinished(project: Project, stage: str) -> set[str]:
    """Names of a stage's jobs whose journal holds something whole; what a killed write left is nothing."""
    return {key.split("/")[2] for key in LocalStore(project.folder / "build").list(f"journal/{stage}/")}


def beats(project: Project, stage: str, since: float) -> dict[str, Any]:
    """Heartbeats of a stage's jobs that began after `since`, in seconds of the clock, by the job's name.

    An earlier build's jobs leave theirs, and the next build may take up other shards first.
    """
    found = [json.loads(path.read_text()) for path in (project.folder / "build/progress" / stage).glob("*.json")]
    return {beat["name"]: beat for beat in found if beat["started"] > since}


def test_killed_in_generate_extract_and_train(built: Project, tmp_path: Path) -> None:
    # The target must be the same bytes, as it is a part of every name.
    project = Project(tmp_path / "killed")
    store = LocalStore(project.folder / "build")

    flushed: dict[str, int] = {}
    # An orphan has a moment to live: a shard whose end was near may be done by then, and leaves no journal.
    while not any(flushed.values()):
        kill_when(project, lambda: bool(unfinished(project, "generate")), "a flushed row")
        left = unfinished(project, "generate")
        flushed = {name: len(Journal(store, f"journal/generate/{name}").rows()) for name in left}
    start = time.time()

    def resumed_and_extracting() -> bool:
        done = {name for name, beat in beats(project, "generate", start).items() if beat["state"] == "done"}
        return flushed.keys() <= done and bool(beats(project, "extract", start))

    kill_when(project, resumed_and_extracting, "an extraction behind the resumed shards")
    again = beats(project, "generate", start)
    resumed = {name: again[name]["resumed"] for name in flushed}
    assert resumed == flushed, "every flushed row is kept and none is generated again"
    kill_when(project, lambda: bool(unfinished(project, "train")), "a checkpoint inside training")
    project.build()

    assert project.objects().keys() == built.objects().keys()
    different = [key for key, data in project.objects().items() if data != built.objects()[key]]
    assert different == []
    assert project.plan() == {}


def test_a_call_for_some_targets_leaves_the_unfinished_work_of_other_jobs(copy_of_built: Callable[[], Project]) -> None:
    project = copy_of_built()
    store = LocalStore(project.folder / "build")
    train = next(key.split("/")[1] for key in store.list("drafter/"))
    for key in store.list("drafter/"):
        store.delete(key)
    generated = next(iter(store.list("completions/"))).removeprefix("completions/").split(".")[0]
    audit = next(key for key in store.list("audits/") if key.endswith(".html") and generated[:12] in key)
    store.delete(audit)
    kept = f"journal/train/{train}-0/trainer.safetensors"
    gone = [f"journal/generate/{generated}/00000000-ab.jsonl", "claims/generate/broken.json"]
    for key in (kept, *gone):
        store.put(key, b"?")

    result = project.run("--", str(store.path(audit).relative_to(project.folder)))
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
    assert store.info(audit) is not None
    assert [key for key in store.list() if key.startswith(("journal/", "claims/"))] == [kept]
