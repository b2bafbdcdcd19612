"""`draftmill run`: what is started again, what is not, and how it ends."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftmill import outcomes, supervise_locks
from draftmill.default_storage import TellingPatience
from draftmill.errors import UserError
from draftmill.gpu.processes import all_processes, identify
from draftmill.outcomes import Outcome
from draftmill.supervise import Limits, Supervisor, judge
from tests.waiting import until

FAKE = Path(__file__).with_name("fake_snakemake.py")
ROOT = Path(__file__).parents[2]
BEGAN, DONE = Outcome("began", "", "generate a", 1), Outcome("done", "", "generate a", 1)


def told(*kinds: str) -> list[Outcome]:
    return [Outcome(kind, f"{kind} sentence.", "generate a", 1) for kind in kinds]


@pytest.mark.parametrize(
    ("status", "said", "what", "why"),
    [
        (0, [], "done", ""),
        (1, told("began", "late"), "again", "the store did not answer: late sentence."),
        (1, told("began", "expired"), "again", "the credentials have expired: expired sentence."),
        (1, told("began", "busy"), "again", "the GPUs are in use: busy sentence."),
        (1, told("changed"), "again", "the plan is out of date: changed sentence."),
        (1, told("began", "late", "mistake"), "stop", "mistake sentence."),
        (1, told("began", "full"), "stop", "full sentence."),
        (1, told("mistake"), "stop", "mistake sentence."),
        (1, told("began", "fault"), "blind", "a job failed without saying why: fault sentence."),
        (1, told("began"), "again", "a process was killed: generate a"),
        (-9, told("began"), "again", "Snakemake was killed by SIGKILL"),
        (1, [], "blind", "Snakemake failed without saying why (status 1)"),
        (2, [], "stop", "Snakemake refuses these arguments: see what it says above"),
    ],
)
def test_why_a_build_ended(status, said, what, why):
    ending = judge(status, said)
    assert (ending.what, ending.why, ending.progress) == (what, why, False)


def test_a_finished_job_is_progress():
    assert judge(1, [BEGAN, DONE, *told("late")]).progress


@given(st.integers(1, 100), st.floats(0, 1, exclude_max=True))
def test_pauses_grow_and_stay_bounded(failures, chance):
    limits = Limits(first_s=1, most_s=60)
    assert 0.5 <= limits.pause(failures, chance) <= 60
    assert limits.pause(failures + 1, chance) >= limits.pause(failures, chance)


class Bench:
    """A supervisor over the fake, in a folder of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.said = folder, []
        monkeypatch.setenv("FAKE_PLAN", str(folder))
        monkeypatch.setenv("DRAFTMILL_RUN", "of another build")
        monkeypatch.chdir(folder)

    def run(self, *steps: dict[str, Any], **limits: Any) -> int:
        (self.folder / "plan.json").write_text(json.dumps(steps))
        chosen = Limits(**{"first_s": 0.01, "most_s": 0.05, **limits})
        self.supervisor = Supervisor(["--cores", "1"], chosen, self.said.append, (sys.executable, str(FAKE)))
        return self.supervisor.run()

    @property
    def starts(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "starts").read_text().splitlines()]


@pytest.fixture
def bench(tmp_path, monkeypatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def test_what_passes_is_started_again_with_the_same_arguments_and_its_reason_said(bench):
    late = {"status": 1, "tell": [["late", "s3://b does not answer."]]}
    assert bench.run(late, {"kill": True}, late, {"status": 0}) == 0
    assert [start["arguments"] for start in bench.starts] == [["--cores", "1"]] * 4
    assert [start["run"] for start in bench.starts] == [None] * 4, "each start is a run of its own"
    assert bench.said[0].startswith("the store did not answer: s3://b does not answer. Starting again in 0 s")
    assert "killed by SIGKILL" in bench.said[1]
    assert len(bench.said) == 3
    assert bench.supervisor.runs == {"fake-run"}


def test_a_mistake_is_not_made_twice(bench):
    assert bench.run({"status": 1, "tell": [["mistake", "The audit is over its limit."]]}) == 1
    assert len(bench.starts) == 1
    assert bench.said == ["Not started again, because a person must act: The audit is over its limit."]


def test_starts_without_progress_are_bounded(bench):
    assert bench.run({"status": 1, "tell": [["busy", "GPU gate."]]}, attempts=4) == 1
    assert len(bench.starts) == 4
    assert bench.said[-1].startswith("Given up, 4 starts in a row finished no job.")


def test_a_finished_job_begins_the_count_anew(bench):
    bad, good = {"status": 1, "tell": [["late", "x."]]}, {"status": 1, "tell": [["done", ""], ["late", "x."]]}
    assert bench.run(bad, bad, good, bad, bad, good, bad, {"status": 0}, attempts=3) == 0


def test_only_starts_without_a_finished_job_are_counted_aloud(bench):
    good, bad = {"status": 1, "tell": [["done", ""], ["late", "x."]]}, {"status": 1, "tell": [["late", "x."]]}
    assert bench.run(good, bad, bad, bad, attempts=3) == 1
    assert [said.partition("Starting again in 0 s")[2] for said in bench.said[:-1]] == [
        ".",
        " (1 start finished no job).",
        " (2 starts in a row finished no job).",
    ]
    assert len(bench.starts) == 4


def test_one_attempt_is_one_start(bench):
    assert bench.run({"status": 1, "tell": [["late", "x."]]}, attempts=1) == 1
    assert bench.said == [
        "Given up, 1 start finished no job. The last end: the store did not answer: x. Nothing finished is lost."
    ]


def test_what_shows_no_cause_is_tried_a_few_times_only(bench):
    assert bench.run({"status": 1, "tell": [["fault", "ZeroDivisionError()"]]}) == 1
    assert len(bench.starts) == 3


def test_time_is_bounded(bench):
    assert bench.run({"status": 1, "tell": [["late", "x."]]}, for_s=0.0) == 1
    assert bench.said == [
        "Given up, the time of 0 s is over. The last end: the store did not answer: x. Nothing finished is lost."
    ]


def test_jobs_that_outlive_a_killed_snakemake_are_gone_before_the_next_start(bench, monkeypatch):
    monkeypatch.setattr("draftmill.supervise._SETTLE_S", 0.2)
    assert bench.run({"child": True, "kill": True}, {"status": 0}) == 0
    group = bench.starts[0]["pid"]
    assert not group_lives(group)


def alive(pid: int) -> bool:
    return identify(pid) is not None


def group_lives(group: int) -> bool:
    return any(seen.group == group for seen in all_processes())


class Started:
    """The supervisor as a process of its own over a fake that waits."""

    def __init__(self, folder: Path, wait: str) -> None:
        (folder / "plan.json").write_text(json.dumps([{"wait": wait, "child": True}]))
        script = (
            "import sys\nfrom draftmill.supervise import Supervisor\n"
            f"sys.exit(Supervisor([], program=(sys.executable, {str(FAKE)!r})).run())\n"
        )
        environment = {**os.environ, "FAKE_PLAN": str(folder)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", script],
            cwd=folder,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
            # Whoever runs the tests in the background of a shell has Ctrl-C ignored, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        until((folder / "waiting").exists, "the fake waits")
        self.child = json.loads((folder / "starts").read_text())["pid"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_ends_all_in_order(tmp_path, number):
    started = Started(tmp_path, "polite")
    started.process.send_signal(number)
    assert started.process.wait(60) == 130
    assert "Stopped as asked" in started.process.stderr.read()
    assert not group_lives(started.child)


def test_a_hangup_is_ignored_where_it_was_ignored(bench, monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Supervisor([])._signals_passed_on():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_two_signals_end_all_at_once(tmp_path):
    started = Started(tmp_path, "deaf")
    started.process.send_signal(signal.SIGINT)
    until((tmp_path / "heard").exists, "the first Ctrl-C reaches it")
    assert alive(started.child)
    started.process.send_signal(signal.SIGINT)
    assert started.process.wait(60) == 130
    assert not group_lives(started.child)


def test_a_killed_supervisor_takes_snakemake_with_it(tmp_path):
    started = Started(tmp_path, "deaf")
    started.process.kill()
    started.process.wait()
    until(lambda: not alive(started.child), "Snakemake ends with its supervisor")
    os.killpg(started.child, signal.SIGKILL)  # the fake's child follows nobody


def test_a_lock_of_a_killed_snakemake_of_ours_is_removed(bench):
    locked = {"status": 1, "lock": True}
    assert bench.run({"lock": True, "kill": True}, locked, locked, {"status": 0}) == 0
    assert ["--cores", "1", "--unlock"] in [start["arguments"] for start in bench.starts]
    assert "The lock of a killed Snakemake is removed." in bench.said


def test_a_lock_of_somebody_else_is_left_alone(bench, monkeypatch):
    monkeypatch.setattr(supervise_locks, "stale", lambda folder: False)
    assert bench.run({"status": 1, "lock": True}) == 1
    assert supervise_locks.locked(bench.folder)
    assert bench.said[-1].endswith("run `snakemake --unlock` with the same arguments.")


def test_a_lock_is_stale_only_when_its_holder_is_dead_and_nobody_works_there(tmp_path):
    assert not supervise_locks.stale(tmp_path), "nothing is known of a holder"
    holder = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    supervise_locks.remember(tmp_path, holder.pid)
    assert not supervise_locks.stale(tmp_path)
    holder.kill()
    holder.wait()
    assert supervise_locks.stale(tmp_path)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "snakemake"], cwd=tmp_path)
    try:
        until(lambda: not supervise_locks.stale(tmp_path), "a Snakemake at work in the folder is seen")
    finally:
        other.kill()
        other.wait()
    record = tmp_path / ".draftmill/supervised.json"
    elsewhere = {**json.loads(record.read_text()), "host": "another"}
    elsewhere["holder"]["boot"] = "another"
    record.write_text(json.dumps(elsewhere))
    assert not supervise_locks.stale(tmp_path), "a dead process of another host cannot be known"


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [([], "."), (["--directory", "a"], "a"), (["-d", "a", "-n"], "a"), (["--directory=a/b"], "a/b")],
)
def test_the_working_directory_is_snakemake_s(arguments, folder):
    assert Supervisor(arguments).folder == Path(folder)


# Outcomes -------------------------------------------------------------------------------------------------------------


def test_what_processes_tell_is_read_in_order_and_damage_is_passed_over(tmp_path, monkeypatch):
    path = tmp_path / "outcomes"
    path.write_text('{"kind": "no kind"}\n[1]\n{"cut')
    monkeypatch.setenv(outcomes.VARIABLE, str(path))
    path.open("a").write("\n")
    outcomes.note("late", "a sentence", "generate a")
    assert [(one.kind, one.sentence, one.job) for one in outcomes.read(path)] == [("late", "a sentence", "generate a")]


def test_without_a_supervisor_nothing_is_told(tmp_path, monkeypatch):
    monkeypatch.delenv(outcomes.VARIABLE, raising=False)
    outcomes.note("late")
    monkeypatch.setenv(outcomes.VARIABLE, str(tmp_path / "gone"))
    outcomes.note("late")
    assert not (tmp_path / "gone").exists()


def test_a_user_s_mistake_while_the_snakefile_is_read_is_told(tmp_path, monkeypatch):
    path = tmp_path / "outcomes"
    path.touch()
    monkeypatch.setenv(outcomes.VARIABLE, str(path))
    with pytest.raises(UserError), outcomes.noted():
        raise UserError("What, where, what to do.")
    assert [(one.kind, one.sentence) for one in outcomes.read(path)] == [("mistake", "What, where, what to do.")]


@pytest.mark.parametrize(
    ("error", "kinds"),
    [
        (ConnectionResetError("reset"), ["late"]),
        (OSError(errno.ENOSPC, "No space left on device"), ["full"]),
        (KeyError("no trouble of the store"), []),
    ],
)
def test_a_transfer_of_snakemake_s_own_that_fails_tells_why(tmp_path, monkeypatch, error, kinds):
    def request():
        raise error

    path = tmp_path / "outcomes"
    path.touch()
    monkeypatch.setenv(outcomes.VARIABLE, str(path))
    with pytest.raises(type(error)):
        TellingPatience(0.0, lambda text: None, "s3://b")(request)
    assert [one.kind for one in outcomes.read(path)] == kinds
