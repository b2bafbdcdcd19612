"""Jobs: a mistake is one sentence, a fault keeps its traceback, and no job outlives the build that started it."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftmill.build_claims import claims_of
from draftmill.errors import UserError
from draftmill.gpu import gate, processes
from draftmill.gpu.errors import GpuBusy
from draftmill.gpu.record import Verdict
from draftmill.job import BUILDER_VARIABLE, RUN_VARIABLE, Job, follow_builder, mark_builder
from draftmill.store.local import LocalStore
from tests.tiny import config_values

DEADLINE = 30.0
RECORDED = Path(__file__).parents[1] / "gpu_gate/recorded/one-h200.jsonl"


def wait_for(true, what):
    end = time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < end, f"{what} did not happen within {DEADLINE} s"
        time.sleep(0.02)


def start(script: str, *arguments: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if name not in (RUN_VARIABLE, BUILDER_VARIABLE)}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        env={**kept, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# A builder that starts a job, which says its pid once it follows, and then works for ever.
JOB = """
import os, signal
from draftmill.job import follow_builder
follow_builder()
print(os.getpid(), flush=True)
signal.pause()
"""
BUILDER = """
    import subprocess, sys
    from draftmill.job import mark_builder
    mark_builder()
    subprocess.run([sys.executable, "-c", sys.argv[1]])
"""


def test_a_job_ends_when_its_builder_was_killed():
    builder = start(BUILDER, JOB)
    pid = int(builder.stdout.readline())
    job = processes.identify(pid)
    assert job is not None
    os.kill(builder.pid, signal.SIGKILL)
    try:
        builder.wait(DEADLINE)
        wait_for(lambda: not processes.alive(job), "the job's end")
    finally:
        if processes.alive(job):
            os.kill(pid, signal.SIGKILL)
        builder.communicate()


@pytest.fixture
def ended():
    """A process's identity that is of the past."""
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    identity = processes.identify(process.pid)
    process.kill()
    process.wait()
    assert identity is not None
    return identity


def followers() -> int:
    return sum(thread.name == "follow-builder" for thread in threading.enumerate())


def mark(boot: object, namespace: object, process: processes.Process) -> str:
    return f"{boot} {namespace} {process.pid} {process.start}"


def test_the_end_of_the_builder_is_noticed_once(ended, monkeypatch):
    monkeypatch.setenv(BUILDER_VARIABLE, mark(processes.boot_id(), processes.pid_namespace(), ended))
    seen = threading.Event()
    follow_builder(seen.set)
    assert seen.wait(DEADLINE)
    wait_for(lambda: followers() == 0, "the end of the watching thread")


def test_a_reused_pid_is_not_the_builder(ended, monkeypatch):
    mine = processes.myself()
    other = processes.Process(mine.pid, mine.start - 1)
    monkeypatch.setenv(BUILDER_VARIABLE, mark(processes.boot_id(), processes.pid_namespace(), other))
    seen = threading.Event()
    follow_builder(seen.set)
    assert seen.wait(DEADLINE)


def test_a_builder_of_another_host_or_container_is_not_followed(ended, monkeypatch):
    for boot, namespace in (("other", processes.pid_namespace()), (processes.boot_id(), "other")):
        monkeypatch.setenv(BUILDER_VARIABLE, mark(boot, namespace, ended))
        follow_builder(pytest.fail)
        assert followers() == 0


@pytest.mark.parametrize("value", [None, "", "three words only"])
def test_outside_a_build_nothing_is_followed(value, monkeypatch):
    monkeypatch.delenv(BUILDER_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(BUILDER_VARIABLE, value)
    follow_builder(pytest.fail)
    assert followers() == 0


def test_the_run_is_named_once_and_inherited(monkeypatch):
    for name in (RUN_VARIABLE, BUILDER_VARIABLE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    run = mark_builder()
    assert mark_builder() == run == os.environ[RUN_VARIABLE]
    mine = processes.myself()
    assert os.environ[BUILDER_VARIABLE] == mark(processes.boot_id(), processes.pid_namespace(), mine)


SCRIPT = """
    import sys
    from types import SimpleNamespace
    from draftmill.errors import UserError
    from draftmill.job import run
    from tests.tiny import config_values

    def main(job):
        print("working on", job.stage, job.name, flush=True)
        {body}

    params = SimpleNamespace(stage="generate", name="x", provenance={{}})
    config = {{**{config}, "store": sys.argv[2]}}
    run(SimpleNamespace(log=[sys.argv[1]], config=config, params=params, input={{}}, output={{}}), main)
"""


def run_job(log: Path, body: str, config: str = "config_values()") -> tuple[int, str, str]:
    root = str(Path(__file__).parents[2])
    script = SCRIPT.format(body=body, config=config)
    process = start(script, str(log), str(log.with_name("store")), environment={"PYTHONPATH": root})
    _, said = process.communicate(timeout=60)
    return process.returncode, said, log.read_text()


def test_a_users_mistake_is_one_sentence_in_the_log_and_on_the_terminal(tmp_path):
    code, said, log = run_job(tmp_path / "logs/x.log", 'raise UserError("The target has no taps: give some.")')
    assert code == 1
    assert said == "\ndraftmill: The target has no taps: give some.\n"
    assert log == "working on generate x\nThe target has no taps: give some.\n"


def test_a_wrong_configuration_is_a_users_mistake(tmp_path):
    code, said, log = run_job(tmp_path / "x.log", "pass", 'config_values(generate={"sed": 1})')
    assert code == 1
    assert said.strip() == (
        "draftmill: The configuration is wrong: generate.sed is not a known key (config/README.md lists them)"
    )
    assert "Traceback" not in log


def test_a_fault_keeps_its_traceback_in_the_log(tmp_path):
    code, said, log = run_job(tmp_path / "x.log", 'raise RuntimeError("rows are lost")')
    assert code != 0
    assert said == ""
    assert "Traceback (most recent call last)" in log
    assert "RuntimeError: rows are lost" in log


def last_word(log: Path) -> dict[str, object]:
    return json.loads(LocalStore(log.with_name("store")).get("progress/generate/x.json"))


OUT_OF_MEMORY = 'RuntimeError("CUDA out of memory.")'
HALF_DONE = """
        with job.heartbeat(4) as beat:
            beat.advance(3)
        raise UserError("The shard is not written.")"""
INSIDE = """
        with job.heartbeat(4) as beat:
            beat.advance(2)
            raise UserError("The canary disagrees.")"""


@pytest.mark.parametrize(
    ("body", "error", "done"),
    [
        (f"raise {OUT_OF_MEMORY}", "CUDA out of memory.", 0),
        ('raise UserError("No server.")', "No server.", 0),
        (HALF_DONE, "The shard is not written.", 3),
        (INSIDE, "The canary disagrees.", 2),
    ],
    ids=["before its heartbeat", "a mistake", "behind its heartbeat", "in its heartbeat"],
)
def test_whatever_ends_a_job_is_told_by_its_heartbeat(tmp_path, body, error, done):
    code, _, _ = run_job(tmp_path / "x.log", body)
    found = last_word(tmp_path / "x.log")
    assert code != 0
    assert (found["state"], found["error"], found["done"]) == ("failed", error, done)
    assert (found["stage"], found["name"]) == ("generate", "x")


def test_ctrl_c_is_no_failure_of_a_job(tmp_path):
    run_job(tmp_path / "x.log", "raise KeyboardInterrupt")
    assert not LocalStore(tmp_path / "store").list("progress/")


def test_a_gate_that_refuses_is_told_with_its_verdict(job, tmp_path, monkeypatch):
    case = next(json.loads(line) for line in RECORDED.read_text().splitlines() if '"58 GiB held"' in line)
    verdict = Verdict.model_validate(case["record"])

    def refuse(*_, **__):
        raise GpuBusy(verdict)

    monkeypatch.setattr(gate, "lease", refuse)
    job._snakemake.resources = SimpleNamespace(gpu=1)
    job._snakemake.params.get = lambda name: None
    with pytest.raises(GpuBusy), job.gpus():
        pass
    job.fail("refused")
    found = json.loads(LocalStore(tmp_path / "store").get("progress/extract/a-b.json"))
    assert (found["state"], found["gate"]["verdict"], found["gpus"]) == ("failed", "busy", [verdict.gpus[0].uuid])
    assert found["gate"]["reasons"] == ["memory_held", "compute_process"]


def test_what_children_write_is_in_the_log_too(tmp_path):
    code, said, log = run_job(tmp_path / "x.log", 'import os; os.system("echo out; echo err >&2")')
    assert (code, said) == (0, "")
    assert log == "working on generate x\nout\nerr\n"


@pytest.fixture
def job(tmp_path):
    params = SimpleNamespace(stage="extract", name="a-b", provenance={"stage": "extract"})
    given = {"states": [str(tmp_path / "1"), str(tmp_path / "2")], "one": str(tmp_path / "3"), "none": []}
    values = {**config_values(), "store": str(tmp_path / "store")}
    return Job(SimpleNamespace(config=values, params=params, input=given, output={"x": "out"}))


def test_inputs_are_paths_by_name_and_a_missing_one_says_what_to_do(job, tmp_path):
    assert job.inputs("states") == [tmp_path / "1", tmp_path / "2"]
    assert job.input("one") == tmp_path / "3"
    assert job.inputs("none") == job.inputs("absent") == []
    assert job.output("x") == Path("out")
    with pytest.raises(UserError) as caught:
        job.input("absent")
    assert str(caught.value) == ("The job extract a-b needs its absent, which the store lacks: run `draftmill index`.")


def test_a_job_has_its_own_journal_progress_and_versions(job, tmp_path):
    assert job.journal_folder()[0] == tmp_path / "store/journal/extract/a-b"
    job.journal().append([{"row": 1}])
    with job.heartbeat(3):
        pass
    found = {key.partition("-b/00000000-")[0] for key in job.store.list()}
    assert found == {"journal/extract/a", "progress/extract/a-b.json"}
    assert job.provenance["stage"] == "extract"
    assert set(job.provenance["versions"]) == {"draftmill", "torch", "transformers", "pyarrow"}


def test_a_job_that_another_build_has_finished_meanwhile_is_not_done_again(tmp_path):
    """Another build holds the claim, publishes and lets go: this one waits, then has nothing to do."""
    store = LocalStore(tmp_path / "store")
    snakemake = SimpleNamespace(
        config={**config_values(), "store": str(store.root)},
        params=SimpleNamespace(stage="extract", name="a-b", provenance={}),
        input={},
        output={"hidden": str(store.root / "hidden/a-b.safetensors")},
    )
    with Job(snakemake).claimed() as todo:
        assert todo
        assert list(store.list("claims/")) == ["claims/extract/a-b.json"]
    others = claims_of(store, "another")
    with others.claimed("claims/extract/a-b.json", lambda: False):
        seen, waiting = [], threading.Thread(target=lambda: _enter(Job(snakemake), seen))
        waiting.start()
        store.put("hidden/a-b.safetensors", b"the winner's")
        assert seen == []
    waiting.join(60)
    assert seen == [False]
    assert sorted(store.list()) == ["hidden/a-b.safetensors"]


def _enter(job, seen):
    with job.claimed() as todo:
        seen.append(todo)


def test_a_sentinel_of_another_run_is_not_trusted(tmp_path, monkeypatch):
    monkeypatch.setenv(RUN_VARIABLE, "this-run")
    place, values = tmp_path / "sentinel.json", config_values()
    snakemake = SimpleNamespace(
        config=values,
        params=type("Params", (dict,), {"stage": "extract", "name": "a", "provenance": {}})(shard="a"),
        input={"gpu": str(place)},
        resources=SimpleNamespace(gpu=1),
        threads=1,
    )
    job = Job(snakemake)
    asked = {"gpus": 1, "stage": "extract", "shard": "a"}
    place.write_text(gate.sentinel(job.config.gate, "cpu", run_id="this-run", **asked).text())
    with job.gpus() as lease:
        assert lease.verdict.verdict == "not_required"
    place.write_text(gate.sentinel(job.config.gate, "cpu", run_id="a-dead-run", **asked).text())
    with pytest.raises(UserError, match="is of run a-dead-run"), job.gpus():
        pytest.fail("a job ran behind a dead run's sentinel")
